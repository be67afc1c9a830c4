// product_wgmma: rows of packed w times tokens on Hopper's products of four warps; w is rounded to f16.
//
//   SHARED ProductPlaces places;
//   product_run(places, num_tiles, row_bytes, K, tile_of);   by all threads
//
// tile_of(i) describes tile i: up to ROWS rows of w times up to TOKENS rows of x. It has `tokens` and `num_rows`, how many there
// are; `x`, of rows K apart, and row_of_x(t), the number of the row that is token t, good for all t < TOKENS; `w`, the first of its
// rows; `depth`, of how many k, all from x and w on: to the ends of rows, or a multiple of CHUNK; row_of_out(t), where the products
// of token t < TOKENS go, or null; and `in_pairs`: those are aligned to two elements. K % 8 == 0.
//
// Groups of four warps share the work, and run on over the ends of tiles:
//   CONSUMERS multiply, each its part of the rows with all tokens: m64nNk16, where N is `tokens` rounded up to GRAIN;
//   DECODERS, each warp its rows: it copies their packed chunks to shared memory for itself and decodes 32 weights at a time to
//     where they are multiplied. Rows of 16 are ordered 0, 2, .. 14, 1, 3, .. 15 there, so that a thread ends with products of
//     neighbouring rows. COPIED weights need none: DECODERS = 0;
//   one group copies x, and COPIED weights, to where they are multiplied.
//
// Shared    dynamic, from a multiple of 1024 bytes: x [X_STAGES, TOKENS, 64] f16 and w [W_STAGES, ROWS, 64] f16 in panels; of each
//           warp that decodes, chunks [2, rows, PITCH]. pyllm/ops/product_wgmma.py says how many bytes that are
// Sync      x_arrived: all copies of x of a stage are in place (each thread that copies, behind its copies); w_arrived: so is w
//           (each warp that decodes, or as x); awaited by those that multiply, then fenced. x_done, w_done: their warps have
//           read a stage; awaited before it is filled again. Chunks are a warp's own: it waits for its copies, and asks for a
//           chunk when all its lanes have read what lies there
// Defines   ROWS; TOKENS; GRAIN, of which TOKENS is a multiple; X_STAGES; W_STAGES; CONSUMERS; DECODERS; BLOCKS to a
//           multiprocessor; those of product_parts.cuh; GATE: 1 where a tile has `up` like `w`, and num_rows of both, half of
//           ROWS at most: silu(product with w) * (product with up) is what goes out; else 0, or not defined
#pragma once
#if BLOCKS > 1
#define KERNEL_MIN_BLOCKS BLOCKS
#endif
#include "common/product_parts.cuh"
#include "common/tile_wgmma.cuh"
#if !defined(GATE)
#define GATE 0
#elif GATE
#include "common/gates.cuh"
#endif

#define GROUP_THREADS 128
#define GROUPS (CONSUMERS + DECODERS + 1)
#define THREADS (GROUP_THREADS * GROUPS)

constexpr int GROUP_WARPS = GROUP_THREADS / WARP_SIZE;
constexpr int BK = PANEL;                       // of K, a step
constexpr int FACTORS = ROWS / 64 / CONSUMERS;  // of w, of a group
constexpr int X_TILE = TOKENS * 128;            // bytes
constexpr int W_TILE = ROWS * 128;
static_assert(FACTORS * CONSUMERS * 64 == ROWS && TOKENS % GRAIN == 0 && GRAIN % 32 == 0, "groups divide the tile");
static_assert(COPIED == (DECODERS == 0), "weights are copied or decoded");

// A thread's pieces of rows of 128 bytes are one below the other.
constexpr int STEP_ROWS = GROUP_THREADS / 8;
constexpr int X_COPIES = TOKENS / STEP_ROWS;
constexpr int W_COPIES = ROWS / STEP_ROWS;
constexpr int GRAIN_COPIES = GRAIN / STEP_ROWS;

constexpr int DECODING_WARPS = DECODERS ? DECODERS * GROUP_WARPS : 1;
constexpr int WARP_ROWS = ROWS / DECODING_WARPS;
constexpr int RUNS = WARP_ROWS / 16;  // of 32 weights, of a thread and step
constexpr int CHUNK_STEPS = CHUNK / BK;
static_assert(COPIED || (RUNS >= 1 && WARP_ROWS <= 32), "every warp has rows to decode, every row a lane");

