// Q8_0: 32 weights in 34 bytes: d f16 @0, int8 @2. w = d q. Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

// d, and eight weights' q + 128.
DEVICE u16 codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 32) * 34;
    load_bytes8(block + 2 + static_cast<u32>(k) % 32, codes);
    codes[0] ^= 0x80808080u;
    codes[1] ^= 0x80808080u;
    return *reinterpret_cast<const u16*>(block);
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const float d = f16_bits_to_f32(codes8(row, k, codes));
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = d * float_of_code(codes[j / 4], j % 4, 128);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const u16 d = codes8(row, k, codes);
    h2_scale<128>(codes, d, w);
}
