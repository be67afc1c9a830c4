// mul_mat_thin: out = f(x @ w.T) for few tokens: packed weights are read once and multiplied on matrix instructions
//
// Shapes    x [T,K] f16 or f32; w0, w1, w2 [n0|n1|n2, row_bytes] packed: up to three matrices, their products side by side
//           in out [T,N] f32 or f16; norm [K], bias [N] f32
// Launch    grid (sum of ceil(n / 16), ceil(T / TOKENS)), block (THREADS): a block computes 16 rows for TOKENS tokens
//           GATE: grid (ceil(n0 / 16), ...): half of the warps work on w0, half on w1
// Shared    dynamic. STAGES > 0: WARPS * STAGES * 16 * PITCH bytes of packed rows, later the partial sums of the warps, at
//           least WARPS * 16 * max(TOKENS, 16) floats; NORM: behind them T * K f16
// Sync      each warp works alone on its units of k: it keeps STAGES of them coming by asynchronous copies, waits for the
//           oldest, multiplies, and starts the next copy behind a warp barrier. NORM: x is normalised into shared memory
//           while the first copies run, barrier. Sums: barrier, to shared memory, barrier, added up in the order of warps
// Numerics  x (saturated at 65504) and weights in f16 (Q4_K and Q5_K for up to 8 tokens: exact), sums in f32. NORM: x * rsqrt(mean x^2 + eps) * norm in f32 first
// Defines   QTYPE; TOKENS 2, 8, 16 or 32; X_F16; NORM (TOKENS 2 only)
//           OUTPUT 0 f32, 1 f16, 2 added to f32; GATE 0, 1: silu(w0 x) * (w1 x), 2: gelu; BIAS; THREADS
//           UNIT_K k that a warp works on at a time, UNIT_BYTES their bytes in a row; STAGES 0: rows are read in place
//           ALIGNED: units begin at multiples of 16 bytes; FULL: K is a multiple of UNIT_K
// Compile   QTYPE=12 TOKENS=2 NORM=1 X_F16=0 OUTPUT=0 GATE=0 BIAS=0 THREADS=128 UNIT_K=256 UNIT_BYTES=144 STAGES=2
//           ALIGNED=1 FULL=1;
//           QTYPE=12 TOKENS=2 NORM=1 X_F16=0 OUTPUT=1 GATE=1,2 BIAS=0 THREADS=128 UNIT_K=256 UNIT_BYTES=144 STAGES=2
//           ALIGNED=1 FULL=1;
//           QTYPE=12 TOKENS=2,8,16,32 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=128 UNIT_K=256 UNIT_BYTES=144
//           STAGES=2 ALIGNED=1 FULL=1;
//           QTYPE=14 TOKENS=8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=128 UNIT_K=256 UNIT_BYTES=210 STAGES=2
//           ALIGNED=0 FULL=1;
//           QTYPE=3 TOKENS=2,8 NORM=0 X_F16=1 OUTPUT=0 GATE=0 BIAS=1 THREADS=128 UNIT_K=64 UNIT_BYTES=40 STAGES=2
//           ALIGNED=0 FULL=0;
//           QTYPE=8 TOKENS=2,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=128 UNIT_K=256 UNIT_BYTES=272 STAGES=2
//           ALIGNED=1 FULL=1;
//           QTYPE=0,1,30 TOKENS=8 NORM=0 X_F16=0 OUTPUT=0 GATE=0 BIAS=0 THREADS=128 UNIT_K=32 UNIT_BYTES=64 STAGES=0
//           ALIGNED=1 FULL=0
#define KERNEL_MIN_BLOCKS 2
#include "common/direct.cuh"
#include "common/gates.cuh"
#include "quants/slab.cuh"

