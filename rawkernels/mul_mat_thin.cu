// mul_mat_thin: out = f(x @ w.T) for few tokens: packed weights are read once and multiplied on matrix instructions
//
// Shapes    x [T,K] f16 or f32; w0, w1, w2 [n0|n1|n2, row_bytes] packed: up to three matrices, their products side by side
//           in out [T,N] f32 or f16; norm [K], bias [N] f32
// Launch    grid (ceil(columns of 16 of out / RESULTS), ceil(T / TOKENS)), block (THREADS): a block computes RESULTS times 16
//           columns for TOKENS tokens, each from 16 rows; GATE: from 16 rows of w0 and 16 of w1. The same number of warps works
//           on each 16 rows
// Shared    dynamic. STAGES > 0: WARPS * STAGES * 16 * PITCH bytes of packed rows, and X_STAGES > 0: x, behind them; later the
//           partial sums of the warps, at least WARPS * 16 * max(TOKENS, 16) floats; NORM: behind them T * K f16
// Sync      each warp works alone on its units of k: it keeps STAGES of them coming by asynchronous copies, waits for the
//           oldest, multiplies, and starts the next copy behind a warp barrier. NORM: x is normalised into shared memory
//           while the first copies run, barrier. X_STAGES 1: all warps bring x, barrier. X_STAGES > 1: the warps go through k in
//           step: at a barrier a step's rows and x are there, and what the step before it used is free. Sums: barrier, to
//           shared memory, barrier, added up in the order of warps
// Numerics  x (saturated at 65504) and weights in f16 (Q4_K and Q5_K for up to 8 tokens: exact), sums in f32. NORM: x *
//           rsqrt(mean x^2 + eps) * norm in f32 first
// Defines   QTYPE; TOKENS 2, 8, 16 or 32; X_F16; NORM (TOKENS 2 only)
//           OUTPUT 0 f32, 1 f16, 2 added to f32; GATE 0, 1: silu(w0 x) * (w1 x), 2: gelu; BIAS; RESULTS; THREADS
//           UNIT_K k that a warp works on at a time, UNIT_BYTES their bytes in a row; STAGES 0: rows are read in place
//           X_STAGES 0: warps read x where it lies; on NVIDIA also 1, or 2 and more, as many as STAGES
//           ALIGNED: units begin at multiples of 16 bytes; FULL: K is a multiple of UNIT_K
// SharedLimit   sm_90=232448 sm_80=166912
// Compile   QTYPE=12 TOKENS=2 NORM=1 X_F16=0 OUTPUT=0 GATE=0 BIAS=0 RESULTS=1 X_STAGES=0 THREADS=128 UNIT_K=256
//           UNIT_BYTES=144 STAGES=2 ALIGNED=1 FULL=1;
//           QTYPE=12 TOKENS=2 NORM=1 X_F16=0 OUTPUT=1 GATE=1,2 BIAS=0 RESULTS=1 X_STAGES=0 THREADS=128 UNIT_K=256
//           UNIT_BYTES=144 STAGES=2 ALIGNED=1 FULL=1;
//           QTYPE=12 TOKENS=2,8,16,32 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 RESULTS=1 X_STAGES=0 THREADS=128 UNIT_K=256
//           UNIT_BYTES=144 STAGES=2 ALIGNED=1 FULL=1;
//           QTYPE=14 TOKENS=8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 RESULTS=1 X_STAGES=0 THREADS=128 UNIT_K=256
//           UNIT_BYTES=210 STAGES=2 ALIGNED=0 FULL=1;
//           QTYPE=3 TOKENS=2,8 NORM=0 X_F16=1 OUTPUT=0 GATE=0 BIAS=1 RESULTS=1 X_STAGES=0 THREADS=128 UNIT_K=64
//           UNIT_BYTES=40 STAGES=2 ALIGNED=0 FULL=0;
//           QTYPE=8 TOKENS=2,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 RESULTS=1 X_STAGES=0 THREADS=128 UNIT_K=256
//           UNIT_BYTES=272 STAGES=2 ALIGNED=1 FULL=1;
//           QTYPE=12 TOKENS=16 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 RESULTS=7 X_STAGES=1 THREADS=448 UNIT_K=256
//           UNIT_BYTES=144 STAGES=2 ALIGNED=1 FULL=1 @sm_80 @sm_90;
//           QTYPE=12 TOKENS=32 NORM=0 X_F16=0,1 OUTPUT=1 GATE=1 BIAS=0 RESULTS=4 X_STAGES=2 THREADS=512 UNIT_K=256
//           UNIT_BYTES=144 STAGES=2 ALIGNED=1 FULL=1 @sm_80 @sm_90;
//           QTYPE=13 TOKENS=32 NORM=0 X_F16=1 OUTPUT=0 GATE=0 BIAS=1 RESULTS=7 X_STAGES=2 THREADS=448 UNIT_K=256
//           UNIT_BYTES=176 STAGES=2 ALIGNED=1 FULL=1 @sm_80 @sm_90;
//           QTYPE=14 TOKENS=32 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 RESULTS=7 X_STAGES=2 THREADS=448 UNIT_K=256
//           UNIT_BYTES=210 STAGES=2 ALIGNED=0 FULL=1 @sm_80 @sm_90;
//           QTYPE=23 TOKENS=16 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 RESULTS=7 X_STAGES=1 THREADS=448 UNIT_K=256
//           UNIT_BYTES=136 STAGES=2 ALIGNED=0 FULL=1 @sm_80 @sm_90;
//           QTYPE=8 TOKENS=32 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 RESULTS=7 X_STAGES=2 THREADS=448 UNIT_K=256
//           UNIT_BYTES=272 STAGES=2 ALIGNED=1 FULL=1 @sm_80 @sm_90;
//           QTYPE=0,1,30 TOKENS=8 NORM=0 X_F16=0 OUTPUT=0 GATE=0 BIAS=0 RESULTS=1 X_STAGES=0 THREADS=128 UNIT_K=32
//           UNIT_BYTES=64 STAGES=0 ALIGNED=1 FULL=0
#define KERNEL_MIN_BLOCKS (THREADS <= 256 && !WIDE_GATE ? 2 : 1)
// It takes more registers, and only for small matrices has it so few threads: their blocks are alone.
#define WIDE_GATE (GATE && TOKENS > 16)
#include "common/direct.cuh"
#include "common/gates.cuh"
#include "common/row_pitch.cuh"
#include "common/thin.cuh"
#include "quants/slab.cuh"
#include "quants/split.cuh"
#if X_STAGES && (QTYPE == 2 || QTYPE == 8 || QTYPE == 14 || QTYPE == 20 || QTYPE == 23)
#include "quants/whole.cuh"
#define WHOLE 1  // a lane's eight weights are two times four
#else
#define WHOLE 0
#endif

