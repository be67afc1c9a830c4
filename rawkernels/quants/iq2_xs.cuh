// IQ2_XS: 256 weights in 74 bytes: d f16 @0, for each 8 weights a 9-bit entry number and seven signs @2, 4-bit scales of
// 16 weights @66. w = (d (0.5 + sc) / 4) entry. Blocks are 2-byte aligned.
#pragma once
#include "quants/grid.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 74;

DEVICE GridCodes codes8(const u8* RESTRICT row, i32 k) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / BLOCK_SIZE) * BLOCK_BYTES;
    const u32 i = static_cast<u32>(k) % BLOCK_SIZE;
    const float d = f16_bits_to_f32(*reinterpret_cast<const u16*>(block));
    GridCodes found;
    const u32 code = *reinterpret_cast<const u16*>(block + 2 + i / 8 * 2);
    const u32 scale = block[66 + i / 32] >> i % 32 / 16 * 4 & 15;
    grid_entry(found, code & 511);
    found.signs = even_signs(code >> 9);
    found.scale = d * (0.5f + float_of_code(scale, 0, 0)) * 0.25f;
    return found;
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) { grid_decode8(codes8(row, k), w); }

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) { grid_decode8_half2(codes8(row, k), w); }
