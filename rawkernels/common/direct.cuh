// direct: factors of the 16x16x16 products built in registers, without shared memory.
//
// A product over k may take its k in any order, if both factors take them in the same. So each lane supplies runs of eight
// consecutive k, which is what packed weights decode to and what a 16-byte load brings, and never exchanges a value.
// A slab is 32 k: four runs for each of 16 rows.
//
//   Direct a, b;
//   for i < DIRECT_ROWS, j < DIRECT_RUNS: fill a.run[i][j], four pairs of f16, with k 8 direct_run(j) to 8 direct_run(j) + 7
//       of the slab, from row direct_row(i) of the weights; b alike, from row direct_row(i) of the activations
//   direct_mma(c, a, b);            C[m][n] += sum over the slab of A[m][k] B[n][k]
//   direct_mma_narrow(c, a, b);     the same where only rows 0-7 of b are wanted; columns 8-15 of C are undefined
#pragma once

#include "common/tile.cuh"

#if defined(TILE_MMA)
// Lane 4g + t supplies run t of rows g and g + 8; each of the two products takes half of each run.
constexpr int DIRECT_ROWS = 2;
constexpr int DIRECT_NARROW_ELEMENTS = 4;  // of a C, those that a narrow product defines
constexpr int DIRECT_RUNS = 1;
constexpr int DIRECT_SLABS = 8;  // to be unrolled at a time
DEVICE int direct_row(int i) { return LANE() / 4 + 8 * i; }
DEVICE int direct_run(int j) { return (void)j, LANE() % 4; }
#elif defined(TILE_MFMA)
// Lane 16g + r supplies run g of row r.
constexpr int DIRECT_ROWS = 1;
constexpr int DIRECT_NARROW_ELEMENTS = TILE_C_ELEMENTS;
constexpr int DIRECT_RUNS = 1;
constexpr int DIRECT_SLABS = 8;
DEVICE int direct_row(int i) { return (void)i, LANE() % 16; }
DEVICE int direct_run(int j) { return (void)j, LANE() / 16; }
#else
// Lanes r and r + 16 both supply all runs of row r.
constexpr int DIRECT_ROWS = 1;
constexpr int DIRECT_NARROW_ELEMENTS = TILE_C_ELEMENTS;
constexpr int DIRECT_RUNS = 4;
constexpr int DIRECT_SLABS = 2;  // of more than these the loads alone would not fit into registers
DEVICE int direct_row(int i) { return (void)i, LANE() % 16; }
DEVICE int direct_run(int j) { return j; }
#endif

struct Direct {
    u32 run[DIRECT_ROWS][DIRECT_RUNS][4];
};

#if defined(TILE_MMA)

DEVICE void direct_mma_narrow(FragC& c, const Direct& a, const Direct& b) {
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
        const u32 rows[4] = {a.run[0][0][half], a.run[1][0][half], a.run[0][0][half + 1], a.run[1][0][half + 1]};
        const u32 columns[2] = {b.run[0][0][half], b.run[0][0][half + 1]};
        mma_m16n8k16(c.x, rows, columns);
    }
}

DEVICE void direct_mma(FragC& c, const Direct& a, const Direct& b) {
    direct_mma_narrow(c, a, b);
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
        const u32 rows[4] = {a.run[0][0][half], a.run[1][0][half], a.run[0][0][half + 1], a.run[1][0][half + 1]};
        const u32 columns[2] = {b.run[1][0][half], b.run[1][0][half + 1]};
        mma_m16n8k16(c.x + 4, rows, columns);
    }
}

#elif defined(TILE_MFMA)

DEVICE u64 direct_words(const u32* pairs) { return pairs[0] | static_cast<u64>(pairs[1]) << 32; }

DEVICE void direct_mma(FragC& c, const Direct& a, const Direct& b) {
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
        FragA rows;
        FragB columns;
        rows.k = direct_words(a.run[0][0] + half);
        columns.k = direct_words(b.run[0][0] + half);
        tile_mma(c, rows, columns);
    }
}

DEVICE void direct_mma_narrow(FragC& c, const Direct& a, const Direct& b) { direct_mma(c, a, b); }

#else

DEVICE u32x4 direct_words(const u32* pairs) { return u32x4{pairs[0], pairs[1], pairs[2], pairs[3]}; }

DEVICE void direct_mma(FragC& c, const Direct& a, const Direct& b) {
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
        FragA rows;
        FragB columns;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            rows.k[j] = direct_words(a.run[0][half + j]);
            columns.k[j] = direct_words(b.run[0][half + j]);
        }
        tile_mma(c, rows, columns);
    }
}

DEVICE void direct_mma_narrow(FragC& c, const Direct& a, const Direct& b) { direct_mma(c, a, b); }

#endif
