// mul_mat_wgmma_direct: out = f(x @ w.T) for tens of tokens on Hopper's products of four warps: packed weights become factors in
// the registers of the lanes that decode them
//
// Shapes    x: arrange_x.cu's tiles of TOKENS tokens and X_K k; w0, w1, w2 [n0|n1|n2, row_bytes] packed: up to three matrices,
//           their products side by side in out [T,N] f32 or f16; bias [N] f32; K a multiple of 256
// Launch    grid (blocks), block (THREADS): blocks take tiles in turn. A tile is TOKENS tokens and RESULTS columns of out, and one
//           of `shares` of k. GROUPS groups of four warps multiply, KPARTS of them share the units of 256 k of 64 rows. GATE: of 16
//           rows of a warp half are of w0 and half of w1, so that a lane has both products
// Shared    dynamic, from a multiple of 1024 bytes: tiles of x [X_STAGES, KPARTS]; of each warp, units of packed rows [W_STAGES,
//           16, PITCH]; the sums of groups that do not store, TOKENS * 64 floats each
// Sync      x_arrived: tiles of a stage are in place; x_done: all warps that multiply have read them; the next are
//           copied by a warp of its own. Packed rows are a warp's own: it waits for its copies, and
//           asks for more when all its lanes have read what lies there. Where groups share k they meet at the end of a tile, before
//           sums are written over those of the last tile and again when all are in place
// Numerics  weights rounded to f16 (HELD: with a power of two for each 256 weights of a row taken out); sums in f32, of a
//           lane's own k one after the other, then of the groups in turn
// Defines   QTYPE; TOKENS 32, 64, 128; GROUPS; KPARTS; X_K 64, 128, 256; X_STAGES; W_STAGES
//           HELD: QTYPE 12 and 13, up to 64 tokens: see quants/held.cuh
//           UNIT_BYTES of 256 weights; ALIGNED: they begin at multiples of 16; GATE 0, 1: silu(w0 x) * (w1 x), 2: gelu; BIAS
//           OUTPUT 0 f32, 1 f16, 2 added to f32, 3 f32 sums of each share of k, [S][T][N]
// Arch      sm_90a
// SharedLimit   sm_90a=232448
// Scratch   sm_90a=24
// Compile   QTYPE=12 TOKENS=32 GROUPS=4 KPARTS=2 X_K=128 X_STAGES=4 W_STAGES=2 HELD=1 UNIT_BYTES=144 ALIGNED=1 GATE=0 BIAS=0
//           OUTPUT=0,3;
//           QTYPE=13 TOKENS=64 GROUPS=4 KPARTS=1 X_K=64 X_STAGES=4 W_STAGES=2 HELD=1 UNIT_BYTES=176 ALIGNED=1 GATE=1 BIAS=0
//           OUTPUT=1;
//           QTYPE=12 TOKENS=128 GROUPS=3 KPARTS=1 X_K=64 X_STAGES=4 W_STAGES=2 HELD=0 UNIT_BYTES=144 ALIGNED=1 GATE=2 BIAS=0
//           OUTPUT=1;
//           QTYPE=14 TOKENS=128 GROUPS=4 KPARTS=1 X_K=64 X_STAGES=4 W_STAGES=2 HELD=0 UNIT_BYTES=210 ALIGNED=0 GATE=0 BIAS=1
//           OUTPUT=0,2;
//           QTYPE=8 TOKENS=64 GROUPS=3 KPARTS=3 X_K=64 X_STAGES=3 W_STAGES=2 HELD=0 UNIT_BYTES=272 ALIGNED=1 GATE=0 BIAS=0
//           OUTPUT=2;
//           QTYPE=2,3,6,7,10,11,16,17,18,19,20,21,22,23,29,34,35,39,40 TOKENS=64 GROUPS=2 KPARTS=1 X_K=64 X_STAGES=3 W_STAGES=2
//           HELD=0 UNIT_BYTES=272 ALIGNED=0 GATE=0 BIAS=0 OUTPUT=0
#include "common/gates.cuh"
#include "common/product_out.cuh"
#include "common/row_pitch.cuh"
#include "common/tile_wgmma.cuh"
#include "quants/slab.cuh"
#include "quants/split.cuh"
#if QTYPE == 2 || QTYPE == 8 || QTYPE == 14 || QTYPE == 20 || QTYPE == 23
#include "quants/whole.cuh"
#define WHOLE 1  // a lane's eight weights are two times four
#else
#define WHOLE 0
#endif
#if HELD
#include "quants/held.cuh"
#endif
#define SPLIT (SPLIT_SCALES && !HELD)

