// IQ1_S: 256 weights in 50 bytes: d f16 @0, low bytes of the entry numbers of 8 weights @2, and @34 for each 32 weights
// four times three high bits, a scale, and whether delta is negative. w = (d (2 sc + 1)) (entry + delta). Blocks are 2-byte
// aligned.
#pragma once
#include "quants/iq1.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 50;

DEVICE GridCodes codes8(const u8* RESTRICT row, i32 k) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / BLOCK_SIZE) * BLOCK_BYTES;
    const u32 i = static_cast<u32>(k) % BLOCK_SIZE;
    const float d = f16_bits_to_f32(*reinterpret_cast<const u16*>(block));
    GridCodes found;
    const u32 high = *reinterpret_cast<const u16*>(block + 34 + i / 32 * 2);
    grid_entry(found, block[2 + i / 8] | (high >> i % 32 / 8 * 3 & 7) << 8);
    found.signs = high >> 15;
    found.scale = d * float_of_code(2 * (high >> 12 & 7) + 1, 0, 0);
    return found;
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const GridCodes found = codes8(row, k);
    iq1_decode8(found, found.signs, w);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    const GridCodes found = codes8(row, k);
    iq1_decode8_half2(found, found.signs, w);
}
