// IQ4_NL: 32 weights in 18 bytes: d f16 @0, nibbles @2. w = d level(n). Blocks are 2-byte aligned.
#pragma once
#include "quants/levels.cuh"

// d, and eight weights' level + 128.
DEVICE float codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 32) * 18;
    const u32 i = static_cast<u32>(k) % 32;
    load_bytes8(block + 2 + i % 16, codes);
    codes[0] = codes[0] >> i / 16 * 4 & 0x0F0F0F0Fu;
    codes[1] = codes[1] >> i / 16 * 4 & 0x0F0F0F0Fu;
    iq4_levels(codes);
    return f16_bits_to_f32(*reinterpret_cast<const u16*>(block));
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
