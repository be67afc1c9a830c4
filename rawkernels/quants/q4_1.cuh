// Q4_1: 32 weights in 20 bytes: d f16 @0, m f16 @2, nibbles @4. w = d n + m. Blocks are 4-byte aligned.
#pragma once
#include "quants/codes.cuh"

// d and m, and the nibbles of eight weights.
DEVICE u32 codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u32* block = reinterpret_cast<const u32*>(row + static_cast<u64>(static_cast<u32>(k) / 32) * 20);
    const u32 i = static_cast<u32>(k) % 32;
    const u32 shift = i / 16 * 4;
    codes[0] = block[1 + i % 16 / 4] >> shift & 0x0F0F0F0Fu;
    codes[1] = block[2 + i % 16 / 4] >> shift & 0x0F0F0F0Fu;
    return block[0];
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const u32 scales = codes8(row, k, codes);
    const float d = low_half(scales), m = high_half(scales);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = add_rn(mul_rn(d, float_of_code(codes[j / 4], j % 4, 0)), m);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const u32 scales = codes8(row, k, codes);
    h2_of_codes<0>(codes, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_fma(w[j], byte_perm(scales, 0, 0x1010), byte_perm(scales, 0, 0x3232));
}