#define GROUP_THREADS 128
#define THREADS (GROUP_THREADS * (GROUPS + 1))  // the last group has one warp at work
#define UNIT_K 256
#define PIECES ((UNIT_BYTES + (ALIGNED ? 0 : 15) + 15) / 16)
#define PITCH (WHOLE ? PITCH_OF_WORDS(PIECES) : PITCH_OF_PAIRS(PIECES))

constexpr int GROUP_WARPS = GROUP_THREADS / WARP_SIZE;
constexpr int WARPS = GROUPS * GROUP_WARPS;
constexpr int ROW_GROUPS = GROUPS / KPARTS;
constexpr int WARP_RESULTS = GATE ? 8 : 16;
constexpr int RESULTS = ROW_GROUPS * GROUP_WARPS * WARP_RESULTS;
constexpr int X_PANEL = TOKENS * 128;  // bytes
constexpr int X_PANELS = X_K / PANEL;
constexpr int X_TILE = X_PANEL * X_PANELS;
constexpr int X_STAGE = X_TILE * KPARTS;
constexpr int W_STAGE = 16 * PITCH;
constexpr int SUMS = TOKENS / 2;  // of a lane
static_assert(ROW_GROUPS * KPARTS == GROUPS, "groups share the work evenly");

// Registers of a thread: of all at first; of those that copy; of those that multiply.
constexpr int FIRST_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int COPIER_REGISTERS = 32;
constexpr int LEFT_REGISTERS = (FIRST_REGISTERS * (GROUPS + 1) - COPIER_REGISTERS) / GROUPS / 8 * 8;
constexpr int REGISTERS = LEFT_REGISTERS < 240 ? LEFT_REGISTERS : 240;

struct Matrices {
    const u8 *w0, *w1, *w2;
    i64 row_bytes;
    i32 n0, n1, n2, T, K, shares;

    DEVICE static i32 parts_of(i32 n) { return (n + RESULTS - 1) / RESULTS; }
    DEVICE i32 parts() const { return GATE ? parts_of(n0) : parts_of(n0) + parts_of(n1) + parts_of(n2); }
    DEVICE i32 columns() const { return (T + TOKENS - 1) / TOKENS; }
    DEVICE i32 tiles() const { return parts() * columns() * shares; }
};

// What a tile is made of.
struct Tile {
    i32 part;    // of all results
    i32 column;  // of tokens
    i32 share, unit, end;

    DEVICE i32 steps() const { return (end - unit + KPARTS - 1) / KPARTS; }
};

DEVICE Tile tile_of(const Matrices& all, i32 i) {
    const i32 columns = all.columns(), parts = all.parts(), units = all.K / UNIT_K;
    Tile tile;
    tile.column = i % columns;
    tile.part = i / columns % parts;
    tile.share = i / columns / parts;
    tile.unit = tile.share * units / all.shares;
    tile.end = (tile.share + 1) * units / all.shares;
    return tile;
}

// The rows of a warp.
struct Rows {
    const u8 *matrix, *second;  // GATE: of the second half
    i32 n, first;               // rows of the matrix, and which is the warp's first
    i32 column;                 // of the first row's products in out
};

DEVICE Rows rows_of(const Matrices& all, i32 part, int row_group) {
    Rows rows = {all.w0, all.w1, all.n0, 0, 0};
    const i32 parts0 = all.parts_of(all.n0), parts1 = all.parts_of(all.n1);
    if (!GATE && part >= parts0) {
        part -= parts0, rows.matrix = all.w1, rows.n = all.n1, rows.column = all.n0;
        if (part >= parts1) {
            part -= parts1, rows.matrix = all.w2, rows.n = all.n2, rows.column = all.n0 + all.n1;
        }
    }
    rows.first = part * RESULTS + (row_group * GROUP_WARPS + WARP_ID() % GROUP_WARPS) * WARP_RESULTS;
    rows.column += rows.first;
    return rows;
}

// Of place lane / 4 + 8 i of a warp's 16, which row it holds. Without a gate a lane's two are neighbours, of which it stores the
// products together.
DEVICE const u8* row_at(const Rows& rows, int i, i64 row_bytes) {
    const i32 row = rows.first + (GATE ? LANE() / 4 : LANE() / 4 * 2 + i);
    return (GATE && i ? rows.second : rows.matrix) + (row < rows.n ? row : rows.n - 1) * row_bytes;
}

