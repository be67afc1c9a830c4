// product: BM rows of x times BN rows of packed w, by one block on matrix instructions; both are rounded to f16.
//
//   FragC acc[FM][FN];
//   product_tile(rows_of_x, w, row_bytes, num_rows, K, acc);
//   product_store(acc, num_rows, [&](int t) { return a pointer to where row t of the products goes, or null; });
//
// rows_of_x(t) is a pointer to row t = 0..BM-1 of x; rows beyond the last may be any that can be read. w begins at the
// block's first row; of its BN rows num_rows exist. K % 8 == 0.
//
// A step is BK of K. While the warps multiply a step, x and packed rows of later ones are copied to shared memory, and the next step's weights are decoded there: the first half of the warps decodes before it multiplies,
// the other half behind, so that matrix units and the rest work at the same time.
//
// Shared    dynamic: x [X_STAGES, BM, LD] f16; w [W_STAGES, BN, LD] f16; where STAGED, packed rows [2, BN, PITCH] bytes,
//           CHUNK weights of each. product_shared_bytes of pyllm/ops/product_tile.py says how many bytes that are.
// Sync      one barrier a step: it publishes what was copied and decoded for this step, and frees what the step before
//           has read.
// Defines   QTYPE; BM, BN, BK; THREADS of a block; X_STAGES, 2 or 3; X_F16: x is float16, otherwise float32, saturated at 65504; STAGED: packed rows go
//           through shared memory; OUTPUT: 0 float32, 1 float16 (saturated), 2 added to float32
#pragma once
#include "common/platform.cuh"
#include "common/product_parts.cuh"
#include "common/tile.cuh"

constexpr int LD = BK + 8;  // rows are padded against bank conflicts
constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int WARPS_M = BM >= 2 * BN && WARPS == 8 ? 4 : BM >= 64 && WARPS > 2 ? 2 : 1;
constexpr int WARPS_N = WARPS / WARPS_M;
constexpr int FM = BM / 16 / WARPS_M;
constexpr int FN = BN / 16 / WARPS_N;
static_assert(FM * WARPS_M * 16 == BM && FN * WARPS_N * 16 == BN, "warps divide the tile");

constexpr int AHEAD = X_STAGES - 1;  // steps between asking for x and multiplying it
constexpr int W_STAGES = COPIED ? X_STAGES : 2;

constexpr int X_GROUPS = BM * BK / 8 / THREADS;  // eight elements each, of a thread
constexpr int W_GROUPS = BN * BK / 8 / THREADS;
static_assert(THREADS % (BK / 8) == 0, "a thread's groups of x lie in one column");
static_assert(X_GROUPS >= 1 && W_GROUPS >= 1, "every thread has something to load");
constexpr int RUN = W_GROUPS < 4 ? 8 * W_GROUPS : 32;  // weights of one row that a thread decodes together
constexpr int RUNS = BN * BK / RUN / THREADS;

constexpr int CHUNK_STEPS = CHUNK / BK;
static_assert(!STAGED || CHUNK_STEPS >= AHEAD, "a chunk is needed so many steps after it was asked for");
static_assert(X_STAGES == 2 || X_STAGES == 3, "one is multiplied, the others are on their way");

constexpr int X_TILE = BM * LD;  // elements
constexpr int W_TILE = BN * LD;

#if X_F16
typedef f16 x_t;
#else
typedef float x_t;
#endif

// A thread's share of a step of x.
struct ProductX {
    const x_t* rows[X_GROUPS];

    static DEVICE int row(int group) { return (group * THREADS + static_cast<int>(threadIdx.x)) / (BK / 8); }
    static DEVICE int column() { return static_cast<int>(threadIdx.x) % (BK / 8) * 8; }

#if X_F16
    DEVICE void request(f16* tile, i32 k0, i32 K) const {
        const i32 k = k0 + column();
        f16* const target = tile + row(0) * LD + column();
        constexpr int rows_between = THREADS / (BK / 8);
        if (k < K) {
#pragma unroll
            for (int g = 0; g < X_GROUPS; g++) async_copy16(target + g * rows_between * LD, rows[g] + k);
        } else if (k0 < K) {
#pragma unroll
            for (int g = 0; g < X_GROUPS; g++) store16(target + g * rows_between * LD, u32x4{0, 0, 0, 0});
        }
    }
    DEVICE void load(i32, i32) {}
    DEVICE void store(f16*) const {}
#else
    f32x4 next[X_GROUPS][2];