// Registers of a thread: of all at first, then of each kind of group.
constexpr int FIRST_REGISTERS = 65536 / (THREADS * BLOCKS) / 8 * 8;
constexpr int SUMS = FACTORS * TOKENS / 2;  // of a thread that multiplies
constexpr int CONSUMER_REGISTERS = (SUMS + 28 + 7) / 8 * 8;
constexpr int COPIER_REGISTERS = COPIED ? 88 : 48;
constexpr int LEFT_REGISTERS =
    (GROUPS * FIRST_REGISTERS - CONSUMERS * CONSUMER_REGISTERS - COPIER_REGISTERS) / (DECODERS ? DECODERS : 1) / 8 * 8;
constexpr int DECODER_REGISTERS = LEFT_REGISTERS < 168 ? LEFT_REGISTERS : 168;

// Tokens of one instruction, which has to do with the registers of the beginning.
constexpr int WIDEST = FIRST_REGISTERS >= 160 ? 256 : FIRST_REGISTERS >= 96 ? 128 : 64;

template <int N>
DEVICE void take_registers() {
    if constexpr (N < FIRST_REGISTERS) fewer_registers<N>();
    if constexpr (N > FIRST_REGISTERS) more_registers<N>();
}

struct ProductPlaces {
    Signal x_arrived[X_STAGES], x_done[X_STAGES], w_arrived[W_STAGES], w_done[W_STAGES];
};

// A place after the other, and which time it is its turn.
template <int STAGES>
struct Ring {
    int stage = 0;
    u32 phase = 0;

    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

struct ProductRings {
    Ring<X_STAGES> x;
    Ring<W_STAGES> w;
};

DEVICE u8* product_tiles() {
    DYNAMIC_SHARED(u8, dynamic);
    return dynamic + (-shared_address(dynamic) & 1023);
}

DEVICE void product_begin(ProductPlaces& places) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < X_STAGES; s++) {
            signal_init(&places.x_arrived[s], GROUP_THREADS);
            signal_init(&places.x_done[s], CONSUMERS * GROUP_WARPS);
        }
        for (int s = 0; s < W_STAGES; s++) {
            signal_init(&places.w_arrived[s], COPIED ? GROUP_THREADS : DECODING_WARPS);
            signal_init(&places.w_done[s], CONSUMERS * GROUP_WARPS);
        }
    }
    BARRIER();
}

// Of place `a` in the tile, which row it holds, of w, or by turns eight of w and eight of `up`.
DEVICE int row_of_place(int a) { return GATE ? a / 16 * 8 + a % 8 : a / 16 * 16 + a % 8 * 2 + a / 8 % 2; }

template <typename Tile>
DEVICE const u8* w_of_place(const Tile& tile, int a) {
    if constexpr (GATE) {
        return a / 8 % 2 ? tile.up : tile.w;
    } else {
        return tile.w;
    }
}

// A row that does not exist is the last one once more.
template <typename Tile>
DEVICE int w_row_of_place(const Tile& tile, int a) {
    const int n = row_of_place(a);
    return n < tile.num_rows ? n : tile.num_rows - 1;
}

template <typename Tile>
DEVICE const u8* w_row(const Tile& tile, int a, i64 row_bytes) {
    return w_of_place(tile, a) + w_row_of_place(tile, a) * row_bytes;
}

template <typename Tile>
DEVICE void product_copy(ProductPlaces& places, ProductRings& rings, const Tile& tile, i64 row_bytes, i32 K) {
    const int thread = static_cast<int>(threadIdx.x) % GROUP_THREADS;
    const int piece = thread % 8;
    const int num_tokens = (tile.tokens + GRAIN - 1) / GRAIN * GRAIN;
    const u32 place = panel_place(thread / 8, piece);  // rows that are multiples of eight apart have the same order
    const u32 x_address = shared_address(product_tiles()) + place;
    const u32 w_address = x_address + X_STAGES * X_TILE;
    // From one row to another, in pieces; 64 bits for each would be too many registers.
    u32 x_rows[X_COPIES], w_rows[W_COPIES];
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) x_rows[i] = tile.row_of_x(thread / 8 + i * STEP_ROWS) * (K / 8u);
#pragma unroll
    for (int i = 0; i < W_COPIES; i++) {
        w_rows[i] = w_row_of_place(tile, thread / 8 + i * STEP_ROWS) * static_cast<u32>(row_bytes / 16);
    }

