// tile_s8: products of signed bytes on NVIDIA's matrix instructions; sums are i32, exact.
//
//   mma_m16n8k32_s8(c, a, b)   C[16][8] += A[16][32] B[8][32]
//   mma_m16n8k16_s8(c, a, b)   the same over 16 k
//
// With g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix Fragments for mma.m16n8k32"), k counted within four bytes of a word:
//   A   registers 0-3   rows g, g + 8, g, g + 8; k 4t to 4t + 3 in the first two, 16 + 4t to 16 + 4t + 3 in the others
//   B   registers 0-1   column g; k 4t to 4t + 3, then 16 + 4t to 16 + 4t + 3
//   C   elements 0-3    row g, columns 2t, 2t + 1; row g + 8, columns 2t, 2t + 1
// Over 16 k: registers 0-1 of A, register 0 of B.
#pragma once

#include "common/tile.cuh"

#if !defined(TILE_MMA)
#error "products of signed bytes are NVIDIA's"
#endif

#if defined(PYLLM_CUDA)
DEVICE void mma_m16n8k32_s8(i32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void mma_m16n8k16_s8(i32 (&c)[4], const u32 (&a)[2], u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}
#endif
