// TQ2_0: 256 weights in 66 bytes: pairs of bits @0, d f16 @64. w = d (q - 1). Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 66, SCALE_RUN = 256;

DEVICE u16 scale_of(const u8* block, u32 i) {
    (void)i;
    return *reinterpret_cast<const u16*>(block + 64);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    load_bytes(block + i / 128 * 32 + i % 32, codes);
    take_bits(codes, i % 128 / 32 * 2, 0x03030303u);
}

DEVICE void values_of(const u32 (&codes)[2], u16 scale, float* w) { scaled_values<1>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], u16 scale, u32 (&w)[4]) { h2_scale<1>(codes, scale, w); }

#include "quants/coded.cuh"
