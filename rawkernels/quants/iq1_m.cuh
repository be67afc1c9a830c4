// IQ1_M: 256 weights in 56 bytes: low bytes of the entry numbers of 8 weights @0, @32 for each of them three high bits and
// whether delta is negative, @48 four words: 3-bit scales of 16 weights, and a nibble of d. w = (d (2 sc + 1)) (entry +
// delta). Blocks are 8-byte aligned.
#pragma once
#include "quants/iq1.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 56;

DEVICE GridCodes codes8(const u8* RESTRICT row, i32 k) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / BLOCK_SIZE) * BLOCK_BYTES;
    const u32 i = static_cast<u32>(k) % BLOCK_SIZE;
    const u16* words = reinterpret_cast<const u16*>(block + 48);
    const u32 bits = words[0] >> 12 | (words[1] >> 8 & 0xF0) | (words[2] >> 4 & 0xF00) | (words[3] & 0xF000);
    const u32 high = block[32 + i / 16] >> i % 16 / 8 * 4;
    const u32 scale = words[i / 64] >> i % 64 / 16 * 3 & 7;
    GridCodes found;
    grid_entry(found, block[i / 8] | (high & 7) << 8);
    found.signs = high >> 3 & 1;
    found.scale = f16_bits_to_f32(static_cast<u16>(bits)) * float_of_code(2 * scale + 1, 0, 0);
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
