// IQ4_XS: 256 weights in 136 bytes: d f16 @0, high pairs of the eight scales @2, their low nibbles @4, nibbles @8, 16
// bytes for 32 weights. w = (d (sc - 32)) level(n); codes are level + 128. Blocks are 8-byte aligned.
#pragma once
#include "quants/levels.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 136, SCALE_RUN = 32;

DEVICE float scale_of(const u8* block, u32 i) {
    const u64 head = *reinterpret_cast<const u64*>(block);
    const u32 low = static_cast<u32>(head >> 32) >> i / 32 * 4 & 15;
    const u32 high = static_cast<u32>(head) >> (16 + i / 32 * 2) & 3;
    return low_half(static_cast<u32>(head)) * float_of_code(low | high << 4, 0, 32);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    load_aligned_nibbles(block + 8 + i / 32 * 16, i % 32, codes);
    iq4_levels(codes);
}

DEVICE void values_of(const u32 (&codes)[2], float scale, float* w) { scaled_values<128>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], float scale, u32 (&w)[4]) { h2_scale<128>(codes, scale, w); }

#include "quants/coded.cuh"
