// Q5_K: 256 weights in 176 bytes: as Q4_K, with the fifth bits @16 (byte i % 32, bit i / 32) and nibbles @48.
#pragma once
#include "quants/k_scales.cuh"

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const u8* block = row + static_cast<i64>(k / 256) * 176;
    const u32 scales = *reinterpret_cast<const u32*>(block);
    const i32 i = k % 256;
    const i32 sub = i / 32;
    i32 sc, m;
    k_scale_min(block + 4, sub, sc, m);
    const float d = to_f32(f16_from_bits(static_cast<u16>(scales & 0xFFFF))) * static_cast<float>(sc);
    const float minimum = to_f32(f16_from_bits(static_cast<u16>(scales >> 16))) * static_cast<float>(m);
    const u32* fifth = reinterpret_cast<const u32*>(block + 16 + i % 32);
    const u32* nibbles = reinterpret_cast<const u32*>(block + 48 + 32 * (i / 64) + i % 32);
    const i32 shift = 4 * (sub % 2);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const u32 low = (nibbles[j / 4] >> (8 * (j % 4) + shift)) & 15;
        const u32 high = (fifth[j / 4] >> (8 * (j % 4) + sub)) & 1;
        w[j] = sub_rn(mul_rn(d, static_cast<float>(low | (high << 4))), minimum);
    }
}
