// Q5_K: 256 weights in 176 bytes: as Q4_K, with the fifth bits @16 (byte i % 32, bit i / 32) and nibbles @48.
#pragma once
#include "quants/k_scales.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 176, SCALE_RUN = 32;

DEVICE KScale scale_of(const u8* block, u32 i) {
    return k_scale(block, i / 32);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    u32 fifth[N][2];
    load_pairs(block + 16 + i % 32, fifth);
    load_pairs(block + 48 + i / 64 * 32 + i % 32, codes);
    take_bits(fifth, i / 32, 0x01010101u);
    take_bits(codes, i / 32 % 2 * 4, 0x0F0F0F0Fu);
    add_bits(codes, fifth, 4);
}

DEVICE void values_of(const u32 (&codes)[2], KScale scale, float* w) { k_values(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], KScale scale, u32 (&w)[4]) { k_halves<16>(codes, scale, w); }

#include "quants/coded.cuh"
