// arrange_x: x, or its RMS norm, as the tiles that mul_mat_wgmma_direct multiplies
//
// Shapes    x [T,K] f32 or f16; norm [K] f32; out [C, K/64, TOKENS, 64] f16, C = ceil(T / TOKENS): 16-byte piece p of a token's
//           64 k lies at place p ^ (token % 8); tokens that do not exist are zeros. K % 64 == 0
// Launch    grid (C * TOKENS, B), block (THREADS): threads take pieces in turn; NORM: B = 1
// Shared    NORM: one float per warp, static
// Sync      NORM: warps write partial sums; barrier; every thread adds them up in the same order
// Numerics  f32 sums; f16 saturates
// Defines   TOKENS; X_F16; NORM; THREADS
//           ORDER of each 32 k, so that a lane, one of four, finds its own in places 2 lane, 2 lane + 1, 8 + 2 lane, 9 + 2 lane
//           of 16, and again: 0: k 8 lane to + 7; 1: the same as 0 2, 1 3, 4 6, 5 7; 2: 4 lane to + 3, 16 + 4 lane to + 3
// Compile   TOKENS=32,64,128 X_F16=0,1 NORM=0 THREADS=256 ORDER=0,1,2; TOKENS=32 X_F16=0 NORM=1 THREADS=256 ORDER=0,1,2
#include "common/platform.cuh"

#if X_F16
typedef f16 x_t;
DEVICE float load(const f16* p) { return to_f32(*p); }
#else
typedef float x_t;
DEVICE float load(const float* p) { return *p; }
#endif

// Of 32, which k is half h of pair `lane` of piece j.
DEVICE i32 k_of(i32 j, int lane, int h) {
#if ORDER == 0
    return 8 * lane + 2 * j + h;
#elif ORDER == 1
    return 8 * lane + j / 2 * 4 + j % 2 + 2 * h;
#else
    return j / 2 * 16 + 4 * lane + j % 2 * 2 + h;
#endif
}

#if NORM
// 1 / sqrt(mean x^2 + eps) of a row.
DEVICE float norm_factor(const float* RESTRICT x, float eps, i32 K) {
    SHARED float partial[THREADS / WARP_SIZE];
    float sum = 0;
    for (i32 k = 4 * threadIdx.x; k < K; k += 4 * THREADS) {
        const f32x4 four = load16<f32x4>(x + k);
        sum += four.x * four.x + four.y * four.y + four.z * four.z + four.w * four.w;
    }
    sum = warp_sum(sum);
    if (LANE() == 0) partial[WARP_ID()] = sum;
    BARRIER();
    float total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / WARP_SIZE; i++) total += partial[i];
    return rsqrt_f(total / static_cast<float>(K) + eps);
}
#endif

KERNEL(THREADS) arrange_x(const x_t* RESTRICT x, const float* RESTRICT norm, f16* RESTRICT out, float eps, i32 T, i32 K) {
    GRID_DEPENDENCY();
    const i32 token = blockIdx.x, place = token % TOKENS;
    const bool there = token < T;
    const x_t* const row = x + static_cast<i64>(there ? token : T - 1) * K;
    f16* const column = out + static_cast<i64>(token / TOKENS) * TOKENS * K;
#if NORM
    const float factor = norm_factor(row, eps, K);
#endif
    for (i32 piece = blockIdx.y * THREADS + threadIdx.x; piece < K / 8; piece += gridDim.y * THREADS) {
        const i32 panel = piece / 8, p = piece % 8, first = piece / 4 * 32;
        u32 pairs[4];
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            float values[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i32 k = first + k_of(p % 4, lane, h);
                values[h] = there ? load(row + k) : 0;
#if NORM
                values[h] *= factor * norm[k];
#endif
            }
            pairs[lane] = h2_pack_saturated(values[0], values[1]);
        }
        f16* const target = column + (static_cast<i64>(panel) * TOKENS + place) * 64 + (p ^ (place & 7)) * 8;
        store16(target, u32x4{pairs[0], pairs[1], pairs[2], pairs[3]});
    }
}
