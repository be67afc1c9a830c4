// Q3_K: 256 weights in 110 bytes: third bits @0 (byte i % 32, bit i / 32), pairs of bits @32, sixteen 6-bit scales @96
// (low nibbles in 8 bytes, high pairs in 4), d f16 @108. Blocks are 2-byte aligned. w = (d (sc - 32)) (q - 4).
#pragma once
#include "quants/codes.cuh"

// d (sc - 32), and eight weights' q.
DEVICE float codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 256) * 110;
    const u32 i = static_cast<u32>(k) % 256;
    const u32 j = i / 16;
    u32 third[2], pairs[2];
    load_bytes8(block + i % 32, third);
    load_bytes8(block + 32 + i / 128 * 32 + i % 32, pairs);
#pragma unroll
    for (int word = 0; word < 2; word++) {
        codes[word] = (pairs[word] >> i % 128 / 32 * 2 & 0x03030303u) | (third[word] >> i / 32 & 0x01010101u) << 2;
    }
    const u32 scale = (block[96 + j % 8] >> j / 8 * 4 & 15) | (block[104 + j % 4] >> j / 4 * 2 & 3) << 4;
    return f16_bits_to_f32(*reinterpret_cast<const u16*>(block + 108)) * float_of_code(scale, 0, 32);
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = d * float_of_code(codes[j / 4], j % 4, 4);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
    h2_scale<4>(codes, d, w);
}
