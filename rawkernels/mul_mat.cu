// mul_mat_vec: out[t,n] = sum_k x[t,k] w[n,k] for few tokens; packed rows are read once and never expanded
// mul_mat_tile: the same for many tokens, on matrix instructions; x and the decoded w are rounded to f16
//
// Shapes    x [T,K] f32 (tile: or f16); w [N,row_bytes] packed; out [T,N] f32; K % 8 == 0
//           tile: out [T,N] f32 or f16, out_columns elements from row to row
// Launch    mul_mat_vec: grid (ceil(N / warps)), block (128): a warp computes one row n for TOKENS tokens
//           mul_mat_tile: grid (ceil(T / BM), ceil(N / BN)), block (256): a block computes BM x BN; neighbours share w
// Shared    mul_mat_tile: dynamic, see common/product.cuh
// Sync      mul_mat_tile: see common/product.cuh
// Numerics  f32 sums; vec: f32 products; tile: f16 operands, x saturated at 65504
// Defines   QTYPE, TOKENS (vec: 1..8), those of common/product.cuh (tile)
// Compile   QTYPE=0,1,2,3,8,12,13,14,30 TOKENS=1; QTYPE=12 TOKENS=8;
//           QTYPE=0,1,2,3,6,7,8,10,11,12,13,14,16,17,18,19,20,21,22,23,29,30,34,35,39,40 BM=64 BN=128 BK=32 THREADS=256
//           X_STAGES=3 X_F16=1 STAGED=0 OUTPUT=0;
//           QTYPE=1,8,12,14 BM=128 BN=128 BK=64 THREADS=128 X_STAGES=2 X_F16=0,1 STAGED=1 OUTPUT=0;
//           QTYPE=12 BM=256 BN=128 BK=64 THREADS=256 X_STAGES=3 X_F16=1 STAGED=1 OUTPUT=1,2;
//           QTYPE=12 BM=32,64 BN=64,128 BK=64 THREADS=128 X_STAGES=3 X_F16=1 STAGED=1 OUTPUT=1;
//           QTYPE=12 BM=64 BN=64 BK=32 THREADS=256 X_STAGES=3 X_F16=0 STAGED=0 OUTPUT=1,2
#include "common/platform.cuh"
#include "quants/decode.cuh"

#ifdef TOKENS

KERNEL(128) mul_mat_vec(const float* RESTRICT x, const u8* RESTRICT w, float* RESTRICT out, i64 row_bytes, i32 N,
                        i32 K) {
    const i32 n = blockIdx.x * (128 / WARP_SIZE) + WARP_ID();
    if (n >= N) return;  // whole warps only: the sums below stay complete
    const u8* row = w + n * row_bytes;
    float sum[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) sum[t] = 0;
#pragma unroll 2
    for (i32 k = 8 * LANE(); k < K; k += 8 * WARP_SIZE) {
        float weights[8];
        decode8(row, k, weights);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const f32x4 a = load16<f32x4>(x + static_cast<i64>(t) * K + k);
            const f32x4 b = load16<f32x4>(x + static_cast<i64>(t) * K + k + 4);
            sum[t] += weights[0] * a.x + weights[1] * a.y + weights[2] * a.z + weights[3] * a.w;
            sum[t] += weights[4] * b.x + weights[5] * b.y + weights[6] * b.z + weights[7] * b.w;
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float total = warp_sum(sum[t]);
        if (LANE() == 0) out[static_cast<i64>(t) * N + n] = total;
    }
}

#else

#include "common/product.cuh"

KERNEL(THREADS) mul_mat_tile(const x_t* RESTRICT x, const u8* RESTRICT w, out_t* RESTRICT out, i64 row_bytes, i32 T,
                             i32 N, i32 K, i32 out_columns) {
    const i32 first_t = blockIdx.x * BM;
    const i32 first_n = blockIdx.y * BN;
    const i32 num_rows = min(N - first_n, static_cast<i32>(BN));
    FragC acc[FM][FN];
    product_tile([&](int t) { return x + static_cast<i64>(min(first_t + t, T - 1)) * K; }, w + first_n * row_bytes,
                 row_bytes, num_rows, K, acc);
    product_store(acc, num_rows, [&](int t) -> out_t* {
        return first_t + t < T ? out + static_cast<i64>(first_t + t) * out_columns + first_n : nullptr;
    });
}

#endif
