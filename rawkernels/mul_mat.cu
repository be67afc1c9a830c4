// mul_mat_vec: out[t,n] = sum_k x[t,k] w[n,k] for few tokens; packed rows are read once and never expanded
// mul_mat_tile: the same for many tokens, on matrix instructions; x and the decoded w are rounded to f16
//
// Shapes    x [T,K] f32; w [N,row_bytes] packed; out [T,N] f32; K % 8 == 0
// Launch    mul_mat_vec: grid (ceil(N / warps)), block (128): a warp computes one row n for TOKENS tokens
//           mul_mat_tile: grid (ceil(N / BN), ceil(T / BM)), block (256): a block computes BM x BN
// Shared    mul_mat_tile: BM x BK of x and BN x BK of w as f16, rows padded by 8 against bank conflicts, static
// Sync      mul_mat_tile: all threads load the next slices into registers, a barrier frees the shared ones, they are
//           stored, a barrier publishes them, warps multiply
// Numerics  f32 sums; vec: f32 products; tile: f16 operands, x saturated at 65504
// Defines   QTYPE, TOKENS (vec: 1..8), BM and BN (tile)
// Compile   QTYPE=0,1,2,3,8,12,13,14,30 TOKENS=1; QTYPE=12 TOKENS=8; QTYPE=0,1,2,3,8,12,13,14,30 BM=64 BN=64;
//           QTYPE=12 BM=128 BN=128
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

#include "common/tile.cuh"

#define THREADS 256
#define BK 32
#define LD (BK + 8)
#define WARPS (THREADS / WARP_SIZE)
#define WARPS_M 2
#define WARPS_N (WARPS / WARPS_M)
#define FM (BM / 16 / WARPS_M)
#define FN (BN / 16 / WARPS_N)
#define X_GROUPS (BM * BK / 8 / THREADS)
#define W_GROUPS (BN * BK / 8 / THREADS)

struct alignas(16) f16x8 {
    f16 x[8];
};

KERNEL(THREADS) mul_mat_tile(const float* RESTRICT x, const u8* RESTRICT w, float* RESTRICT out, i64 row_bytes,
                             i32 T, i32 N, i32 K) {
    SHARED f16x8 x_tile[BM * LD / 8];
    SHARED f16x8 w_tile[BN * LD / 8];
    const i32 first_n = blockIdx.x * BN;
    const i32 first_t = blockIdx.y * BM;
    const i32 warp_m = WARP_ID() / WARPS_N * FM * 16;
    const i32 warp_n = WARP_ID() % WARPS_N * FN * 16;
    FragC acc[FM][FN];
#pragma unroll
    for (int m = 0; m < FM; m++) {
#pragma unroll
        for (int n = 0; n < FN; n++) tile_zero(acc[m][n]);
    }
    for (i32 k0 = 0; k0 < K; k0 += BK) {
        f16x8 x_next[X_GROUPS];
        f16x8 w_next[W_GROUPS];
#pragma unroll
        for (int g = 0; g < X_GROUPS; g++) {
            const i32 group = g * THREADS + threadIdx.x;
            const i32 t = first_t + group / (BK / 8);
            const i32 k = k0 + group % (BK / 8) * 8;
            float values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (t < T && k < K) {
                const f32x4 a = load16<f32x4>(x + static_cast<i64>(t) * K + k);
                const f32x4 b = load16<f32x4>(x + static_cast<i64>(t) * K + k + 4);
                values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
                values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
            }
#pragma unroll
            for (int j = 0; j < 8; j++) x_next[g].x[j] = to_f16_saturated(values[j]);
        }
#pragma unroll
        for (int g = 0; g < W_GROUPS; g++) {
            const i32 group = g * THREADS + threadIdx.x;
            const i32 n = first_n + group / (BK / 8);
            float values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            const i32 k = k0 + group % (BK / 8) * 8;
            if (n < N && k < K) decode8(w + n * row_bytes, k, values);
#pragma unroll
            for (int j = 0; j < 8; j++) w_next[g].x[j] = to_f16(values[j]);
        }
        BARRIER();  // the last products have been read
#pragma unroll
        for (int g = 0; g < X_GROUPS; g++) {
            const i32 group = g * THREADS + threadIdx.x;
            x_tile[group / (BK / 8) * (LD / 8) + group % (BK / 8)] = x_next[g];
        }
#pragma unroll
        for (int g = 0; g < W_GROUPS; g++) {
            const i32 group = g * THREADS + threadIdx.x;
            w_tile[group / (BK / 8) * (LD / 8) + group % (BK / 8)] = w_next[g];
        }
        BARRIER();  // the tiles are complete
        const f16* xs = reinterpret_cast<const f16*>(x_tile);
        const f16* ws = reinterpret_cast<const f16*>(w_tile);
#pragma unroll
        for (int k = 0; k < BK; k += 16) {
            FragA a[FM];
            FragB b[FN];
#pragma unroll
            for (int m = 0; m < FM; m++) tile_load_a(a[m], xs + (warp_m + 16 * m) * LD + k, LD);
#pragma unroll
            for (int n = 0; n < FN; n++) tile_load_b(b[n], ws + (warp_n + 16 * n) * LD + k, LD);
#pragma unroll
            for (int m = 0; m < FM; m++) {
#pragma unroll
                for (int n = 0; n < FN; n++) tile_mma(acc[m][n], a[m], b[n]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < FM; m++) {
#pragma unroll
        for (int n = 0; n < FN; n++) {
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                const i32 t = first_t + warp_m + 16 * m + tile_c_row(i);
                const i32 column = first_n + warp_n + 16 * n + tile_c_col(i);
                if (t < T && column < N) out[static_cast<i64>(t) * N + column] = acc[m][n].x[i];
            }
        }
    }
}

#endif
