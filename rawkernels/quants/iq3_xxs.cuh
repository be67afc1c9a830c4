// IQ3_XXS: 256 weights in 98 bytes: d f16 @0, entry numbers of 4 weights @2, and @66 for each 32 weights a word with four
// times seven signs and a scale. w = (d (0.5 + sc) / 2) entry. Blocks are 2-byte aligned.
#pragma once
#include "quants/grid.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 98;

DEVICE GridCodes codes8(const u8* RESTRICT row, i32 k) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / BLOCK_SIZE) * BLOCK_BYTES;
    const u32 i = static_cast<u32>(k) % BLOCK_SIZE;
    const float d = f16_bits_to_f32(*reinterpret_cast<const u16*>(block));
    GridCodes found;
    const u32 word = load_word(block + 66 + i / 32 * 4);
    grid_entries(found, block[2 + i / 4], block[3 + i / 4]);
    found.signs = even_signs(word >> i % 32 / 8 * 7 & 127);
    found.scale = d * (0.5f + float_of_code(word >> 28, 0, 0)) * 0.5f;
    return found;
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) { grid_decode8(codes8(row, k), w); }

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) { grid_decode8_half2(codes8(row, k), w); }