#define WARPS (THREADS / WARP_SIZE)
#define WORKERS (WARPS / (PARTS * RESULTS))  // warps that share the k of a tile
#define COLUMNS (TOKENS < 16 ? 16 : TOKENS)
#define TILES (COLUMNS / 16)
#define NARROW (TOKENS <= 8)
#define X_ROWS (NARROW ? 1 : DIRECT_ROWS)
#define SLABS (UNIT_K / 32)
// Few tokens: the products of a slab are scaled, not its weights, which costs less and rounds no weight.
#define SCALED (SLAB_SCALED && NARROW && UNIT_K == 256)
// Many: lanes that share a row compute its scales together.
#if defined(TILE_MMA) && SPLIT_SCALES && (WHOLE || QTYPE == 12 || QTYPE == 13) && !NARROW && UNIT_K == 256
#define SPLIT 1
#else
#define SPLIT 0
#endif
// Bytes of a row that a unit touches, in 16-byte pieces; rows in shared memory lie so that lanes meet few bank conflicts.
#define PIECES ((UNIT_BYTES + (ALIGNED ? 0 : 15) + 15) / 16)
#define COPIES ((16 * PIECES + WARP_SIZE - 1) / WARP_SIZE)
#define PITCH (WHOLE ? PITCH_OF_WORDS(PIECES) : PITCH_OF_PAIRS(PIECES))
#define STAGE_BYTES (WARPS * STAGES * 16 * PITCH)
// X_STAGES: x goes through shared memory for all warps, as a whole (1) or in pieces of k; rows lie so that lanes meet no bank
// conflicts.
#define X_PIECES (X_STAGES > 1)
#define STEP_K (WORKERS * UNIT_K)
#define X_PAD (WHOLE ? 16 : 32)  // f16
#define X_PITCH (STEP_K + X_PAD)
#define X_STAGE (TOKENS * X_PITCH)
#define PARTIAL_BYTES (WARPS * COLUMNS * 16 * 4)
#define SUMS_BYTES (STAGE_BYTES > PARTIAL_BYTES ? STAGE_BYTES : PARTIAL_BYTES)