DEVICE u8* tiles_begin() {
    DYNAMIC_SHARED(u8, dynamic);
    return dynamic + (-shared_address(dynamic) & 1023);
}

// ---- x

struct Ring {
    int stage = 0;
    u32 phase = 0;

    DEVICE void advance() {
        if (++stage == X_STAGES) stage = 0, phase ^= 1;
    }
};

struct Places {
    Signal x_arrived[X_STAGES], x_done[X_STAGES];
};

// By one warp: X_K k of KPARTS units a stage.
DEVICE void bring_x(Places& places, Ring& ring, const Tile& tile, const u8* x, i32 K) {
    const u32 stages = shared_address(tiles_begin());
    const u8* const column = x + static_cast<i64>(tile.column) * (K / X_K) * X_TILE;
#pragma unroll 1
    for (i32 unit = tile.unit; unit < tile.end; unit += KPARTS) {
        const i32 parts = min(tile.end - unit, static_cast<i32>(KPARTS));
#pragma unroll 1
        for (i32 k = 0; k < UNIT_K / X_K; k++) {
            signal_wait(&places.x_done[ring.stage], ring.phase ^ 1);
            if (LANE() == 0) {
                signal_expect(&places.x_arrived[ring.stage], parts * X_TILE);
                for (i32 part = 0; part < parts; part++) {
                    bulk_copy(&places.x_arrived[ring.stage], stages + ring.stage * X_STAGE + part * X_TILE,
                              column + static_cast<i64>((unit + part) * (UNIT_K / X_K) + k) * X_TILE, X_TILE);
                }
            }
            ring.advance();
        }
    }
}

// ---- weights

// What a warp asks for next.
struct Source {
    const u8* rows[2];
    i32 tile, unit, end;
};

DEVICE void begin_tile(Source& source, const Matrices& all, int row_group, int part) {
    if (source.tile >= all.tiles()) return;
    const Tile tile = tile_of(all, source.tile);
    const Rows rows = rows_of(all, tile.part, row_group);
#pragma unroll
    for (int i = 0; i < 2; i++) source.rows[i] = row_at(rows, i, all.row_bytes);
    source.unit = tile.unit + part, source.end = source.unit + tile.steps() * KPARTS;
}

// Starts the copies of a unit of 16 rows, four lanes to a row, and finds the next one.
DEVICE void fetch(Source& source, u8* stage, const Matrices& all, int row_group, int part) {
    if (source.tile < all.tiles()) {
        if (source.unit < all.K / UNIT_K) {  // past the end of a share come units that nobody uses
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u64 begin = reinterpret_cast<u64>(source.rows[i] + static_cast<i64>(source.unit) * UNIT_BYTES);
                const i32 rest = ALIGNED ? 0 : static_cast<i32>(begin % 16);
                const u8* const from = reinterpret_cast<const u8*>(begin - rest) + 16 * (LANE() % 4);
                u8* const to = stage + (LANE() / 4 + 8 * i) * PITCH + 16 * (LANE() % 4);
                const i32 bytes = UNIT_BYTES + rest - 16 * (LANE() % 4);
#pragma unroll
                for (int piece = 0; piece < PIECES; piece += 4) {
                    const bool exists = (piece + 4) * 16 <= UNIT_BYTES || 16 * piece < bytes;
                    async_copy16_where(to + 16 * piece, from + 16 * piece, exists);
                }
            }
        }
        source.unit += KPARTS;
        if (source.unit == source.end) {
            source.tile += static_cast<i32>(gridDim.x);
            begin_tile(source, all, row_group, part);
        }
    }
    async_commit();
}

// What a lane knows of its two rows in a unit.
struct Decoder {
    const u8* packed[2];
#if HELD
    HeldRow held[2];
#elif WHOLE
    WholeRow whole[2];
#endif
#if SPLIT
    u32 scales[2][2];
#endif
};

// `lowest`: bits of the rows' addresses.
DEVICE Decoder decoder_of(const u8* stage, const u32 (&lowest)[2], i32 unit) {
    Decoder decoder;
    const int run = LANE() % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 shift = ALIGNED ? 0 : (lowest[i] + static_cast<u32>(unit) * UNIT_BYTES) % 16;
        decoder.packed[i] = stage + (LANE() / 4 + 8 * i) * PITCH + shift;
#if HELD
        decoder.held[i] = held_row(decoder.packed[i], run);
#elif WHOLE
        decoder.whole[i] = whole_row(decoder.packed[i], run);
#endif
#if SPLIT
        split_scales(decoder.packed[i], run, decoder.scales[i]);
#endif
    }
    return decoder;
}

