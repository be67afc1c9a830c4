// Q2_K: 256 weights in 84 bytes: scale and minimum of 16 weights as the nibbles of a byte @0, pairs of bits @16, d f16
// @80, dmin f16 @82. Of each 128 weights the first 32 are the lowest bits of 32 bytes. w = (d sc) q - dmin m. Blocks are
// 4-byte aligned.
#pragma once
#include "quants/k_scales.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 84, SCALE_RUN = 16;

DEVICE KScale scale_of(const u8* block, u32 i) {
    const u32 scale = block[i / 16];
    const u32 ds = *reinterpret_cast<const u32*>(block + 80);
    return {low_half(ds) * float_of_code(scale & 15, 0, 0), high_half(ds) * float_of_code(scale >> 4, 0, 0)};
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    load_words(block + 16 + i / 128 * 32 + i % 32, codes);
    take_bits(codes, i % 128 / 32 * 2, 0x03030303u);
}

DEVICE void values_of(const u32 (&codes)[2], KScale scale, float* w) { k_values(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], KScale scale, u32 (&w)[4]) { k_halves<2>(codes, scale, w); }

#include "quants/coded.cuh"
