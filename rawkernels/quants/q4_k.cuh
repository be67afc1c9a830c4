// Q4_K: 256 weights in 144 bytes: scales @0 (k_scales.cuh), nibbles @16. 16-byte aligned.
// Of each 64 weights the first 32 are the low nibbles of 32 bytes, the others the high ones. w = (d sc) n - dmin m.
#pragma once
#include "quants/k_scales.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 144, SCALE_RUN = 32;

DEVICE KScale scale_of(const u8* block, u32 i) {
    return k_scale(block, i / 32);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    load_pairs(block + 16 + i / 64 * 32 + i % 32, codes);
    take_bits(codes, i / 32 % 2 * 4, 0x0F0F0F0Fu);
}

DEVICE void values_of(const u32 (&codes)[2], KScale scale, float* w) { k_values(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], KScale scale, u32 (&w)[4]) { k_halves<8>(codes, scale, w); }

#include "quants/coded.cuh"
