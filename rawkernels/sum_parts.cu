// sum_parts: out = f(sum of parts), the sums over shares of k that mul_mat_thin_held, mul_mat_wgmma and mul_mat_wgmma_direct
// leave
//
// Shapes    parts [S,T,n] f32; out [T,N] f32 or f16, of which the first n columns of each row are written; bias [n] f32
// Launch    grid (ceil(n / THREADS), T), block (THREADS)
// Shared    none
// Sync      none
// Numerics  f32, in the order of shares
// Defines   OUTPUT 0 f32, 1 f16, 2 added to f32; BIAS; THREADS
// Compile   OUTPUT=0,1,2 BIAS=0,1 THREADS=128
#define GATE 0
#include "common/thin.cuh"

KERNEL(THREADS) sum_parts(const float* RESTRICT parts, const float* RESTRICT bias, void* out, i32 S, i32 T, i32 n, i32 N) {
    GRID_DEPENDENCY();
    const i32 column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= n) return;
    const i32 token = blockIdx.y;
    float sum = 0;
    for (i32 s = 0; s < S; s++) sum += parts[(static_cast<i64>(s) * T + token) * n + column];
#if BIAS
    sum += bias[column];
#endif
    put(out, static_cast<i64>(token) * N + column, sum);
}
