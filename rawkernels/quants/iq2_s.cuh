// IQ2_S: 256 weights in 82 bytes: d f16 @0, low bytes of the entry numbers of 8 weights @2, signs @34, high pairs of bits
// @66, 4-bit scales of 16 weights @74. w = (d (0.5 + sc) / 4) entry. Blocks are 2-byte aligned.
#pragma once
#include "quants/grid.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 82;

DEVICE GridCodes codes8(const u8* RESTRICT row, i32 k) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / BLOCK_SIZE) * BLOCK_BYTES;
    const u32 i = static_cast<u32>(k) % BLOCK_SIZE;
    const float d = f16_bits_to_f32(*reinterpret_cast<const u16*>(block));
    GridCodes found;
    const u32 j = i / 8;
    const u32 scale = block[74 + i / 32] >> i % 32 / 16 * 4 & 15;
    grid_entry(found, block[2 + j] | (block[66 + j / 4] >> j % 4 * 2 & 3u) << 8);
    found.signs = block[34 + j];
    found.scale = d * (0.5f + float_of_code(scale, 0, 0)) * 0.25f;
    return found;
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) { grid_decode8(codes8(row, k), w); }

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) { grid_decode8_half2(codes8(row, k), w); }
