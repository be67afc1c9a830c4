// TQ2_0: 256 weights in 66 bytes: pairs of bits @0, d f16 @64. w = d (q - 1). Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

// d, and eight weights' q.
DEVICE float codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 256) * 66;
    const u32 i = static_cast<u32>(k) % 256;
    load_bytes8(block + i / 128 * 32 + i % 32, codes);
    codes[0] = codes[0] >> i % 128 / 32 * 2 & 0x03030303u;
    codes[1] = codes[1] >> i % 128 / 32 * 2 & 0x03030303u;
    return f16_bits_to_f32(*reinterpret_cast<const u16*>(block + 64));
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = d * float_of_code(codes[j / 4], j % 4, 1);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
    h2_scale<1>(codes, d, w);
}