#define WARPS (THREADS / WARP_SIZE)
#define PARTS (GATE ? 2 : 1)        // matrices at a time
#define WORKERS (WARPS / PARTS)     // warps that share the k of a matrix
#define COLUMNS (TOKENS < 16 ? 16 : TOKENS)
#define TILES (COLUMNS / 16)
#define NARROW (TOKENS <= 8)
#define X_ROWS (NARROW ? 1 : DIRECT_ROWS)
#define SLABS (UNIT_K / 32)
// Few tokens: the products of a slab are scaled, not its weights, which costs less and rounds no weight.
#define SCALED (SLAB_SCALED && NARROW && UNIT_K == 256)
// Bytes of a row that a unit touches, in 16-byte pieces; rows in shared memory lie so that lanes meet few bank conflicts.
#define PIECES ((UNIT_BYTES + (ALIGNED ? 0 : 15) + 15) / 16)
#define PITCH (PIECES * 16 + ((32 + 128 - PIECES * 16 % 128) % 128 < (96 + 128 - PIECES * 16 % 128) % 128 \
                                  ? (32 + 128 - PIECES * 16 % 128) % 128                                   \
                                  : (96 + 128 - PIECES * 16 % 128) % 128))

#define STAGE_BYTES (WARPS * STAGES * 16 * PITCH)
#define PARTIAL_BYTES (WARPS * COLUMNS * 16 * 4)
#define SUMS_BYTES (STAGE_BYTES > PARTIAL_BYTES ? STAGE_BYTES : PARTIAL_BYTES)

#if X_F16 || NORM
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

DEVICE void put(void* out, i64 index, float value) {
#if OUTPUT == 0
    static_cast<float*>(out)[index] = value;
#elif OUTPUT == 1
    static_cast<f16*>(out)[index] = to_f16_saturated(value);
#else
    static_cast<float*>(out)[index] += value;
#endif
}

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

// The rows of a block's tile, one matrix.
struct Rows {
    const u8* first;
    i32 count;  // rows that exist; those past the end are computed with the last row's weights, and not stored
    i64 row_bytes;
};

DEVICE const u8* row_of(const Rows& rows, i32 r) {
    return rows.first + (r < rows.count ? r : rows.count - 1) * rows.row_bytes;
}

#if STAGES
#define COPIES ((16 * PIECES + WARP_SIZE - 1) / WARP_SIZE)

// Where a lane's pieces of a unit come from and go to: the same for all units, up to the unit's offset.
struct Copies {
    const u8* row[COPIES];
    i32 piece[COPIES];
    i32 target[COPIES];
};

DEVICE void plan_copies(Copies& copies, const Rows& rows) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const i32 index = i * WARP_SIZE + LANE();
        const i32 r = index / PIECES;
        copies.piece[i] = 16 * (index % PIECES);
        copies.row[i] = row_of(rows, r);
        copies.target[i] = r < 16 ? r * PITCH + copies.piece[i] : -1;
    }
}

// Start the copies of one unit, whole pieces of 16 bytes; allocations are multiples of that.
DEVICE void fetch(u8* stage, const Copies& copies, i64 offset, i32 bytes) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const u64 begin = reinterpret_cast<u64>(copies.row[i] + offset);
        const u64 source = (ALIGNED ? begin : begin / 16 * 16) + copies.piece[i];
        const bool whole = FULL && ALIGNED && UNIT_BYTES % 16 == 0;  // all pieces exist
        const bool last = 16 * PIECES % WARP_SIZE && i == COPIES - 1;
        if ((last ? copies.target[i] < 0 : false) || (!whole && source >= begin + bytes)) continue;
        async_copy16(stage + copies.target[i], reinterpret_cast<const void*>(source));
    }
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

DEVICE void load_activations(Direct& activations, const run_t* const (&row)[X_ROWS], i32 first_k, i32 K) {
#pragma unroll
    for (int i = 0; i < X_ROWS; i++) {
#pragma unroll
        for (int j = 0; j < DIRECT_RUNS; j++) {
            const i32 k = first_k + 8 * direct_run(j);
            load_run(row[i] + (FULL || k < K ? k : 0), activations.run[i][j]);
        }
    }
}