// Where a lane supplies all runs of a row, those of eight slabs would not fit into registers.
constexpr int SLABS_AT_ONCE = SCALED ? (DIRECT_RUNS > 1 ? 4 : SLABS) : DIRECT_SLABS;

#if X_F16 || NORM || X_STAGES
typedef f16 run_t;
#else
typedef float run_t;
#endif

#if X_F16
typedef f16 x_t;
#else
typedef float x_t;
#endif

// Eight activations as f16.
DEVICE void load_run(const f16* source, u32 (&run)[4]) {
    const u32x4 words = load16(source);
    run[0] = words.x, run[1] = words.y, run[2] = words.z, run[3] = words.w;
}

DEVICE void load_run(const float* source, u32 (&run)[4]) {
    const f32x4 a = load16<f32x4>(source);
    const f32x4 b = load16<f32x4>(source + 4);
    run[0] = h2_pack_saturated(a.x, a.y), run[1] = h2_pack_saturated(a.z, a.w);
    run[2] = h2_pack_saturated(b.x, b.y), run[3] = h2_pack_saturated(b.z, b.w);
}

#if X_STAGES
DEVICE void copy_run(f16* target, const f16* source) { async_copy16(target, source); }
DEVICE void copy_run(f16* target, const float* source) {
    u32 run[4];
    load_run(source, run);
    store16(target, u32x4{run[0], run[1], run[2], run[3]});
}
#endif

#if X_PIECES
// Start bringing the x of the step from first_k; runs past the end of K, and tokens that do not exist, are left out.
DEVICE void fetch_x(f16* stage, const x_t* x, i32 first_k, i32 tokens, i32 K) {
    constexpr i32 runs = STEP_K / 8, at_once = THREADS / runs;  // tokens
    static_assert(THREADS % runs == 0, "threads keep to their runs");
    const i32 k = static_cast<i32>(threadIdx.x) % runs * 8, first = static_cast<i32>(threadIdx.x) / runs;
    const x_t* source = x + (static_cast<i64>(first) * K + first_k + k);
    f16* const target = stage + first * X_PITCH + k;
    const i32 wanted = first_k + k < K ? tokens - first : 0;
#pragma unroll
    for (i32 t = 0; t < TOKENS; t += at_once) {
        if (t < wanted) copy_run(target + t * X_PITCH, source);
        source += static_cast<i64>(at_once) * K;
    }
}
#elif X_STAGES
// Start bringing all of x.
DEVICE void fetch_x(f16* stage, i32 pitch, const x_t* x, i32 tokens, i32 K) {
    for (i32 token = WARP_ID(); token < tokens; token += WARPS) {
        for (i32 k = 8 * LANE(); k < K; k += 8 * WARP_SIZE) {
            copy_run(stage + token * pitch + k, x + static_cast<i64>(token) * K + k);
        }
    }
}
#endif

#if NORM
// Normalised rows of x, as f16, in shared memory.
DEVICE void normalise(const float* RESTRICT x, const float* RESTRICT norm, float eps, i32 T, i32 K, f16* target) {
    SHARED float squares[TOKENS][WARPS];
    float sum[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        sum[t] = 0;
        if (t < T) {
            for (i32 k = 4 * threadIdx.x; k < K; k += 4 * THREADS) {
                const f32x4 v = load16<f32x4>(x + static_cast<i64>(t) * K + k);
                sum[t] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
        }
        sum[t] = warp_sum(sum[t]);
        if (LANE() == 0) squares[t][WARP_ID()] = sum[t];
    }
    BARRIER();
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= T) continue;
        float total = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) total += squares[t][i];
        const float factor = rsqrt_f(total / static_cast<float>(K) + eps);
        for (i32 k = 4 * threadIdx.x; k < K; k += 4 * THREADS) {
            const f32x4 v = load16<f32x4>(x + static_cast<i64>(t) * K + k);
            const f32x4 w = load16<f32x4>(norm + k);
            u32* const pairs = reinterpret_cast<u32*>(target + static_cast<i64>(t) * K + k);
            pairs[0] = h2_pack_saturated(v.x * factor * w.x, v.y * factor * w.y);
            pairs[1] = h2_pack_saturated(v.z * factor * w.z, v.w * factor * w.w);
        }
    }
    BARRIER();
}
#endif

#if STAGES
// Where a lane's pieces of a unit come from and go to: the same for all units, up to the unit's offset.
struct Copies {
    const u8* row[COPIES];
    i32 piece[COPIES];
    i32 target[COPIES];
};