#pragma unroll 1
    for (i32 k0 = 0; k0 < tile.depth; k0 += BK) {
        const bool there = k0 + 8 * piece < tile.depth;
        const i32 k = there ? k0 + 8 * piece : 0;  // what is not read must be a good address, too
        signal_wait(&places.x_done[rings.x.stage], rings.x.phase ^ 1);
        const u32 x_tile = x_address + rings.x.stage * X_TILE;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++) {
            if (i % GRAIN_COPIES == 0 && i * STEP_ROWS >= num_tokens) break;
            forget_origin(x_rows[i]);
            async_copy16_or_zeros(x_tile + i * STEP_ROWS * 128, tile.x + k + static_cast<u64>(x_rows[i]) * 8, there);
        }
        signal_arrive_behind_copies(&places.x_arrived[rings.x.stage]);
        rings.x.advance();
        if (COPIED) {
            signal_wait(&places.w_done[rings.w.stage], rings.w.phase ^ 1);
            const u32 w_tile = w_address + rings.w.stage * W_TILE;
            const u8* const w = w_of_place(tile, thread / 8) + 2 * static_cast<i64>(k);  // STEP_ROWS on it is the same
#pragma unroll
            for (int i = 0; i < W_COPIES; i++) {
                forget_origin(w_rows[i]);
                async_copy16_or_zeros(w_tile + i * STEP_ROWS * 128, w + static_cast<u64>(w_rows[i]) * 16, there);
            }
            signal_arrive_behind_copies(&places.w_arrived[rings.w.stage]);
            rings.w.advance();
        }
    }
}

// Four lanes to a row: their pieces are neighbours.
constexpr int ROUNDS = WARP_ROWS / 8;

template <typename Tile>
DEVICE void find_sources(const u8* (&sources)[ROUNDS], const Tile& tile, int first, i64 row_bytes) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) sources[r] = w_row(tile, first + LANE() / 4 + 8 * r, row_bytes);
}

template <typename TileOf>
DEVICE void product_decode(ProductPlaces& places, ProductRings& rings, i32 num_tiles, i64 row_bytes,
                           const TileOf& tile_of) {
    const int warp = WARP_ID() - CONSUMERS * GROUP_WARPS;
    u8* const w_tiles = product_tiles() + X_STAGES * X_TILE;
    u8* const chunks = w_tiles + W_STAGES * W_TILE + warp * 2 * WARP_ROWS * PITCH;
    const int run_row = LANE() / 2, column = LANE() % 2 * 32;

    const u8* sources[ROUNDS];
    u32 lowest[RUNS];  // bits of the rows' addresses
    const int first = warp * WARP_ROWS;
    u8* const targets = chunks + LANE() / 4 * PITCH;
    const auto request = [&](i32 chunk, int place) {
        const i64 begin = static_cast<i64>(chunk) * CHUNK_BYTES;
        const i64 rest = row_bytes - begin;
        const i32 bytes = rest < CHUNK_BYTES ? static_cast<i32>(rest) : CHUNK_BYTES;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            request_packed(targets + (place * WARP_ROWS + 8 * r) * PITCH, sources[r] + begin, bytes, LANE() % 4);
        }
    };

    int place = 0;
    if (static_cast<i32>(blockIdx.x) < num_tiles) {
        find_sources(sources, tile_of(blockIdx.x), first, row_bytes);
        request(0, place);
    }
    async_commit();
#pragma unroll 1
    for (i32 i = blockIdx.x; i < num_tiles; i += gridDim.x) {
        const auto tile = tile_of(i);
        const i32 num_chunks = (tile.depth + CHUNK - 1) / CHUNK;
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            lowest[r] = static_cast<u32>(reinterpret_cast<u64>(w_row(tile, first + run_row + 16 * r, row_bytes)));
        }
