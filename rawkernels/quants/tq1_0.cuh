// TQ1_0: 256 weights in 54 bytes, five to a byte (four in the last four bytes), d f16 @52. w = d (t - 1), where t is a
// digit of byte / 256 to base 3: that of weight i of the first 160 is digit i / 32 of byte i % 32; of the next 80, digit
// i / 16 of byte 32 + i % 16; of the last 16, digit i / 4 of byte 48 + i % 4. Blocks are 2-byte aligned.
#pragma once
#include "quants/codes.cuh"

DEVICE u32 ternary_digit(u32 byte, u32 digit) {
    const u32 power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
    return (byte * power & 255) * 3 >> 8;
}

// d, and eight weights' t.
DEVICE float codes8(const u8* RESTRICT row, i32 k, u32 (&codes)[2]) {
    const u8* block = row + static_cast<u64>(static_cast<u32>(k) / 256) * 54;
    const u32 i = static_cast<u32>(k) % 256;
    codes[0] = codes[1] = 0;
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        const u32 at = i + j;
        const u32 code = at < 160   ? ternary_digit(block[at % 32], at / 32)
                         : at < 240 ? ternary_digit(block[32 + at % 16], (at - 160) / 16)
                                    : ternary_digit(block[48 + at % 4], (at - 240) / 4);
        codes[j / 4] |= code << 8 * (j % 4);
    }
    return f16_bits_to_f32(*reinterpret_cast<const u16*>(block + 52));
}

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = d * float_of_code(codes[j / 4], j % 4, 1);
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 codes[2];
    const float d = codes8(row, k, codes);
    h2_scale<1>(codes, d, w);
}
