// Q6_K: 256 weights in 210 bytes: low nibbles @0, high pairs of bits @128, int8 scales @192, d f16 @208.
// Blocks are 2-byte aligned. w = (d sc) (q - 32).
#pragma once
#include "quants/codes.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 210, SCALE_RUN = 16;

DEVICE float scale_of(const u8* block, u32 i) {
    const float d = f16_bits_to_f32(*reinterpret_cast<const u16*>(block + 208));
    return d * float_of_code(block[192 + i / 16] ^ 128, 0, 128);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    const u32 quarter = i / 32 % 4;
    u32 high[N][2];
    load_bytes(block + i / 128 * 64 + quarter % 2 * 32 + i % 32, codes);
    load_bytes(block + 128 + i / 128 * 32 + i % 32, high);
    take_bits(codes, quarter / 2 * 4, 0x0F0F0F0Fu);
    take_bits(high, quarter * 2, 0x03030303u);
    add_bits(codes, high, 4);
}

DEVICE void values_of(const u32 (&codes)[2], float scale, float* w) { scaled_values<32>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], float scale, u32 (&w)[4]) { h2_scale<32>(codes, scale, w); }

#include "quants/coded.cuh"
