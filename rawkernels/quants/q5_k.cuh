// Q5_K: 256 weights in 176 bytes: as Q4_K, with the fifth bits @16 (byte i % 32, bit i / 32) and nibbles @48.
#pragma once
#include "quants/k_scales.cuh"

DEVICE KScale codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 256) * 176;
    const u32 i = static_cast<u32>(k) % 256;
    const u64 fifth = *reinterpret_cast<const u64*>(block + 16 + i % 32);
    const u64 nibbles = *reinterpret_cast<const u64*>(block + 48 + i / 64 * 32 + i % 32);
    const u32 sub = i / 32;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 low = static_cast<u32>(nibbles >> 32 * j) >> sub % 2 * 4 & 0x0F0F0F0Fu;
        codes[j] = low | (static_cast<u32>(fifth >> 32 * j) >> sub & 0x01010101u) << 4;
    }
    return k_scale(block, sub);
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
    k_decode8_half2<16>(codes, scale, w);
}
