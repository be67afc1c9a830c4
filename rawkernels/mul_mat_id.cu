// mul_mat_id_vec: out[t,j] = x[t,j] w[experts[t,j]]^T for few (token, slot) pairs: each reads its expert's rows
// mul_mat_id_tile: the same for many, on matrix instructions: a block computes one tile of one expert's pairs
//
// Shapes    x [T,x_slots,K] f32 or f16, x_slots 1 or num_used; experts [T,num_used] i32; w [num_experts,N,row_bytes]
//           packed; out [T,num_used,N] f32 or f16; lists of group_experts; K % 8 == 0
// Launch    vec: grid (ceil(N / (ROWS warps)), T num_used), block (128): a warp computes ROWS rows of one pair
//           tile: grid (ceil(N / BN), most tiles that there can be), block (THREADS); blocks without a tile end at once
// Shared    vec: none; tile: dynamic, see common/product.cuh
// Sync      vec: none; tile: see common/product.cuh
// Numerics  f32 sums; w rounded to f16; vec: f32 products of x as it is; tile: x rounded to f16, saturated at 65504.
//           A pair whose expert does not exist gets zeros (vec) or is left as it was (tile)
// Defines   QTYPE; vec: ROWS, X_F16, OUTPUT 0 f32, 1 f16; tile: those of common/product.cuh
// Compile   QTYPE=0,1,12,14,8 ROWS=2 X_F16=0,1 OUTPUT=0;
//           QTYPE=12 BM=32,64,128 BN=128 BK=64 THREADS=128 X_STAGES=3 X_F16=1 STAGED=1 OUTPUT=0;
//           QTYPE=1,12 BM=64 BN=64 BK=32 THREADS=256 X_STAGES=3 X_F16=0 STAGED=0 OUTPUT=0,1
#include "common/platform.cuh"
#include "quants/decode.cuh"

#ifdef ROWS

#if X_F16
typedef f16 x_t;
#else
typedef float x_t;
#endif

#if OUTPUT == 1
typedef f16 out_t;
DEVICE f16 to_out(float value) { return to_f16_saturated(value); }
#else
typedef float out_t;
DEVICE float to_out(float value) { return value; }
#endif

DEVICE void load8(const float* x, float* values) {
    const f32x4 a = load16<f32x4>(x);
    const f32x4 b = load16<f32x4>(x + 4);
    values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
    values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
}

DEVICE void load8(const f16* x, float* values) {
    const u32x4 words = load16(x);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; j++) values[2 * j] = low_half(pairs[j]), values[2 * j + 1] = high_half(pairs[j]);
}

KERNEL(128) mul_mat_id_vec(const x_t* RESTRICT x, const i32* RESTRICT experts, const u8* RESTRICT w,
                           out_t* RESTRICT out, i64 row_bytes, i32 N, i32 K, i32 num_experts, i32 num_used,
                           i32 x_slots) {
    const i32 first = (blockIdx.x * (128 / WARP_SIZE) + WARP_ID()) * ROWS;
    const i32 pair = blockIdx.y;
    if (first >= N) return;  // whole warps only: the sums below stay complete
    const i32 expert = experts[pair];
    const bool exists = expert >= 0 && expert < num_experts;
    const x_t* const own = x + static_cast<i64>(x_slots == 1 ? pair / num_used : pair) * K;
    const u8* rows[ROWS];
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        rows[r] = w + (static_cast<i64>(expert) * N + min(first + r, N - 1)) * row_bytes;
        sum[r] = 0;
    }
    if (exists) {
#pragma unroll 2
        for (i32 k = 8 * LANE(); k < K; k += 8 * WARP_SIZE) {
            float values[8];
            load8(own + k, values);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                u32 pairs[4];
                decode8_half2(rows[r], k, pairs);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum[r] += low_half(pairs[j]) * values[2 * j];
                    sum[r] += high_half(pairs[j]) * values[2 * j + 1];
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float total = warp_sum(sum[r]);
        if (LANE() == 0 && first + r < N) out[static_cast<i64>(pair) * N + first + r] = to_out(total);
    }
}

#else

#include "common/product.cuh"

KERNEL(THREADS) mul_mat_id_tile(const x_t* RESTRICT x, const i32* RESTRICT lists, const u8* RESTRICT w,
                                out_t* RESTRICT out, i64 row_bytes, i32 num_pairs, i32 N, i32 K, i32 num_experts,
                                i32 num_used, i32 x_slots) {
    const i32* const starts = lists;
    const i32* const pairs = starts + num_experts + 2;
    const i32* const tiles = pairs + num_pairs;
    if (static_cast<i32>(blockIdx.y) >= starts[num_experts + 1]) return;  // all of the block
    const i32 expert = tiles[2 * blockIdx.y];
    const i32 first_pair = tiles[2 * blockIdx.y + 1];
    const i32 count = starts[expert + 1] - first_pair;
    const i32 first_n = blockIdx.x * BN;
    const i32 num_rows = min(N - first_n, static_cast<i32>(BN));
    FragC acc[FM][FN];
    product_tile(
        [&](int t) {
            const i32 pair = pairs[first_pair + min(static_cast<i32>(t), count - 1)];
            return x + static_cast<i64>(x_slots == 1 ? pair / num_used : pair) * K;
        },
        w + (static_cast<i64>(expert) * N + first_n) * row_bytes, row_bytes, num_rows, K, acc);
    product_store(acc, num_rows, [&](int t) -> out_t* {
        return t < count ? out + static_cast<i64>(pairs[first_pair + t]) * N + first_n : nullptr;
    });
}

#endif
