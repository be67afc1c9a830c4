// tile: C[16][16] += A[16][16] * B[16][16] by one warp, f16 factors, f32 sums, on each vendor's matrix instruction.
//
//   FragA a; FragB b; FragC c;
//   tile_zero(c);
//   for (...) {
//       tile_load_a(a, rows, ld);      // 16 rows m of 16 k
//       tile_load_b(b, columns, ld);   // 16 columns n of 16 k: B is stored transposed, [n][k]
//       tile_mma(c, a, b);
//   }
//   for (int i = 0; i < TILE_C_ELEMENTS; i++) out[tile_c_row(i)][tile_c_col(i)] = c.x[i];
//
// What a product over the columns of a C needs without leaving the registers, as in attention:
//
//   tile_load_b_rows(b, rows, ld)  B from rows k of 16 columns n
//   TILE_ROWS                      rows of C that a lane has elements of; element i is in row tile_row_of(tile_c_slot(i))
//   tile_row_max, tile_row_sum     over the lanes that have elements of one row, the same bits in all of them
//   tile_c_to_a(a, c)              C as the next product's A, rounded to f16
//   tile_settle(c)                 is computed here: in a long unrolled loop LLVM else loads the factors of many products
//                                  before it uses the first, for which RDNA has not registers enough
//   tile_add_halves(c)             rows 0-7 and 8-15 both become the sum of row r and row r + 8
//
// Sources lie in shared memory, 16-byte aligned; ld, in elements, is a multiple of 8. An ld of 8 more than a multiple of
// 64 keeps the loads free of bank conflicts. All lanes of the warp call these functions together; blocks have one
// dimension. The loader defines TILE_MMA (NVIDIA, sm_80 and later), TILE_WMMA (RDNA 3 and 3.5) or TILE_MFMA (CDNA).
#pragma once

#include "common/platform.cuh"

// What ldmatrix and 128-bit loads demand, checked where a check costs nothing that matters.
DEVICE void tile_check_source(const f16* row) {
#if defined(PYLLM_EMULATED)
    if ((u64)row % 16) pyllm_emulation->fail(FAULT_MISALIGNED);
#else
    (void)row;
#endif
}

#if defined(PYLLM_EMULATED)
#include "common/tile_emulated.cuh"
#endif

#if defined(TILE_MMA)
#include "common/tile_mma.cuh"
#elif defined(TILE_WMMA)
#include "common/tile_wmma.cuh"
#elif defined(TILE_MFMA)
#include "common/tile_mfma.cuh"
#else
#error "the loader defines TILE_MMA, TILE_WMMA or TILE_MFMA"
#endif

DEVICE void tile_zero(FragC& c) {
#pragma unroll
    for (int i = 0; i < TILE_C_ELEMENTS; i++) c.x[i] = 0.0f;
}
