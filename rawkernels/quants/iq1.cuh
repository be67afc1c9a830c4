// What IQ1_S and IQ1_M share: entries of eight digits -1, 0, 1 (held plus one), all moved by an eighth up or down.
// w = scale (entry + delta).
#pragma once
#include "quants/grid.cuh"

DEVICE void iq1_decode8(const GridCodes& found, bool down, float* w) {
    const float delta = down ? -0.125f : 0.125f;
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = found.scale * (float_of_code(found.codes[j / 4], j % 4, 1) + delta);
}

DEVICE void iq1_decode8_half2(const GridCodes& found, bool down, u32 (&w)[4]) {
    const u32 scale = h2_pack(found.scale, found.scale);
    const u32 delta = down ? 0xB000B000u : 0x30003000u;
    h2_of_codes<1>(found.codes, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_mul(h2_add(w[j], delta), scale);
}