    DEVICE void request(f16*, i32, i32) const {}
    DEVICE void load(i32 k0, i32 K) {
        const i32 k = k0 + column();
#pragma unroll
        for (int g = 0; g < X_GROUPS; g++) {
            next[g][0] = next[g][1] = f32x4{0, 0, 0, 0};
            if (k < K) next[g][0] = load16<f32x4>(rows[g] + k), next[g][1] = load16<f32x4>(rows[g] + k + 4);
        }
    }
    DEVICE void store(f16* tile) const {
#pragma unroll
        for (int g = 0; g < X_GROUPS; g++) {
            const f32x4 a = next[g][0], b = next[g][1];
            const u32x4 halves = {h2_pack_saturated(a.x, a.y), h2_pack_saturated(a.z, a.w),
                                  h2_pack_saturated(b.x, b.y), h2_pack_saturated(b.z, b.w)};
            store16(tile + row(g) * LD + column(), halves);
        }
    }
#endif
};

// Rows of w; a row that does not exist is the last one once more.
struct ProductW {
    const u8* first;
    i64 row_bytes;
    i32 num_rows, K;
    u8* chunks;

    DEVICE const u8* row(int n) const { return first + static_cast<i64>(n < num_rows ? n : num_rows - 1) * row_bytes; }

    // Ask for the chunk of all rows.
    DEVICE void request(int chunk) const {
#if STAGED
        if (chunk * CHUNK >= K) return;
        const i64 begin = static_cast<i64>(chunk) * CHUNK_BYTES;
        const i32 bytes = static_cast<i32>(min(row_bytes - begin, static_cast<i64>(CHUNK_BYTES)));
        u8* const target = chunks + chunk % 2 * BN * PITCH;
        // Four lanes to a row: their pieces are neighbours.
        const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll 1
        for (int n = static_cast<int>(threadIdx.x) / 4; n < BN; n += THREADS / 4) {
            request_packed(target + n * PITCH, row(n) + begin, bytes, lane);
        }
#else
        (void)chunk;
#endif
    }

    // Ask for a step of rows that need no decoding.
    DEVICE void request_copy(f16* tile, i32 k0) const {
        if (!COPIED) return;
#pragma unroll
        for (int g = 0; g < W_GROUPS; g++) {
            const int group = g * THREADS + threadIdx.x;
            const int n = group / (BK / 8), column = group % (BK / 8) * 8;
            f16* const target = tile + n * LD + column;
            if (k0 + column < K) {
                async_copy16(target, row(n) + 2 * static_cast<i64>(k0 + column));
            } else if (k0 < K) {
                store16(target, u32x4{0, 0, 0, 0});
            }
        }
    }

    DEVICE void decode(f16* tile, i32 k0) const {
        if (COPIED || k0 >= K) return;
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            const int run = r * THREADS + threadIdx.x;
            const int n = run / (BK / RUN), column = run % (BK / RUN) * RUN;
#if STAGED
            const int chunk = static_cast<u32>(k0) / CHUNK;
            const u8* const source = chunks + (chunk % 2 * BN + n) * PITCH + packed_offset(static_cast<u32>(reinterpret_cast<u64>(row(n))), chunk);
            const i32 k = static_cast<u32>(k0) % CHUNK + column;
#else
            const u8* const source = row(n);
            const i32 k = k0 + column;
#endif
            u32 pairs[RUN / 8][4];
            decode_some(source, k, K - k0 - column, pairs);
#pragma unroll
            for (int j = 0; j < RUN / 8; j++) {
                store16(tile + n * LD + column + 8 * j, u32x4{pairs[j][0], pairs[j][1], pairs[j][2], pairs[j][3]});
            }
        }
    }
};

