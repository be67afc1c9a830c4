// TQ1_0: 256 weights in 54 bytes, five to a byte (four in the last four bytes), d f16 @52. w = d (t - 1), where t is a
// digit of byte / 256 to base 3: that of weight i of the first 160 is digit i / 32 of byte i % 32; of the next 80, digit
// i / 16 of byte 32 + i % 16; of the last 16, digit i / 4 of byte 48 + i % 4. Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

constexpr u32 BLOCK_SIZE = 256, BLOCK_BYTES = 54, SCALE_RUN = 256;

DEVICE u32 ternary_digit(u32 byte, u32 digit) {
    const u32 power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
    return (byte * power & 255) * 3 >> 8;
}

DEVICE u16 scale_of(const u8* block, u32 i) {
    (void)i;
    return *reinterpret_cast<const u16*>(block + 52);
}

template <int N>
DEVICE void codes_of(const u8* block, u32 i, u32 (&codes)[N][2]) {
#pragma unroll
    for (u32 j = 0; j < 8 * N; j++) {
        const u32 at = i + j;
        const u32 code = at < 160   ? ternary_digit(block[at % 32], at / 32)
                         : at < 240 ? ternary_digit(block[32 + at % 16], (at - 160) / 16)
                                    : ternary_digit(block[48 + at % 4], (at - 240) / 4);
        u32& word = codes[j / 8][j / 4 % 2];
        word = (j % 4 ? word : 0) | code << 8 * (j % 4);
    }
}

DEVICE void values_of(const u32 (&codes)[2], u16 scale, float* w) { scaled_values<1>(codes, scale, w); }
DEVICE void halves_of(const u32 (&codes)[2], u16 scale, u32 (&w)[4]) { h2_scale<1>(codes, scale, w); }

#include "quants/coded.cuh"
