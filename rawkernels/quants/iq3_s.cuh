// IQ3_S: 256 weights in 110 bytes: d f16 @0, low bytes of the entry numbers of 4 weights @2, ninth bits @66, signs @74,
// 4-bit scales of 32 weights @106. w = (d (1 + 2 sc)) entry. Blocks are 2-byte aligned.
#pragma once
#include "quants/grid.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 110;

DEVICE GridCodes codes8(const u8* RESTRICT row, i32 k) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / BLOCK_SIZE) * BLOCK_BYTES;
    const u32 i = static_cast<u32>(k) % BLOCK_SIZE;
    const float d = f16_bits_to_f32(*reinterpret_cast<const u16*>(block));
    GridCodes found;
    const u32 j = i / 4;  // even: both entries have their ninth bits in one byte
    const u32 ninth = block[66 + j / 8] >> j % 8;
    const u32 scale = block[106 + i / 64] >> i % 64 / 32 * 4 & 15;
    grid_entries(found, block[2 + j] | (ninth & 1) << 8, block[3 + j] | (ninth >> 1 & 1) << 8);
    found.signs = block[74 + i / 8];
    found.scale = d * float_of_code(1 + 2 * scale, 0, 0);
    return found;
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) { grid_decode8(codes8(row, k), w); }

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) { grid_decode8_half2(codes8(row, k), w); }