#pragma unroll 1
        for (i32 chunk = 0; chunk < num_chunks; chunk++) {
            const i32 next = i + static_cast<i32>(gridDim.x);
            if (chunk + 1 < num_chunks) {
                request(chunk + 1, place ^ 1);
            } else if (next < num_tiles) {
                find_sources(sources, tile_of(next), first, row_bytes);
                request(0, place ^ 1);
            }
            async_commit();
            async_wait<1>();
            WARP_BARRIER();
            const u8* const mine = chunks + (place * WARP_ROWS + run_row) * PITCH;
#pragma unroll
            for (int step = 0; step < CHUNK_STEPS; step++) {
                const i32 left = tile.depth - chunk * CHUNK - step * BK;
                if (left <= 0) break;
                u32 pairs[RUNS][4][4];
#pragma unroll
                for (int r = 0; r < RUNS; r++) {
                    const u8* const source = mine + 16 * r * PITCH + packed_offset(lowest[r], chunk);
                    decode_some(source, step * BK + column, left - column, pairs[r]);
                }
                signal_wait(&places.w_done[rings.w.stage], rings.w.phase ^ 1);
                u8* const w_tile = w_tiles + rings.w.stage * W_TILE;
#pragma unroll
                for (int r = 0; r < RUNS; r++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const u32(&four)[4] = pairs[r][j];
                        store16(w_tile + panel_place(first + run_row + 16 * r, column / 8 + j),
                                u32x4{four[0], four[1], four[2], four[3]});
                    }
                }
                WARP_BARRIER();
                if (LANE() == 0) signal_arrive(&places.w_arrived[rings.w.stage]);
                rings.w.advance();
            }
            place ^= 1;
        }
    }
}

template <int N>
DEVICE void multiply_columns(float* sum, u64 rows, u64 columns) {
    constexpr int now = N < WIDEST ? N : WIDEST;
    wgmma_columns<now>(sum, rows, columns, true);
    if constexpr (now < N) multiply_columns<N - now>(sum + now / 2, rows, wgmma_factor_behind(columns, now * 128));
}

// Products with two neighbouring rows, for one token each. What they are added to is read for some tokens at a time.
constexpr int STORED = 4;

template <int N, typename Tile>
DEVICE void store_products(const float (&sum)[N / 2], const Tile& tile, i32 n) {
    const bool both = tile.in_pairs && n + 1 < tile.num_rows;
#pragma unroll
    for (int first = 0; first < N / 4; first += STORED) {
        out_t* rows[STORED];
        f32x2 before[STORED];
#pragma unroll
        for (int j = 0; j < STORED; j++) {
            rows[j] = tile.row_of_out((first + j) / 2 * 8 + LANE() % 4 * 2 + (first + j) % 2);
            before[j] = {0, 0};
            if (OUTPUT == 2 && both && rows[j] != nullptr) before[j] = product_pair(rows[j] + n);
        }
#pragma unroll
        for (int j = 0; j < STORED; j++) {
            const int i = (first + j) / 2 * 4 + (first + j) % 2;
            if (rows[j] == nullptr) continue;
            if (both) {
                product_set_pair(rows[j] + n, before[j].x + sum[i], before[j].y + sum[i + 2]);
            } else {
                if (n < tile.num_rows) product_put(rows[j] + n, sum[i]);
                if (n + 1 < tile.num_rows) product_put(rows[j] + n + 1, sum[i + 2]);
            }
        }
    }
}

// gated(product with w, with up) of row n. Lanes with neighbouring rows exchange them, so that each has both of a token.
template <int N, typename Tile>
DEVICE void store_gated(const float (&sum)[N / 2], const Tile& tile, i32 n) {
#if GATE
    const int odd = n % 2;
    const bool both = tile.in_pairs && n - odd + 1 < tile.num_rows;
#pragma unroll
    for (int i = 0; i < N / 2; i += 4) {
        const float first = gated(sum[i], sum[i + 2]), second = gated(sum[i + 1], sum[i + 3]);
        const float others = shfl_xor(odd ? first : second, 4);
        const float mine = odd ? second : first;
        out_t* const row = tile.row_of_out(i * 2 + LANE() % 4 * 2 + odd);
        if (row == nullptr) continue;
        const float low = odd ? others : mine, high = odd ? mine : others;
        if (both) {
            product_set_pair(row + n - odd, low, high);
        } else {
            if (n - odd < tile.num_rows) product_put(row + n - odd, low);
            if (n - odd + 1 < tile.num_rows) product_put(row + n - odd + 1, high);
        }
    }
#endif
}

