// mul_mat_tile: out = x @ w.T for many tokens, on matrix instructions; packed weights are decoded on the way
//
// Shapes    x [T,K] f32 or f16; w [N,row_bytes] packed; out [T,N] f32 or f16, out_columns elements from row to row
//           K % 8 == 0
// Launch    grid (ceil(T / BM), ceil(N / BN)), block (THREADS): a block computes BM x BN; neighbours share w
// Shared    dynamic, see common/product.cuh
// Sync      see common/product.cuh
// Numerics  f16 operands, x saturated at 65504; f32 sums
// Defines   QTYPE and those of common/product.cuh
// SharedLimit   sm_90=232448 sm_80=166912
// Compile   QTYPE=0,1,2,3,6,7,8,10,11,12,13,14,16,17,18,19,20,21,22,23,29,30,34,35,39,40 BM=64 BN=128 BK=32 THREADS=256
//           X_STAGES=3 X_F16=1 STAGED=0 OUTPUT=0;
//           QTYPE=1,12,14 BM=256 BN=128 BK=64 THREADS=256 X_STAGES=2 X_F16=1 STAGED=1 OUTPUT=0 @sm_90 @sm_80;
//           QTYPE=12 BM=128 BN=64,128 BK=64 THREADS=128 X_STAGES=2 X_F16=1 STAGED=1 OUTPUT=0,2 @sm_90 @sm_80;
//           QTYPE=12 BM=128 BN=64,128 BK=64 THREADS=256 X_STAGES=2 X_F16=0 STAGED=1 OUTPUT=0 @sm_90 @sm_80;
//           QTYPE=8,12 BM=64 BN=64 BK=64 THREADS=128 X_STAGES=2 X_F16=1 STAGED=1 OUTPUT=2 @sm_90 @sm_80;
//           QTYPE=12 BM=128 BN=128 BK=32 THREADS=256 X_STAGES=3 X_F16=0 STAGED=0 OUTPUT=1,2
#include "common/platform.cuh"
#include "quants/decode.cuh"
#include "common/product.cuh"

KERNEL(THREADS) mul_mat_tile(const x_t* RESTRICT x, const u8* RESTRICT w, out_t* RESTRICT out, i64 row_bytes, i32 T,
                             i32 N, i32 K, i32 out_columns) {
    GRID_DEPENDENCY();
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
