// Formats whose codes are numbers of a codebook's entries, four or eight bytes each. quant_grid is the codebook of QTYPE,
// which the loader of kernels takes from the gguf package (pyllm/quants/grids.py); its bytes are sizes, signs come apart.
#pragma once
#include "quants/codes.cuh"
#include "generated/quant_grid.cuh"

// Eight weights: (scale code), negated where the bit of `signs` is set.
struct GridCodes {
    u32 codes[2];
    u32 signs;
    float scale;
};

// Entry of eight bytes, or two of four.
DEVICE void grid_entry(GridCodes& found, u32 index) {
    found.codes[0] = quant_grid[2 * index];
    found.codes[1] = quant_grid[2 * index + 1];
}

DEVICE void grid_entries(GridCodes& found, u32 first, u32 second) {
    found.codes[0] = quant_grid[first];
    found.codes[1] = quant_grid[second];
}

// Seven sign bits and the eighth that makes their number even.
DEVICE u32 even_signs(u32 bits) {
    const u32 half = (bits ^ bits >> 4) & 15;
    return bits | (0x6996u >> half & 1) << 7;
}

DEVICE void grid_decode8(const GridCodes& found, float* w) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float value = found.scale * float_of_code(found.codes[j / 4], j % 4, 0);
        w[j] = f32_from_bits(f32_bits(value) ^ (found.signs >> j & 1) << 31);
    }
}

DEVICE void grid_decode8_half2(const GridCodes& found, u32 (&w)[4]) {
    h2_scale<0>(found.codes, found.scale, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] ^= (found.signs >> 2 * j & 1) << 15 | (found.signs >> (2 * j + 1) & 1) << 31;
}
