// Formats whose codes stand for one of 16 levels: a table of bytes, each level plus 128.
#pragma once
#include "quants/codes.cuh"

#define LEVELS(a, b, c, d) ((a + 128u) | (b + 128u) << 8 | (c + 128u) << 16 | (d + 128u) << 24)

#define IQ4_LEVELS_0 LEVELS(-127, -104, -83, -65)
#define IQ4_LEVELS_1 LEVELS(-49, -35, -22, -10)
#define IQ4_LEVELS_2 LEVELS(1, 13, 25, 38)
#define IQ4_LEVELS_3 LEVELS(53, 69, 89, 113)

// Nibbles to levels plus 128.
template <int N>
DEVICE void iq4_levels(u32 (&codes)[N][2]) {
    constexpr u32 levels[4] = {IQ4_LEVELS_0, IQ4_LEVELS_1, IQ4_LEVELS_2, IQ4_LEVELS_3};
#pragma unroll
    for (int j = 0; j < 2 * N; j++) codes[j / 2][j % 2] = bytes_of_table(codes[j / 2][j % 2], levels);
}

// E2M1 numbers, doubled.
template <int N>
DEVICE void fp4_levels(u32 (&codes)[N][2]) {
    constexpr u32 levels[4] = {LEVELS(0, 1, 2, 3), LEVELS(4, 6, 8, 12), LEVELS(0, -1, -2, -3), LEVELS(-4, -6, -8, -12)};
#pragma unroll
    for (int j = 0; j < 2 * N; j++) codes[j / 2][j % 2] = bytes_of_table(codes[j / 2][j % 2], levels);
}
