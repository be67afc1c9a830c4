// Q4_K: 256 weights in 144 bytes: d f16 @0, dmin f16 @2, packed scales @4, nibbles @16. 16-byte aligned.
// Of each 64 weights the first 32 are the low nibbles of 32 bytes, the others the high ones. w = (d sc) n - dmin m.
#pragma once
#include "quants/k_scales.cuh"

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const u8* block = row + static_cast<i64>(k / 256) * 144;
    const u32 scales = *reinterpret_cast<const u32*>(block);
    const i32 i = k % 256;
    const i32 sub = i / 32;
    i32 sc, m;
    k_scale_min(block + 4, sub, sc, m);
    const float d = to_f32(f16_from_bits(static_cast<u16>(scales & 0xFFFF))) * static_cast<float>(sc);
    const float minimum = to_f32(f16_from_bits(static_cast<u16>(scales >> 16))) * static_cast<float>(m);
    const u32* nibbles = reinterpret_cast<const u32*>(block + 16 + 32 * (i / 64) + i % 32);
    const i32 shift = 4 * (sub % 2);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const u32 n = (nibbles[j / 4] >> (8 * (j % 4) + shift)) & 15;
        w[j] = sub_rn(mul_rn(d, static_cast<float>(n)), minimum);
    }
}