DEVICE void plan_copies(Copies& copies, const Rows& rows, i64 row_bytes) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const i32 index = i * WARP_SIZE + LANE();
        const i32 r = index / PIECES;
        copies.piece[i] = 16 * (index % PIECES);
        copies.row[i] = row_of(rows, r, row_bytes);
        copies.target[i] = r < 16 ? r * PITCH + copies.piece[i] : -1;
    }
}

// Start the copies of one unit, whole pieces of 16 bytes; allocations are multiples of that.
DEVICE void fetch(u8* stage, const Copies& copies, i64 offset, i32 bytes) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const u64 begin = reinterpret_cast<u64>(copies.row[i] + offset);
        const i32 rest = ALIGNED ? 0 : static_cast<i32>(static_cast<u32>(begin) % 16);
        const bool whole = FULL && ALIGNED && UNIT_BYTES % 16 == 0;  // all pieces exist
        const bool last = 16 * PIECES % WARP_SIZE && i == COPIES - 1;
        if ((last ? copies.target[i] < 0 : false) || (!whole && copies.piece[i] >= bytes + rest)) continue;
        const u64 source = begin - rest + copies.piece[i];
        async_copy16(stage + copies.target[i], reinterpret_cast<const void*>(source));
    }
}

DEVICE void fetch_unit(u8* stage, const Copies& copies, i32 unit, i32 K) {
    const i32 left = K - unit * UNIT_K;
    if (left <= 0) return;
    fetch(stage, copies, static_cast<i64>(unit) * UNIT_BYTES, left >= UNIT_K ? UNIT_BYTES : left / 32 * (UNIT_BYTES / SLABS));
}
#endif

DEVICE void load_weights(Direct& weights, const u8* const (&packed)[DIRECT_ROWS], int slab, i32 first_k, i32 K) {
#pragma unroll
    for (int i = 0; i < DIRECT_ROWS; i++) {
#pragma unroll
        for (int j = 0; j < DIRECT_RUNS; j++) {
            u32(&run)[4] = weights.run[i][j];
            if (!STAGES && !FULL && first_k + 8 * direct_run(j) >= K) {
                run[0] = run[1] = run[2] = run[3] = 0;
                continue;
            }
#if SCALED
            slab_codes(packed[i], slab, direct_run(j), run);
#else
            slab_decode(packed[i], slab, direct_run(j), run);
#endif
        }
    }
}

// `row` is where the unit that begins at k0 begins; k past the end read the row's first, whose factors are zero.
DEVICE void load_activations(Direct& activations, const run_t* const (&row)[X_ROWS], i32 k0, int slab, i32 K) {
#pragma unroll
    for (int i = 0; i < X_ROWS; i++) {
#pragma unroll
        for (int j = 0; j < DIRECT_RUNS; j++) {
#if WHOLE
            const u32* const four = reinterpret_cast<const u32*>(row[i] + 32 * slab + 4 * direct_run(j));
            u32(&run)[4] = activations.run[i][j];
            run[0] = four[0], run[1] = four[1], run[2] = four[8], run[3] = four[9];
#else
            const i32 k = 32 * slab + 8 * direct_run(j);
            load_run(row[i] + (FULL || X_PIECES || k0 + k < K ? k : -k0), activations.run[i][j]);
#endif
        }
    }
}

KERNEL(THREADS) mul_mat_thin(const x_t* RESTRICT x, const float* RESTRICT norm, const u8* RESTRICT w0,
                             const u8* RESTRICT w1, const u8* RESTRICT w2, const float* RESTRICT bias, void* out,
                             i64 row_bytes, float eps, i32 n0, i32 n1, i32 n2, i32 T, i32 N, i32 K) {
    DYNAMIC_SHARED(u8, memory);
    const i32 worker = WARP_ID() % WORKERS;

    // The 16 rows of this warp; past the last tile once more those of that one.
    const Matrices all = {w0, w1, w2, row_bytes, n0, n1, n2};
    const i32 part = WARP_ID() / WORKERS;
    const i32 result = blockIdx.x * RESULTS + part / PARTS;
    const i32 last_result = results_of(all) - 1;
    const Rows rows = rows_of(all, (result < last_result ? result : last_result) * PARTS + part % PARTS);
    const i32 units = (K + UNIT_K - 1) / UNIT_K;
#if STAGES
    u8* const stages = memory + WARP_ID() * STAGES * 16 * PITCH;
    Copies copies;
    plan_copies(copies, rows, row_bytes);
#endif
    // Weights come before the wait for earlier kernels.
#if X_PIECES
#pragma unroll
    for (int s = 0; s < X_STAGES - 1; s++) fetch_unit(stages + s * 16 * PITCH, copies, worker + s * WORKERS, K);
#elif STAGES
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        fetch_unit(stages + s * 16 * PITCH, copies, worker + s * WORKERS, K);
        async_commit();
    }
