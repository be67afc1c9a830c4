// Scales of K formats with a minimum: w = (d scale) q - dmin minimum.
#pragma once
#include "quants/codes.cuh"

struct KScale {
    float d, minimum;  // d scale, dmin minimum
};

// The head of Q4_K and Q5_K blocks, which are 16-byte aligned: d f16 @0, dmin f16 @2, and eight pairs of 6-bit scale and
// minimum in the 12 bytes @4. Of sub-block j = 0..7.
DEVICE KScale k_scale(const u8* RESTRICT block, u32 j) {
    const u32x4 head = load16<u32x4>(block);
    const u32 shift = j % 4 * 8;
    const u32 a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
    // Both as the last places of two f16 of size 1024.
    const u32 first = (a & 63) | (b & 63) << 16;
    const u32 second = (c & 15) | (a >> 2 & 48) | (c << 12 & 0xF0000u) | (b << 14 & 0x300000u);
    const u32 pair = h2_sub((j < 4 ? first : second) | 0x64006400u, 0x64006400u);
    return {low_half(head.x) * low_half(pair), high_half(head.x) * high_half(pair)};
}

DEVICE void k_values(const u32 (&codes)[2], KScale scale, float* w) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        w[j] = sub_rn(mul_rn(scale.d, float_of_code(codes[j / 4], j % 4, 0)), scale.minimum);
    }
}

// As (d scale) (q - CENTRE) + (CENTRE d scale - dmin minimum): both terms are about as large as the weights, so that
// rounding them to f16 costs no more than rounding the weights.
template <int CENTRE>
DEVICE void k_halves(const u32 (&codes)[2], KScale scale, u32 (&w)[4]) {
    const u32 pair = h2_pack(H2_UP * scale.d, fmaf(scale.d, static_cast<float>(CENTRE), -scale.minimum));
    h2_of_codes_down<CENTRE>(codes, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_fma(w[j], byte_perm(pair, 0, 0x1010), byte_perm(pair, 0, 0x3232));
}
