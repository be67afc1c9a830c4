// NVFP4: 64 weights in 36 bytes: the scales of 16 weights each as unsigned E4M3 @0, nibbles @4, 8 bytes for 16 weights.
// w = (scale / 2) level(n), levels being doubled E2M1 numbers; codes are level + 128. Blocks are 4-byte aligned.
#pragma once
#include "quants/levels.cuh"

constexpr u32 BLOCK_SIZE = 64, BLOCK_BYTES = 36, SCALE_RUN = 16;

DEVICE float scale_of(const u8* block, u32 i) {
    const u32 v = block[i / 16];
    const u32 exponent = v >> 3 & 15, mantissa = v & 7;
    if (v == 0x7F) return 0;
    if (exponent == 0) return float_of_code(mantissa, 0, 0) * (1.0f / 1024);
    return f32_from_bits((exponent - 8 + 127) << 23 | mantissa << 20);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
#pragma unroll
    for (u32 j = 0; j < N; j++) {
        const u32* nibbles = reinterpret_cast<const u32*>(block + 4 + (i + 8 * j) / 16 * 8);
        const u32 shift = (i + 8 * j) % 16 / 8 * 4;
        codes[j][0] = nibbles[0] >> shift & 0x0F0F0F0Fu;
        codes[j][1] = nibbles[1] >> shift & 0x0F0F0F0Fu;
    }
    fp4_levels(codes);
}

DEVICE void values_of(const u32 (&codes)[2], float scale, float* w) { scaled_values<128>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], float scale, u32 (&w)[4]) { h2_scale<128>(codes, scale, w); }

#include "quants/coded.cuh"