#endif
    GRID_DEPENDENCY();
    const i32 first_token = blockIdx.y * TOKENS;
#if X_STAGES
    const i32 tokens = T - first_token < TOKENS ? T - first_token : TOKENS;
    f16* const x_stages = reinterpret_cast<f16*>(memory + STAGE_BYTES);
    const i32 x_pitch = X_PIECES ? X_PITCH : K + X_PAD;
#endif
#if X_PIECES
    const i32 steps = (units + WORKERS - 1) / WORKERS;
#pragma unroll
    for (int s = 0; s < X_STAGES - 1; s++) {
        fetch_x(x_stages + s * X_STAGE, x + static_cast<i64>(first_token) * K, s * STEP_K, tokens, K);
        async_commit();
    }
#elif X_STAGES
    fetch_x(x_stages, x_pitch, x + static_cast<i64>(first_token) * K, tokens, K);
    async_commit();
    async_wait<0>();
    BARRIER();
#endif
#if NORM
    f16* const source = reinterpret_cast<f16*>(memory + SUMS_BYTES);
    normalise(x, norm, eps, T, K, source);
#else
    const x_t* const source = x + static_cast<i64>(first_token) * K;
#endif

    // Tokens past the end repeat the last one: columns of a product do not mix, and theirs are not stored.
    const run_t* token_row[TILES][X_ROWS];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int i = 0; i < X_ROWS; i++) {
            const i32 token = 16 * t + direct_row(i);
#if X_STAGES
            token_row[t][i] = x_stages + token * x_pitch + worker * UNIT_K;
#else
            token_row[t][i] =
                source + (static_cast<i64>(first_token + token < T ? token : T - 1 - first_token) * K + worker * UNIT_K);
#endif
        }
    }
    FragC sum[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) tile_zero(sum[t]);
#if SCALED
    Direct ones;
#pragma unroll
    for (int i = 0; i < DIRECT_ROWS * DIRECT_RUNS * 4; i++) {
        ones.run[i / (DIRECT_RUNS * 4)][i / 4 % DIRECT_RUNS][i % 4] = 0x3C003C00u;
    }
#endif
    i32 stage = 0;
    const u8* weight_row[DIRECT_ROWS];
#pragma unroll
    for (int i = 0; i < DIRECT_ROWS; i++) {
        weight_row[i] = row_of(rows, direct_row(i), row_bytes) + static_cast<i64>(worker) * UNIT_BYTES;
    }
