// NVFP4: 64 weights in 36 bytes: the scales of 16 weights each as unsigned E4M3 @0, nibbles @4, 8 bytes for 16 weights.
// w = (scale / 2) level(n), levels being doubled E2M1 numbers. Blocks are 4-byte aligned.
#pragma once
#include "quants/levels.cuh"

// Half the scale, and eight weights' level + 128.
DEVICE float codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 64) * 36;
    const u32 i = static_cast<u32>(k) % 64;
    const u32* nibbles = reinterpret_cast<const u32*>(block + 4 + i / 16 * 8);
    codes[0] = nibbles[0] >> i % 16 / 8 * 4 & 0x0F0F0F0Fu;
    codes[1] = nibbles[1] >> i % 16 / 8 * 4 & 0x0F0F0F0Fu;
    fp4_levels(codes);
    const u32 v = block[i / 16];
    const u32 exponent = v >> 3 & 15, mantissa = v & 7;
    if (v == 0x7F) return 0;
    if (exponent == 0) return float_of_code(mantissa, 0, 0) * (1.0f / 1024);
    return f32_from_bits((exponent - 8 + 127) << 23 | mantissa << 20);
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = d * float_of_code(codes[j / 4], j % 4, 128);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
    h2_scale<128>(codes, d, w);
}
