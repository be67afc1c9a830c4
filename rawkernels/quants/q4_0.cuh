// Q4_0: 32 weights in 18 bytes: d f16 @0, nibbles @2. w = d (n - 8). Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

// d, and the nibbles of eight weights.
DEVICE u16 codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 32) * 18;
    const u32 i = static_cast<u32>(k) % 32;
    load_bytes8(block + 2 + i % 16, codes);
    const u32 shift = i / 16 * 4;  // the second half of a block lies in the high nibbles
    codes[0] = codes[0] >> shift & 0x0F0F0F0Fu;
    codes[1] = codes[1] >> shift & 0x0F0F0F0Fu;
    return *reinterpret_cast<const u16*>(block);
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const float d = f16_bits_to_f32(codes8(row, k, codes));
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = d * float_of_code(codes[j / 4], j % 4, 8);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const u16 d = codes8(row, k, codes);
    h2_scale<8>(codes, d, w);
}
