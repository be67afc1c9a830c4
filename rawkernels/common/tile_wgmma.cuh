// tile_wgmma: products of four warps together, for sm_90a. Factors lie in shared memory, or the first in registers.
// Provided by tile_wgmma_cuda.cuh and, one after another, by tile_wgmma_emulated.cuh.
//
// A tile in shared memory is cut into panels of 64 columns: rows of 128 bytes, of which 16-byte piece p of row r lies at
// place p ^ (r % 8). Panels begin at multiples of 1024 bytes. (PTX ISA, "Asynchronous warpgroup level matrix instructions":
// 128-byte swizzle.)
//
//   wgmma_columns<N>(c, a, b, add)   C[64][N] = A[64][16] B[N][16] (+ C): both stored by rows with k along them
//   wgmma_held<N>(c, a, b, add)      the same with A in registers
//   wgmma_rows<N>(c, a, b)           C[64][N] += A[64][16] B[16][N]: A in registers, B stored by rows k
//   wgmma_factor(address, leading)   a factor in shared memory; `leading` bytes lie between its panels
//   wgmma_factor_behind(factor, bytes)   the factor so many bytes further on
//   wgmma_begin, wgmma_commit, wgmma_wait<N>, wgmma_pin   around them: see there
//   Signal, part_barrier, part_arrive                     by which parts of a block wait for each other
//
// Element 4 j + i of C is row 16 w + lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2, w being the warp's place among
// the four. A in registers is laid out as by mma.m16n8k16.
#pragma once
#include "common/platform.cuh"

constexpr int PANEL = 64;  // columns

// Bytes from a panel's first to 16-byte piece `piece` of `row`.
DEVICE u32 panel_place(u32 row, u32 piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// A barrier that counts arrivals; each completion is another phase, and `phase` alternates from 0.
struct alignas(8) Signal {
    u64 state;
};

#if defined(PYLLM_EMULATED)
#include "common/tile_wgmma_emulated.cuh"
#else
#include "common/tile_wgmma_cuda.cuh"
#endif
