// MXFP4: 32 weights in 17 bytes: exponent @0, nibbles @1. w = 2^(e - 128) level(n), levels being doubled E2M1 numbers.
#pragma once
#include "quants/levels.cuh"

// The scale, and eight weights' level + 128.
DEVICE float codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 32) * 17;
    const u32 i = static_cast<u32>(k) % 32;
    load_bytes8(block + 1 + i % 16, codes);
    codes[0] = codes[0] >> i / 16 * 4 & 0x0F0F0F0Fu;
    codes[1] = codes[1] >> i / 16 * 4 & 0x0F0F0F0Fu;
    fp4_levels(codes);
    const u32 e = block[0];
    return f32_from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = d * float_of_code(codes[j / 4], j % 4, 128);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
    h2_scale<128>(codes, d, w);
}