template <typename RowsOfX>
DEVICE void product_tile(const RowsOfX& rows_of_x, const u8* RESTRICT w, i64 row_bytes, i32 num_rows, i32 K,
                         FragC (&acc)[FM][FN]) {
    DYNAMIC_SHARED(f16, shared);
    f16* const x_tiles = shared;
    f16* const w_tiles = shared + X_STAGES * X_TILE;
    const ProductW weights = {w, row_bytes, num_rows, K, reinterpret_cast<u8*>(w_tiles + W_STAGES * W_TILE)};
    ProductX x;
#pragma unroll
    for (int g = 0; g < X_GROUPS; g++) x.rows[g] = rows_of_x(ProductX::row(g));

    const int warp_m = WARP_ID() / WARPS_N * FM * 16;
    const int warp_n = WARP_ID() % WARPS_N * FN * 16;
    const bool decodes_first = WARP_ID() < WARPS / 2;
#pragma unroll
    for (int m = 0; m < FM; m++) {
#pragma unroll
        for (int n = 0; n < FN; n++) tile_zero(acc[m][n]);
    }

    const int steps = (K + BK - 1) / BK;
    x.load(0, K);
#pragma unroll
    for (int step = 0; step < AHEAD; step++) {
        x.request(x_tiles + step * X_TILE, step * BK, K);
        weights.request_copy(w_tiles + step * W_TILE, step * BK);
        if (step == 0) weights.request(0);
        if (step == AHEAD - 1) weights.request(1);
        async_commit();
    }
    x.store(x_tiles);
    async_wait<AHEAD - 1>();
    BARRIER();  // the first chunk is there
    weights.decode(w_tiles, 0);

    for (int step = 0; step < steps; step++) {
        const i32 k0 = step * BK;
        async_wait<AHEAD - 1>();  // x of this step, and all that was asked for before
        BARRIER();
        x.load(k0 + BK, K);
        x.request(x_tiles + (step + AHEAD) % X_STAGES * X_TILE, k0 + AHEAD * BK, K);
        weights.request_copy(w_tiles + (step + AHEAD) % W_STAGES * W_TILE, k0 + AHEAD * BK);
        if ((step + 1) % CHUNK_STEPS == 0) weights.request((step + 1) / CHUNK_STEPS + 1);
        async_commit();
        f16* const next = w_tiles + (step + 1) % W_STAGES * W_TILE;
        if (decodes_first) weights.decode(next, k0 + BK);

        const f16* const xs = x_tiles + step % X_STAGES * X_TILE + warp_m * LD;
        const f16* const ws = w_tiles + step % W_STAGES * W_TILE + warp_n * LD;
        FragA a[2][FM];
        FragB b[2][FN];
#pragma unroll
        for (int m = 0; m < FM; m++) tile_load_a(a[0][m], xs + 16 * m * LD, LD);
#pragma unroll
        for (int n = 0; n < FN; n++) tile_load_b(b[0][n], ws + 16 * n * LD, LD);
#pragma unroll
        for (int k = 0; k < BK / 16; k++) {
            if (k + 1 < BK / 16) {  // fragments of the next products come while these are computed
#pragma unroll
                for (int m = 0; m < FM; m++) tile_load_a(a[(k + 1) % 2][m], xs + 16 * m * LD + 16 * (k + 1), LD);
#pragma unroll
                for (int n = 0; n < FN; n++) tile_load_b(b[(k + 1) % 2][n], ws + 16 * n * LD + 16 * (k + 1), LD);
            }
#pragma unroll
            for (int m = 0; m < FM; m++) {
#pragma unroll
                for (int n = 0; n < FN; n++) tile_mma(acc[m][n], a[k % 2][m], b[k % 2][n]);
            }
        }
        if (!decodes_first) weights.decode(next, k0 + BK);
        x.store(x_tiles + (step + 1) % X_STAGES * X_TILE);
    }
}

// Elements of C that a lane has side by side in one row.
#if defined(TILE_WMMA)
constexpr int TILE_C_SIDE = 1;
#else
constexpr int TILE_C_SIDE = 2;
#endif

template <typename RowOfOut>
DEVICE void product_store(const FragC (&acc)[FM][FN], i32 num_rows, const RowOfOut& row_of_out) {
    const int warp_m = WARP_ID() / WARPS_N * FM * 16;
    const int warp_n = WARP_ID() % WARPS_N * FN * 16;
#pragma unroll
    for (int m = 0; m < FM; m++) {
#pragma unroll
        for (int i = 0; i < TILE_C_ELEMENTS; i += TILE_C_SIDE) {
            out_t* const row = row_of_out(warp_m + 16 * m + tile_c_row(i));
            if (row == nullptr) continue;
            const bool in_pairs = TILE_C_SIDE == 2 && reinterpret_cast<u64>(row) % (2 * sizeof(out_t)) == 0;
#pragma unroll
            for (int n = 0; n < FN; n++) {
                const int column = warp_n + 16 * n + tile_c_col(i);
                if (in_pairs && column + 1 < num_rows) {
                    product_put_pair(row + column, acc[m][n].x[i], acc[m][n].x[i + TILE_C_SIDE - 1]);
                    continue;
                }
#pragma unroll
                for (int j = 0; j < TILE_C_SIDE; j++) {
                    if (column + j < num_rows) product_put(row + column + j, acc[m][n].x[i + j]);
                }
            }
        }
    }
}
