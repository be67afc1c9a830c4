// Q5_0: 32 weights in 22 bytes: d f16 @0, fifth bits @2, nibbles @6. w = d (q - 16). Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

constexpr u32 BLOCK_SIZE = 32, BLOCK_BYTES = 22, SCALE_RUN = 32;

DEVICE u16 scale_of(const u8* block, u32 i) {
    (void)i;
    return *reinterpret_cast<const u16*>(block + 0);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    const u32 fifth = load_word(block + 2) >> i;
    load_nibbles(block + 6, i, codes);
#pragma unroll
    for (int j = 0; j < 2 * N; j++) codes[j / 2][j % 2] |= spread_bits(fifth >> 4 * j) << 4;
}

DEVICE void values_of(const u32 (&codes)[2], u16 scale, float* w) { scaled_values<16>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], u16 scale, u32 (&w)[4]) { h2_scale<16>(codes, scale, w); }

#include "quants/coded.cuh"
