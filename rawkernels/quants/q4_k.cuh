// Q4_K: 256 weights in 144 bytes: scales @0 (k_scales.cuh), nibbles @16. 16-byte aligned.
// Of each 64 weights the first 32 are the low nibbles of 32 bytes, the others the high ones. w = (d sc) n - dmin m.
#pragma once
#include "quants/k_scales.cuh"

DEVICE KScale codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 256) * 144;
    const u32 i = static_cast<u32>(k) % 256;
    const u64 nibbles = *reinterpret_cast<const u64*>(block + 16 + i / 64 * 32 + i % 32);
    const u32 shift = i / 32 % 2 * 4;
    codes[0] = static_cast<u32>(nibbles) >> shift & 0x0F0F0F0Fu;
    codes[1] = static_cast<u32>(nibbles >> 32) >> shift & 0x0F0F0F0Fu;
    return k_scale(block, i / 32);
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const KScale scale = codes8(row, k, codes);
    k_decode8(codes, scale, w);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const KScale scale = codes8(row, k, codes);
    k_decode8_half2<8>(codes, scale, w);
}
