// Q5_0: 32 weights in 22 bytes: d f16 @0, fifth bits @2, nibbles @6. w = d (q - 16). Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

// d, and eight weights' q.
DEVICE u16 codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 32) * 22;
    const u32 i = static_cast<u32>(k) % 32;
    const u32 fifth = load_word(block + 2) >> i;
    load_bytes8(block + 6 + i % 16, codes);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        codes[j] = (codes[j] >> i / 16 * 4 & 0x0F0F0F0Fu) | spread_bits(fifth >> 4 * j) << 4;
    }
    return *reinterpret_cast<const u16*>(block);
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const float d = f16_bits_to_f32(codes8(row, k, codes));
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = d * float_of_code(codes[j / 4], j % 4, 16);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const u16 d = codes8(row, k, codes);
    h2_scale<16>(codes, d, w);
}
