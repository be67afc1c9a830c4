// Q2_K: 256 weights in 84 bytes: scale and minimum of 16 weights as the nibbles of a byte @0, pairs of bits @16, d f16
// @80, dmin f16 @82. Of each 128 weights the first 32 are the lowest bits of 32 bytes. w = (d sc) q - dmin m. Blocks are
// 4-byte aligned.
#pragma once
#include "quants/k_scales.cuh"

DEVICE KScale codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 256) * 84;
    const u32 i = static_cast<u32>(k) % 256;
    const u32* pairs = reinterpret_cast<const u32*>(block + 16 + i / 128 * 32 + i % 32);
    codes[0] = pairs[0] >> i % 128 / 32 * 2 & 0x03030303u;
    codes[1] = pairs[1] >> i % 128 / 32 * 2 & 0x03030303u;
    const u32 scale = block[i / 16];
    const u32 ds = *reinterpret_cast<const u32*>(block + 80);
    return {low_half(ds) * float_of_code(scale & 15, 0, 0), high_half(ds) * float_of_code(scale >> 4, 0, 0)};
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const KScale scale = codes8(row, k, codes);
    k_decode8(codes, scale, w);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const KScale scale = codes8(row, k, codes);
    k_decode8_half2<2>(codes, scale, w);
}