// The lane's weights of a slab of 32 k, as factors of two products.
DEVICE void decode_slab(const Decoder& decoder, int slab, u32 (*factors)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 w[4];
#if HELD
        held_halves(decoder.held[i], slab, held_scales(decoder.held[i], slab), w);
#elif SPLIT && WHOLE
        whole_halves_of(decoder.whole[i], slab, split_scale(decoder.scales[i], slab), w);
#elif WHOLE
        whole_halves_of(decoder.whole[i], slab, w);
#elif SPLIT
        split_halves_of(decoder.packed[i], slab, LANE() % 4, split_scale(decoder.scales[i], slab), w);
#else
        slab_decode(decoder.packed[i], slab, LANE() % 4, w);
#endif
        factors[0][i] = w[0], factors[0][2 + i] = w[1];
        factors[1][i] = w[2], factors[1][2 + i] = w[3];
    }
}

// ---- products

// Sums of a group that does not store: fours of a lane, one behind the other.
DEVICE void show_sums(const float (&sum)[SUMS], float* place) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
        store16(place + i * GROUP_THREADS, f32x4{sum[i], sum[i + 1], sum[i + 2], sum[i + 3]});
    }
}

DEVICE void add_sums(float (&sum)[SUMS], const float* place) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
        const f32x4 four = load16<f32x4>(place + i * GROUP_THREADS);
        sum[i] += four.x, sum[i + 1] += four.y, sum[i + 2] += four.z, sum[i + 3] += four.w;
    }
}

// `out` is the first token's row of the tile. Element 4 j + i is token 8 j + 2 (lane % 4) + i % 2, row i / 2 of the lane.
DEVICE void store_sums(const float (&sum)[SUMS], const Rows& rows, const float* bias, out_t* out, i32 tokens, i32 N) {
    const i32 row = GATE ? LANE() / 4 : LANE() / 4 * 2, column = rows.column + row;
    if (rows.first + row >= rows.n) return;
    const bool two = !GATE && rows.first + row + 1 < rows.n;
    const bool pair = two && (column | N) % 2 == 0 && reinterpret_cast<u64>(out) % (2 * sizeof(out_t)) == 0;
    const float bias0 = BIAS ? bias[column] : 0, bias1 = BIAS && two ? bias[column + 1] : 0;
#pragma unroll
    for (int j = 0; j < SUMS / 2; j++) {
        const i32 token = j / 2 * 8 + LANE() % 4 * 2 + j % 2;
        if (token >= tokens) continue;
        out_t* const place = out + static_cast<i64>(token) * N + column;
        const float first = sum[j / 2 * 4 + j % 2], second = sum[j / 2 * 4 + j % 2 + 2];
#if GATE
        product_put(place, gated(first, second));
#else
        if (pair) {
            product_put_pair(place, first + bias0, second + bias1);
        } else {
            product_put(place, first + bias0);
            if (two) product_put(place + 1, second + bias1);
        }
#endif
    }
}

