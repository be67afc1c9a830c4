// Q4_0: 32 weights in 18 bytes: d f16 @0, nibbles @2. w = d (n - 8). Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

constexpr u32 BLOCK_SIZE = 32, BLOCK_BYTES = 18, SCALE_RUN = 32;

DEVICE u16 scale_of(const u8* block, u32 i) {
    (void)i;
    return *reinterpret_cast<const u16*>(block + 0);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    load_nibbles(block + 2, i, codes);
}

DEVICE void values_of(const u32 (&codes)[2], u16 scale, float* w) { scaled_values<8>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], u16 scale, u32 (&w)[4]) { h2_scale<8>(codes, scale, w); }

#include "quants/coded.cuh"