#if X_PIECES
    for (i32 step = 0; step < steps; step++) {
        const i32 unit = worker + step * WORKERS;
        async_wait<X_STAGES - 2>();
        BARRIER();  // this step's x is there, and nobody needs the one before any more
        const i32 ahead = step + X_STAGES - 1;
        const i32 free = stage == 0 ? X_STAGES - 1 : stage - 1;
        if (ahead < steps) {
            fetch_unit(stages + free * 16 * PITCH, copies, worker + ahead * WORKERS, K);
            fetch_x(x_stages + free * X_STAGE, source, ahead * STEP_K, tokens, K);
        }
        async_commit();
        const i32 own_stage = stage;
        stage = stage + 1 == X_STAGES ? 0 : stage + 1;
        if (unit >= units) continue;
#else
    for (i32 unit = worker; unit < units; unit += WORKERS) {
        const i32 own_stage = stage;
#endif
        const i32 k0 = unit * UNIT_K;
        const u8* packed[DIRECT_ROWS];
#pragma unroll
        for (int i = 0; i < DIRECT_ROWS; i++) {
            packed[i] = weight_row[i];
            weight_row[i] += WORKERS * UNIT_BYTES;
#if STAGES
            const i32 shift = ALIGNED ? 0 : static_cast<i32>(reinterpret_cast<u64>(packed[i]) % 16);
            packed[i] = stages + (own_stage * 16 + direct_row(i)) * PITCH + shift;
#endif
        }
#if STAGES && !X_PIECES
        async_wait<STAGES - 1>();
        WARP_BARRIER();
#endif
#if WHOLE
        WholeRow whole[DIRECT_ROWS];
#pragma unroll
        for (int i = 0; i < DIRECT_ROWS; i++) whole[i] = whole_row(packed[i], direct_run(0));
#endif
#if SPLIT
        u32 own_scales[DIRECT_ROWS][2];
#pragma unroll
        for (int i = 0; i < DIRECT_ROWS; i++) split_scales(packed[i], direct_run(0), own_scales[i]);
#endif
#if SCALED
        SlabHead head[DIRECT_ROWS];
#pragma unroll
        for (int i = 0; i < DIRECT_ROWS; i++) head[i] = slab_head(packed[i], 0);
#endif
#pragma unroll SLABS_AT_ONCE
        for (int slab = 0; slab < SLABS; slab++) {
            const i32 first_k = k0 + 32 * slab;
            if (!FULL && first_k >= K) break;
            Direct weights;
#if WHOLE || SPLIT
#pragma unroll
            for (int i = 0; i < DIRECT_ROWS; i++) {
#if SPLIT && WHOLE
                whole_halves_of(whole[i], slab, split_scale(own_scales[i], slab), weights.run[i][0]);
#elif SPLIT
                split_halves_of(packed[i], slab, direct_run(0), split_scale(own_scales[i], slab), weights.run[i][0]);
#else
                whole_halves_of(whole[i], slab, weights.run[i][0]);
#endif
            }
#else
            load_weights(weights, packed, slab, first_k, K);
#endif
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                Direct activations;
#if X_PIECES
                const run_t* rows_of_x[X_ROWS];
#pragma unroll
                for (int i = 0; i < X_ROWS; i++) rows_of_x[i] = token_row[t][i] + own_stage * X_STAGE;
                load_activations(activations, rows_of_x, k0, slab, K);
#else
                load_activations(activations, token_row[t], k0, slab, K);
#endif
#if SCALED
                // The products of whole numbers, scaled; and the sums of the activations, for the minima.
                FragC part, total;
                tile_zero(part);
                tile_zero(total);
                direct_mma_narrow(part, weights, activations);
                direct_mma_narrow(total, ones, activations);
                SlabScale scale[DIRECT_ROWS];
#pragma unroll
                for (int i = 0; i < DIRECT_ROWS; i++) scale[i] = slab_scale(head[i], slab);
#pragma unroll
                for (int i = 0; i < DIRECT_NARROW_ELEMENTS; i++) {
                    const SlabScale& own = scale[tile_c_slot(i)];
                    sum[t].x[i] += own.d * part.x[i] - own.minimum * total.x[i];
                }
#else
                if (NARROW) {
                    direct_mma_narrow(sum[t], weights, activations);
                } else {
                    direct_mma(sum[t], weights, activations);
                }
#endif
            }
        }
#if STAGES && !X_PIECES
        WARP_BARRIER();  // all lanes have read the stage
        fetch_unit(stages + stage * 16 * PITCH, copies, unit + STAGES * WORKERS, K);
        async_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
#endif
#if !X_PIECES
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < X_ROWS; i++) token_row[t][i] += WORKERS * UNIT_K;
        }
#endif
    }
    BARRIER();  // nobody needs the packed rows any more
    float* const sums = reinterpret_cast<float*>(memory);  // [WARPS][COLUMNS][16]
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int i = 0; i < TILE_C_ELEMENTS; i++) {
            sums[(WARP_ID() * COLUMNS + 16 * t + tile_c_col(i)) * 16 + tile_c_row(i)] = sum[t].x[i];
        }
    }
    BARRIER();
    const i32 first_result = blockIdx.x * RESULTS;
    for (i32 i = threadIdx.x; i < RESULTS * TOKENS * 16; i += THREADS) {
        const i32 result = i / (TOKENS * 16);
        if (first_result + result > last_result) break;  // no such tile
        const i32 token = i / 16 % TOKENS;
        const i32 r = i % 16;
        const Rows of_result = rows_of(all, (first_result + result) * PARTS);
        if (first_token + token >= T || r >= of_result.count) continue;
        float total[2] = {0, 0};
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
#pragma unroll
            for (int w = 0; w < WORKERS; w++) {
                total[p] += sums[(((result * PARTS + p) * WORKERS + w) * COLUMNS + token) * 16 + r];
            }
        }
        float value = total[0];
#if BIAS
        value += bias[of_result.column + r];
#endif
#if GATE
        value = gated(value, total[1]);
#endif
        put(out, static_cast<i64>(first_token + token) * N + of_result.column + r, value);
    }
}
