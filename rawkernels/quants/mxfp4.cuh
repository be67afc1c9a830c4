// MXFP4: 32 weights in 17 bytes: exponent @0, nibbles @1. w = 2^(e - 128) level(n), levels being doubled E2M1 numbers;
// codes are level + 128.
#pragma once
#include "quants/levels.cuh"

constexpr u32 BLOCK_SIZE = 32, BLOCK_BYTES = 17, SCALE_RUN = 32;

DEVICE float scale_of(const u8* block, u32 i) {
    (void)i;
    const u32 e = block[0];
    return f32_from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    load_nibbles(block + 1, i, codes);
    fp4_levels(codes);
}

DEVICE void values_of(const u32 (&codes)[2], float scale, float* w) { scaled_values<128>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], float scale, u32 (&w)[4]) { h2_scale<128>(codes, scale, w); }

#include "quants/coded.cuh"
