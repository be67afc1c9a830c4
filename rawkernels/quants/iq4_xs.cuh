// IQ4_XS: 256 weights in 136 bytes: d f16 @0, high pairs of the eight scales @2, their low nibbles @4, nibbles @8, 16
// bytes for 32 weights. w = (d (sc - 32)) level(n). Blocks are 8-byte aligned.
#pragma once
#include "quants/levels.cuh"

// d (sc - 32), and eight weights' level + 128.
DEVICE float codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 256) * 136;
    const u32 i = static_cast<u32>(k) % 256;
    const u32 j = i / 32;
    const u64 head = *reinterpret_cast<const u64*>(block);
    const u64 nibbles = *reinterpret_cast<const u64*>(block + 8 + j * 16 + i % 16);
    codes[0] = static_cast<u32>(nibbles) >> i % 32 / 16 * 4 & 0x0F0F0F0Fu;
    codes[1] = static_cast<u32>(nibbles >> 32) >> i % 32 / 16 * 4 & 0x0F0F0F0Fu;
    iq4_levels(codes);
    const u32 low = static_cast<u32>(head >> 32) >> 4 * j & 15;
    const u32 high = static_cast<u32>(head) >> (16 + 2 * j) & 3;
    return low_half(static_cast<u32>(head)) * float_of_code(low | high << 4, 0, 32);
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
