// Q3_K: 256 weights in 110 bytes: third bits @0 (byte i % 32, bit i / 32), pairs of bits @32, sixteen 6-bit scales @96
// (low nibbles in 8 bytes, high pairs in 4), d f16 @108. Blocks are 2-byte aligned. w = (d (sc - 32)) (q - 4).
#pragma once
#include "quants/codes.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 110, SCALE_RUN = 16;

DEVICE float scale_of(const u8* block, u32 i) {
    const u32 j = i / 16;
    const u32 scale = (block[96 + j % 8] >> j / 8 * 4 & 15) | (block[104 + j % 4] >> j / 4 * 2 & 3) << 4;
    return f16_bits_to_f32(*reinterpret_cast<const u16*>(block + 108)) * float_of_code(scale, 0, 32);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    u32 third[N][2];
    load_bytes(block + i % 32, third);
    load_bytes(block + 32 + i / 128 * 32 + i % 32, codes);
    take_bits(third, i / 32, 0x01010101u);
    take_bits(codes, i % 128 / 32 * 2, 0x03030303u);
    add_bits(codes, third, 2);
}

DEVICE void values_of(const u32 (&codes)[2], float scale, float* w) { scaled_values<4>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], float scale, u32 (&w)[4]) { h2_scale<4>(codes, scale, w); }

#include "quants/coded.cuh"
