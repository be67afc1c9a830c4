// decode8, decode8_half2: eight consecutive weights of a row as float32 or f16, whatever the block format.
//
//   void decode8(const u8* row, i32 k, float* w)         w[j] = element k + j of the row, j = 0..7; k % 8 == 0
//   void decode8_half2(const u8* row, i32 k, u32 (&w)[4])   the same as f16: element k + 2j in the low half of w[j]
//   void decode_run<N>(const u8* row, i32 k, u32 (&w)[N][4])   8 N of them at once, N <= 4; k % (8 N) == 0
//
// Defines   QTYPE, the GGUF type id; one format is compiled in.
// Layouts and formulas are those of pyllm/quants/<format>.py; decode8 evaluates products in the same order, so its
// values are the reference's bit for bit. decode8_half2 may round the scales of a block to f16 before the last rounding:
// beside the exact value it is off by at most 1.5 units in the last place of the largest weight that the scales allow, or
// by 2^-20 where that is more (tests/ops/test_decode8.py). Scales of 1,024 and more become infinite there.
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
#elif QTYPE == 6
#include "quants/q5_0.cuh"
#elif QTYPE == 7
#include "quants/q5_1.cuh"
#elif QTYPE == 8
#include "quants/q8_0.cuh"
#elif QTYPE == 10
#include "quants/q2_k.cuh"
#elif QTYPE == 11
#include "quants/q3_k.cuh"
#elif QTYPE == 12
#include "quants/q4_k.cuh"
#elif QTYPE == 13
#include "quants/q5_k.cuh"
#elif QTYPE == 14
#include "quants/q6_k.cuh"
#elif QTYPE == 16
#include "quants/iq2_xxs.cuh"
#elif QTYPE == 17
#include "quants/iq2_xs.cuh"
#elif QTYPE == 18
#include "quants/iq3_xxs.cuh"
#elif QTYPE == 19
#include "quants/iq1_s.cuh"
#elif QTYPE == 20
#include "quants/iq4_nl.cuh"
#elif QTYPE == 21
#include "quants/iq3_s.cuh"
#elif QTYPE == 22
#include "quants/iq2_s.cuh"
#elif QTYPE == 23
#include "quants/iq4_xs.cuh"
#elif QTYPE == 29
#include "quants/iq1_m.cuh"
#elif QTYPE == 30
#include "quants/bf16.cuh"
#elif QTYPE == 34
#include "quants/tq1_0.cuh"
#elif QTYPE == 35
#include "quants/tq2_0.cuh"
#elif QTYPE == 39
#include "quants/mxfp4.cuh"
#elif QTYPE == 40
#include "quants/nvfp4.cuh"
#else
#error "QTYPE names a block format that has no kernel"
#endif

#if !defined(DECODE8_HALF2)
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    float values[8];
    decode8(row, k, values);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_pack(values[2 * j], values[2 * j + 1]);
}
#endif

#if !defined(DECODE_RUN)
template <int N>
DEVICE void decode_run(const u8* RESTRICT row, i32 k, u32 (&w)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++) decode8_half2(row, k + 8 * j, w[j]);
}
#endif
