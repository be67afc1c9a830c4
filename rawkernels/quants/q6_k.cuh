// Q6_K: 256 weights in 210 bytes: low nibbles @0, high pairs of bits @128, int8 scales @192, d f16 @208.
// Blocks are 2-byte aligned. w = (d sc) (q - 32).
#pragma once
#include "quants/codes.cuh"

// d sc, and eight weights' q.
DEVICE float codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 256) * 210;
    const u32 i = static_cast<u32>(k) % 256;
    const u32 half = i / 128, quarter = i / 32 % 4, l = i % 32;
    u32 low[2], high[2];
    load_bytes8(block + half * 64 + quarter % 2 * 32 + l, low);
    load_bytes8(block + 128 + half * 32 + l, high);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        codes[j] = (low[j] >> quarter / 2 * 4 & 0x0F0F0F0Fu) | (high[j] >> quarter * 2 & 0x03030303u) << 4;
    }
    const float d = f16_bits_to_f32(*reinterpret_cast<const u16*>(block + 208));
    return d * float_of_code(block[192 + i / 16] ^ 128, 0, 128);
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = d * float_of_code(codes[j / 4], j % 4, 32);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
    h2_scale<32>(codes, d, w);
}
