// decode8: eight consecutive weights of a row as float32, whatever the block format.
//
//   void decode8(const u8* row, i32 k, float* w)     w[j] = element k + j of the row, j = 0..7; k % 8 == 0
//
// Defines   QTYPE, the GGUF type id; one format is compiled in.
// Layouts and formulas are those of pyllm/quants/<format>.py; products are evaluated in the same order, so the
// values are the reference's bit for bit.
#pragma once
#include "common/platform.cuh"

#if QTYPE == 0
#include "quants/f32.cuh"
#elif QTYPE == 1
#include "quants/f16.cuh"
#elif QTYPE == 2
#include "quants/q4_0.cuh"
#elif QTYPE == 3
#include "quants/q4_1.cuh"
#elif QTYPE == 8
#include "quants/q8_0.cuh"
#elif QTYPE == 12
#include "quants/q4_k.cuh"
#elif QTYPE == 13
#include "quants/q5_k.cuh"
#elif QTYPE == 14
#include "quants/q6_k.cuh"
#elif QTYPE == 30
#include "quants/bf16.cuh"
#else
#error "QTYPE names a block format that has no kernel"
#endif
