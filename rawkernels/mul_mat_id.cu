// mul_mat_id_vec: out[t,j] = x[t,j] w[experts[t,j]]^T for few (token, slot) pairs: each reads its expert's rows.
//     GATE: silu of that, times the same product with w_up
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
// Defines   QTYPE; vec: ROWS, GATE, X_F16, OUTPUT 0 f32, 1 f16; tile: those of common/product.cuh
// SharedLimit   sm_90=232448 sm_80=166912
// Scratch   sm_80=8 sm_90=8
// Compile   QTYPE=0,1,2,3,6,7,8,10,11,12,13,14,16,17,18,19,20,21,22,23,29,30,34,35,39,40 ROWS=2 GATE=0 X_F16=1
//           OUTPUT=1; QTYPE=12 ROWS=2 GATE=0,1 X_F16=0,1 OUTPUT=0;
//           QTYPE=12 BM=32,64 BN=64 BK=64 THREADS=128 X_STAGES=2 X_F16=1 STAGED=1 OUTPUT=1 @sm_90 @sm_80;
//           QTYPE=12 BM=128 BN=128 BK=64 THREADS=128 X_STAGES=2 X_F16=1 STAGED=1 OUTPUT=1 @sm_90 @sm_80;
//           QTYPE=1,12 BM=64 BN=128 BK=32 THREADS=256 X_STAGES=3 X_F16=0 STAGED=0 OUTPUT=0,1
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

constexpr int RUN = BLOCK_SIZE == 1 ? 8 : 32;  // weights that a lane multiplies at a time

DEVICE float value_of(const f32x4& x, int j) { return j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w; }
DEVICE float value_of(const u32x4& x, int j) {
    const u32 pair = j < 2 ? x.x : j < 4 ? x.y : j < 6 ? x.z : x.w;
    return j % 2 ? high_half(pair) : low_half(pair);
}

#if X_F16
typedef u32x4 piece_t;  // 16 bytes of x
#else
typedef f32x4 piece_t;
#endif

constexpr int PARTS = GATE ? 2 : 1;  // weights

KERNEL(128) mul_mat_id_vec(const x_t* RESTRICT x, const i32* RESTRICT experts, const u8* RESTRICT w,
                           const u8* RESTRICT w_up, out_t* RESTRICT out, i64 row_bytes, i32 N, i32 K, i32 num_experts,
                           i32 num_used, i32 x_slots) {
    GRID_DEPENDENCY();
    const i32 first = (blockIdx.x * (128 / WARP_SIZE) + WARP_ID()) * ROWS;
    const i32 pair = blockIdx.y;
    if (first >= N) return;  // whole warps only: the sums below stay complete
    const i32 expert = experts[pair];
    const bool exists = expert >= 0 && expert < num_experts;
    const x_t* const own = x + static_cast<i64>(x_slots == 1 ? pair / num_used : pair) * K;
    const u8* rows[PARTS * ROWS];
    float sum[PARTS * ROWS];
#pragma unroll
    for (int r = 0; r < PARTS * ROWS; r++) {
        const i64 row = static_cast<i64>(expert) * N + min(first + r % ROWS, N - 1);
        rows[r] = (r < ROWS ? w : w_up) + row * row_bytes;
        sum[r] = 0;
    }
    if (exists) {
        constexpr int pieces = 16 / sizeof(x_t);  // elements of each
#pragma unroll 2
        for (i32 k = RUN * LANE(); k < K; k += RUN * WARP_SIZE) {
            piece_t values[RUN / pieces];
#pragma unroll
            for (int j = 0; j < RUN / pieces; j++) values[j] = load16<piece_t>(own + k + pieces * j);
#pragma unroll
            for (int r = 0; r < PARTS * ROWS; r++) {
                u32 pairs[RUN / 8][4];
                decode_run(rows[r], k, pairs);
#pragma unroll
                for (int j = 0; j < RUN; j++) {
                    const u32 pair = pairs[j / 8][j / 2 % 4];
                    sum[r] += (j % 2 ? high_half(pair) : low_half(pair)) * value_of(values[j / pieces], j % pieces);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < PARTS * ROWS; r++) sum[r] = warp_sum(sum[r]);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float total = GATE ? sum[r] / (1 + expf(-sum[r])) * sum[PARTS * ROWS - ROWS + r] : sum[r];
        if (LANE() == 0 && first + r < N) out[static_cast<i64>(pair) * N + first + r] = to_out(total);
    }
}

#else

#include "common/product.cuh"

KERNEL(THREADS) mul_mat_id_tile(const x_t* RESTRICT x, const i32* RESTRICT lists, const u8* RESTRICT w,
                                out_t* RESTRICT out, i64 row_bytes, i32 num_pairs, i32 N, i32 K, i32 num_experts,
                                i32 num_used, i32 x_slots) {
    GRID_DEPENDENCY();
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
