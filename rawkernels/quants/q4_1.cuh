// Q4_1: 32 weights in 20 bytes: d f16 @0, m f16 @2, nibbles @4. w = d n + m. Blocks are 4-byte aligned.
#pragma once
#include "quants/codes.cuh"

constexpr u32 BLOCK_SIZE = 32, BLOCK_BYTES = 20, SCALE_RUN = 32;

DEVICE u32 scale_of(const u8* block, u32 i) {
    (void)i;
    return *reinterpret_cast<const u32*>(block);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
    load_aligned_nibbles(block + 4, i, codes);
}

DEVICE void values_of(const u32 (&codes)[2], u32 scales, float* w) {
    const float d = low_half(scales), m = high_half(scales);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = add_rn(mul_rn(d, float_of_code(codes[j / 4], j % 4, 0)), m);
}

DEVICE void halves_of(const u32 (&codes)[2], u32 scales, u32 (&w)[4]) {
    h2_of_codes<0>(codes, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_fma(w[j], byte_perm(scales, 0, 0x1010), byte_perm(scales, 0, 0x3232));
}

#include "quants/coded.cuh"