KERNEL(THREADS) mul_mat_thin(const x_t* RESTRICT x, const float* RESTRICT norm, const u8* RESTRICT w0,
                             const u8* RESTRICT w1, const u8* RESTRICT w2, const float* RESTRICT bias, void* out,
                             i64 row_bytes, float eps, i32 n0, i32 n1, i32 n2, i32 T, i32 N, i32 K) {
    DYNAMIC_SHARED(u8, memory);
    const i32 worker = WARP_ID() % WORKERS;
    const i32 part = WARP_ID() / WORKERS;

    // The 16 rows of this block, or of this half of its warps.
    const u8* matrix = GATE && part ? w1 : w0;
    i32 tile = blockIdx.x;
    i32 n = n0;
    i32 column = 0;
    if (!GATE) {
        if (tile >= (n0 + 15) / 16) {
            tile -= (n0 + 15) / 16;
            matrix = w1, n = n1, column = n0;
            if (tile >= (n1 + 15) / 16) {
                tile -= (n1 + 15) / 16;
                matrix = w2, n = n2, column = n0 + n1;
            }
        }
    }
    const Rows rows = {matrix + 16 * tile * row_bytes, n - 16 * tile < 16 ? n - 16 * tile : 16, row_bytes};
    const i32 units = (K + UNIT_K - 1) / UNIT_K;
#if STAGES
    u8* const stages = memory + WARP_ID() * STAGES * 16 * PITCH;
    Copies copies;
    plan_copies(copies, rows);
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        const i32 unit = worker + s * WORKERS;
        const i32 left = K - unit * UNIT_K;
        if (left > 0) {
            fetch(stages + s * 16 * PITCH, copies, static_cast<i64>(unit) * UNIT_BYTES,
                  left >= UNIT_K ? UNIT_BYTES : left / 32 * (UNIT_BYTES / SLABS));
        }
        async_commit();
    }
#endif
    GRID_DEPENDENCY();
    const i32 first_token = blockIdx.y * TOKENS;
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
            token_row[t][i] = source + static_cast<i64>(first_token + token < T ? token : T - 1 - first_token) * K;
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
    for (i32 unit = worker; unit < units; unit += WORKERS) {
        const i32 k0 = unit * UNIT_K;
        const u8* packed[DIRECT_ROWS];
#pragma unroll
        for (int i = 0; i < DIRECT_ROWS; i++) {
            packed[i] = row_of(rows, direct_row(i)) + static_cast<i64>(unit) * UNIT_BYTES;
#if STAGES
            const i32 shift = ALIGNED ? 0 : static_cast<i32>(reinterpret_cast<u64>(packed[i]) % 16);
            packed[i] = stages + (stage * 16 + direct_row(i)) * PITCH + shift;
#endif
        }
#if STAGES
        async_wait<STAGES - 1>();
        WARP_BARRIER();
#endif
#if SCALED
        SlabHead head[DIRECT_ROWS];
#pragma unroll
        for (int i = 0; i < DIRECT_ROWS; i++) head[i] = slab_head(packed[i], 0);
#endif
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            const i32 first_k = k0 + 32 * slab;
            if (!FULL && first_k >= K) break;
            Direct weights;
            load_weights(weights, packed, slab, first_k, K);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                Direct activations;
                load_activations(activations, token_row[t], first_k, K);
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
#if STAGES
        WARP_BARRIER();  // all lanes have read the stage
        const i32 next = unit + STAGES * WORKERS;
        const i32 left = K - next * UNIT_K;
        if (left > 0) {
            fetch(stages + stage * 16 * PITCH, copies, static_cast<i64>(next) * UNIT_BYTES,
                  left >= UNIT_K ? UNIT_BYTES : left / 32 * (UNIT_BYTES / SLABS));
        }
        async_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
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
    for (i32 i = threadIdx.x; i < TOKENS * 16; i += THREADS) {
        const i32 token = first_token + i / 16;
        const i32 r = i % 16;
        if (token >= T || r >= rows.count) continue;
        float total[2] = {0, 0};
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
#pragma unroll
            for (int w = 0; w < WORKERS; w++) total[p] += sums[(p * WORKERS + w) * COLUMNS * 16 + i];
        }
        float value = total[0];
#if BIAS
        value += bias[column + 16 * tile + r];
#endif
#if GATE
        value = gated(value, total[1]);
#endif
        put(out, static_cast<i64>(token) * N + column + 16 * tile + r, value);
    }
}
