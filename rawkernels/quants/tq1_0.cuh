// TQ1_0: 256 weights in 54 bytes, five to a byte (four in the last four bytes), d f16 @52. w = d (t - 1), where t is a
// digit of byte / 256 to base 3: that of weight i of the first 160 is digit i / 32 of byte i % 32; of the next 80, digit
// i / 16 of byte 32 + i % 16; of the last 16, digit i / 4 of byte 48 + i % 4. Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 54, SCALE_RUN = 256;

// A digit of each of four bytes, two at a time: 81 times a byte stays within 16 bits.
DEVICE u32 ternary_digits(u32 bytes, u32 digit) {
    const u32 power = static_cast<u32>(0x511B090301ull >> 8 * digit) & 255;
    const u32 even = (bytes & 0x00FF00FFu) * power & 0x00FF00FFu;
    const u32 odd = (bytes >> 8 & 0x00FF00FFu) * power & 0x00FF00FFu;
    return (even * 3 >> 8 & 0x00030003u) | (odd * 3 & 0x03000300u);
}

DEVICE u16 scale_of(const u8* block, u32 i) {
    (void)i;
    return *reinterpret_cast<const u16*>(block + 52);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
#pragma unroll
    for (u32 j = 0; j < 2 * N; j++) {
        const u32 at = i + 4 * j;
        const u32 byte = at < 160 ? at % 32 : at < 240 ? 32 + at % 16 : 48;
        const u32 digit = at < 160 ? at / 32 : at < 240 ? (at - 160) / 16 : (at - 240) / 4;
        codes[j / 2][j % 2] = ternary_digits(load_word(block + byte), digit);
    }
}

DEVICE void values_of(const u32 (&codes)[2], u16 scale, float* w) { scaled_values<1>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], u16 scale, u32 (&w)[4]) { h2_scale<1>(codes, scale, w); }

#include "quants/coded.cuh"