template <int N, typename Tile>
DEVICE void multiply_tokens(ProductPlaces& places, ProductRings& rings, const Tile& tile) {
    const int first_row = WARP_ID() / GROUP_WARPS * FACTORS * 64;
    const u32 x_address = shared_address(product_tiles());
    const u64 x_first = wgmma_factor(x_address, 16);
    const u64 w_first = wgmma_factor(x_address + X_STAGES * X_TILE + first_row * 128, 16);
    float sum[FACTORS][N / 2];
#pragma unroll
    for (int m = 0; m < FACTORS; m++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) sum[m][i] = 0;
    }
    int x_before = 0, w_before = 0;
    const auto free_before = [&] {
        if (LANE() == 0) {
            signal_arrive(&places.x_done[x_before]);
            signal_arrive(&places.w_done[w_before]);
        }
    };
#pragma unroll 1
    for (i32 k0 = 0; k0 < tile.depth; k0 += BK) {
        const u64 x_factor = wgmma_factor_behind(x_first, rings.x.stage * X_TILE);
        const u64 w_factor = wgmma_factor_behind(w_first, rings.w.stage * W_TILE);
        signal_wait(&places.x_arrived[rings.x.stage], rings.x.phase);
        signal_wait(&places.w_arrived[rings.w.stage], rings.w.phase);
        fence_products();
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < BK / 16; k++) {
#pragma unroll
            for (int m = 0; m < FACTORS; m++) {
                const u64 rows = wgmma_factor_behind(w_factor, m * 64 * 128 + k * 32);
                multiply_columns<N>(sum[m], rows, wgmma_factor_behind(x_factor, k * 32));
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k0) free_before();
        x_before = rings.x.stage, w_before = rings.w.stage;
        rings.x.advance();
        rings.w.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < FACTORS; m++) wgmma_pin(sum[m]);
    free_before();
    const int first = first_row + WARP_ID() % GROUP_WARPS * 16;
#pragma unroll
    for (int m = 0; m < FACTORS; m++) {
        if (GATE) {
            store_gated<N>(sum[m], tile, (first + 64 * m) / 2 + LANE() / 4);
        } else {
            store_products<N>(sum[m], tile, first + 64 * m + LANE() / 4 * 2);
        }
    }
}

template <int N = GRAIN, typename Tile>
DEVICE void product_multiply(ProductPlaces& places, ProductRings& rings, const Tile& tile) {
    if constexpr (N < TOKENS) {
        if (tile.tokens > N) {
            product_multiply<N + GRAIN>(places, rings, tile);
            return;
        }
    }
    multiply_tokens<N>(places, rings, tile);
}

template <typename TileOf>
DEVICE void product_run(ProductPlaces& places, i32 num_tiles, i64 row_bytes, i32 K, const TileOf& tile_of) {
    product_begin(places);
    const int group = WARP_ID() / GROUP_WARPS;
    ProductRings rings;
    if (group < CONSUMERS) {
        take_registers<CONSUMER_REGISTERS>();
#pragma unroll 1
        for (i32 i = blockIdx.x; i < num_tiles; i += gridDim.x) product_multiply(places, rings, tile_of(i));
    } else if (group < CONSUMERS + DECODERS) {
#if DECODERS
        take_registers<DECODER_REGISTERS>();
        product_decode(places, rings, num_tiles, row_bytes, tile_of);
#endif
    } else {
        take_registers<COPIER_REGISTERS>();
#pragma unroll 1
        for (i32 i = blockIdx.x; i < num_tiles; i += gridDim.x) product_copy(places, rings, tile_of(i), row_bytes, K);
        async_commit();
        async_wait<0>();  // no thread ends before its copies
    }
}