KERNEL(THREADS) mul_mat_wgmma_direct(const u8* RESTRICT x, const u8* RESTRICT w0, const u8* RESTRICT w1,
                                     const u8* RESTRICT w2, const float* RESTRICT bias, out_t* RESTRICT out, i64 row_bytes,
                                     i32 n0, i32 n1, i32 n2, i32 T, i32 N, i32 K, i32 shares) {
    SHARED Places places;
    if (threadIdx.x == 0) {
        for (int s = 0; s < X_STAGES; s++) {
            signal_init(&places.x_arrived[s], 1);
            signal_init(&places.x_done[s], WARPS);
        }
        fence_products();
    }
    BARRIER();
    const Matrices all = {w0, w1, w2, row_bytes, n0, n1, n2, T, K, shares};
    const i32 tiles = all.tiles();
    const int group = shfl(WARP_ID() / GROUP_WARPS, 0), row_group = group / KPARTS, part = group % KPARTS;
    Ring ring;
    if (group == GROUPS) {
        fewer_registers<COPIER_REGISTERS>();
        GRID_DEPENDENCY();
        if (WARP_ID() > WARPS) return;
#pragma unroll 1
        for (i32 i = blockIdx.x; i < tiles; i += gridDim.x) bring_x(places, ring, tile_of(all, i), x, K);
        return;
    }
    more_registers<REGISTERS>();
    const int thread = static_cast<int>(threadIdx.x) % GROUP_THREADS;
    u8* const begin = tiles_begin();
    u8* const own = begin + X_STAGES * X_STAGE + WARP_ID() * W_STAGES * W_STAGE;
    float* const exchange = reinterpret_cast<float*>(begin + X_STAGES * X_STAGE + WARPS * W_STAGES * W_STAGE) +
                            row_group * (KPARTS - 1) * SUMS * GROUP_THREADS + 4 * thread;
    const u32 x_address = shared_address(begin) + part * X_TILE;
    Source source;
    source.tile = blockIdx.x;
    begin_tile(source, all, row_group, part);
#pragma unroll
    for (int s = 0; s < W_STAGES; s++) fetch(source, own + s * W_STAGE, all, row_group, part);
    GRID_DEPENDENCY();
    int w_stage = 0;
#pragma unroll 1
    for (i32 i = blockIdx.x; i < tiles; i += gridDim.x) {
        const Tile tile = tile_of(all, i);
        u32 lowest[2] = {0, 0};
        if (!ALIGNED) {
            const Rows rows = rows_of(all, tile.part, row_group);
#pragma unroll
            for (int r = 0; r < 2; r++) lowest[r] = static_cast<u32>(reinterpret_cast<u64>(row_at(rows, r, row_bytes)));
        }
        float sum[SUMS];
#pragma unroll
        for (int j = 0; j < SUMS; j++) sum[j] = 0;
        const i32 steps = tile.steps();
#pragma unroll 1
        for (i32 step = 0; step < steps; step++) {
            const i32 unit = tile.unit + step * KPARTS + part;
            const bool there = unit < tile.end;
            async_wait<W_STAGES - 1>();
            WARP_BARRIER();
            u8* const packed = own + w_stage * W_STAGE;
            const Decoder decoder = decoder_of(packed, lowest, unit);
#if HELD
            float target[SUMS];
#else
            float(&target)[SUMS] = sum;
#endif
#pragma unroll
            for (int panel = 0; panel < UNIT_K / PANEL; panel++) {
                u32 factors[PANEL / 16][4];
#pragma unroll
                for (int half = 0; half < 2; half++) decode_slab(decoder, 2 * panel + half, factors + 2 * half);
                wgmma_ready(factors);
                if (panel % X_PANELS == 0) {
                    signal_wait(&places.x_arrived[ring.stage], ring.phase);
                    fence_products();
                }
                if (there) {
                    const u64 columns = wgmma_factor(x_address + ring.stage * X_STAGE, 16);
                    wgmma_begin();
#pragma unroll
                    for (int k = 0; k < PANEL / 16; k++) {
                        const u64 now = wgmma_factor_behind(columns, panel % X_PANELS * X_PANEL + 32 * k);
                        wgmma_held<TOKENS>(target, factors[k], now, !HELD || panel + k > 0);
                    }
                    wgmma_commit();
                    wgmma_wait<0>();
                }
                if (panel % X_PANELS == X_PANELS - 1) {
                    if (LANE() == 0) signal_arrive(&places.x_done[ring.stage]);
                    ring.advance();
                }
            }
            WARP_BARRIER();  // all lanes have read the packed rows
            fetch(source, packed, all, row_group, part);
            w_stage = w_stage + 1 == W_STAGES ? 0 : w_stage + 1;
            wgmma_pin(target);
#if HELD
            if (there) {
#pragma unroll
                for (int j = 0; j < SUMS; j++) sum[j] = fmaf(target[j], decoder.held[j / 2 % 2].d, sum[j]);
            }
#endif
        }
        if (KPARTS > 1) {
            part_barrier(1, WARPS * WARP_SIZE);  // what was there has been read
            if (part) show_sums(sum, exchange + (part - 1) * SUMS * GROUP_THREADS);
            part_barrier(2, WARPS * WARP_SIZE);
            if (part) continue;
#pragma unroll
            for (int p = 0; p < KPARTS - 1; p++) add_sums(sum, exchange + p * SUMS * GROUP_THREADS);
        }
        const i32 first_token = tile.column * TOKENS;
        out_t* const rows_of_out = out + (static_cast<i64>(OUTPUT == 3 ? tile.share : 0) * T + first_token) * N;
        store_sums(sum, rows_of(all, tile.part, row_group), bias, rows_of_out, T - first_token, N);
    }
}
