// thin: what the kernels for few tokens share: up to three matrices side by side, their tiles of 16 rows, and the outputs.
//
// Defines   GATE, OUTPUT: see mul_mat_thin.cu
#pragma once
#include "common/platform.cuh"

#define PARTS (GATE ? 2 : 1)  // tiles that one result takes

// A tile: up to 16 rows of one matrix.
struct Rows {
    const u8* first;
    i32 count;   // rows that exist; those past the end are computed with the last row's weights, and not stored
    i32 column;  // of the first row's products in out
};

struct Matrices {
    const u8 *w0, *w1, *w2;
    i64 row_bytes;
    i32 n0, n1, n2;
};

DEVICE i32 tiles_of(i32 n) { return (n + 15) / 16; }

// How many columns of 16 the output has.
DEVICE i32 results_of(const Matrices& all) {
    return GATE ? tiles_of(all.n0) : tiles_of(all.n0) + tiles_of(all.n1) + tiles_of(all.n2);
}

// Tiles of all matrices one behind the other; GATE: one of w0 and one of w1 in turn.
DEVICE Rows rows_of(const Matrices& all, i32 tile) {
    const u8* matrix = all.w0;
    i32 n = all.n0, column = 0;
    if (GATE) {
        if (tile % 2) matrix = all.w1;
        tile /= 2;
    } else if (tile >= tiles_of(all.n0)) {
        tile -= tiles_of(all.n0);
        matrix = all.w1, n = all.n1, column = all.n0;
        if (tile >= tiles_of(all.n1)) {
            tile -= tiles_of(all.n1);
            matrix = all.w2, n = all.n2, column = all.n0 + all.n1;
        }
    }
    return {matrix + 16 * tile * all.row_bytes, n - 16 * tile < 16 ? n - 16 * tile : 16, column + 16 * tile};
}

DEVICE const u8* row_of(const Rows& rows, i32 r, i64 row_bytes) {
    return rows.first + (r < rows.count ? r : rows.count - 1) * row_bytes;
}

DEVICE void put(void* out, i64 index, float value) {
#if OUTPUT == 0
    static_cast<float*>(out)[index] = value;
#elif OUTPUT == 1
    static_cast<f16*>(out)[index] = to_f16_saturated(value);
#else
    static_cast<float*>(out)[index] += value;
#endif
}
