// Formats whose codes stand for one of 16 levels: a table of bytes, each level plus 128.
#pragma once
#include "quants/codes.cuh"

#define LEVELS(a, b, c, d) ((a + 128u) | (b + 128u) << 8 | (c + 128u) << 16 | (d + 128u) << 24)

// Eight nibbles to levels plus 128.
DEVICE void iq4_levels(u32 (&codes)[2]) {
    constexpr u32 levels[4] = {LEVELS(-127, -104, -83, -65), LEVELS(-49, -35, -22, -10), LEVELS(1, 13, 25, 38),
                               LEVELS(53, 69, 89, 113)};
    codes[0] = bytes_of_table(codes[0], levels);
    codes[1] = bytes_of_table(codes[1], levels);
}

// E2M1 numbers, doubled.
DEVICE void fp4_levels(u32 (&codes)[2]) {
    constexpr u32 levels[4] = {LEVELS(0, 1, 2, 3), LEVELS(4, 6, 8, 12), LEVELS(0, -1, -2, -3), LEVELS(-4, -6, -8, -12)};
    codes[0] = bytes_of_table(codes[0], levels);
    codes[1] = bytes_of_table(codes[1], levels);
}
