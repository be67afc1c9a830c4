// mul_mat_thin_held: out = f(x @ w.T) for 9 to 32 tokens: x stays in registers while packed weights go by, on NVIDIA's
// matrix instructions
//
// Shapes    x [T,K] f16; w0, w1, w2 [n0|n1|n2, row_bytes] packed: up to three matrices, their products side by side in out
//           [T,N] f32 or f16; bias [N] f32; T <= TOKENS; K a multiple of 256
// Launch    grid (B, S), block (THREADS): each x has its share of the tiles of 16 rows (GATE: of pairs of tiles, one of w0
//           and one of w1), each y its share of the units of 256 k. A block works on a tile's next WARPS units at a
//           time, a step; each warp on one of them
// Shared    dynamic: STAGES steps of 16 rows, 16 PITCH bytes each; the sums of the warps for one tile, twice,
//           2 * WARPS * TOKENS * 16 floats; the sums of all tiles of the block, TOKENS * 16 floats each
// Sync      warps bring rows by asynchronous copies, STAGES - 1 steps ahead. At the one barrier of a step all copies of the next
//           are there, all warps have read this one's weights, whose place is filled again, and have written their
//           sums, which a few warps add up; the next step's sums go to the other half
// Numerics  weights in f16, with a power of two for each 256 weights of a row taken out; sums in f32, added up in the order
//           of warps and then of k
// Defines   QTYPE 12 or 13; TOKENS 16 (two warps and more) or 32 (four and more); GATE 0, 1: silu(w0 x) * (w1 x), 2: gelu; BIAS; THREADS; STAGES
//           OUTPUT 0 f32, 1 f16, 2 added to f32, 3 f32 sums of each share of k, [S][T][N]
// Arch      sm_80 sm_90
// SharedLimit   sm_90=232448 sm_80=166912
// Compile   QTYPE=12,13 TOKENS=16 OUTPUT=2,3 GATE=0 BIAS=0 THREADS=512 STAGES=2;
//           QTYPE=12,13 TOKENS=32 OUTPUT=2,3 GATE=0 BIAS=0 THREADS=256 STAGES=2;
//           QTYPE=12 TOKENS=16 OUTPUT=1 GATE=1,2 BIAS=0 THREADS=512 STAGES=2;
//           QTYPE=12 TOKENS=32 OUTPUT=1 GATE=1 BIAS=0 THREADS=256 STAGES=2;
//           QTYPE=12 TOKENS=32 OUTPUT=0 GATE=0 BIAS=1 THREADS=256 STAGES=2
#define KERNEL_MIN_BLOCKS 1
#include "common/direct.cuh"
#include "common/gates.cuh"
#include "common/row_pitch.cuh"
#include "common/thin.cuh"
#include "quants/held.cuh"

#define WARPS (THREADS / WARP_SIZE)
#define TILES (TOKENS / 16)
#define UNIT_K 256
#define SLABS (UNIT_K / 32)
// Rows of a step, multiples of 16 bytes; they lie in shared memory so that lanes that read pairs of words meet no bank conflicts.
#define PIECES (WARPS * HELD_BYTES / 16)
#define PITCH PITCH_OF_PAIRS(PIECES)
#define STAGE (16 * PITCH)
#define SUMS (TOKENS * 16)             // of a tile
#define ADDERS (SUMS / 4 / WARP_SIZE)  // warps that add up the sums of a tile; not more than WARPS

// The block's tiles and its part of k.
struct Share {
    i32 first_tile, tiles;
    i32 first_unit, last_unit;
};

// What is fetched next: all tiles of the block in turn, then the next step of all tiles.
struct Source {
    i32 tile, unit;
};

// Start the copies of a step of 16 rows, of which each warp brings its own.
DEVICE void fetch(Source& source, u8* stage, const Matrices& all, const Share& share) {
    if (source.unit < share.last_unit) {
        const Rows rows = rows_of(all, share.first_tile + source.tile);
        const i32 left = share.last_unit - source.unit;
        const i32 end = (left < WARPS ? left : WARPS) * HELD_BYTES - 16 * LANE();
#pragma unroll
        for (int i = 0; i < 16; i += WARPS) {
            const i32 r = WARP_ID() + i;
            if (16 % WARPS && r >= 16) break;
            const u8* const from =
                row_of(rows, r, all.row_bytes) + static_cast<i64>(source.unit) * HELD_BYTES + 16 * LANE();
            u8* const to = stage + r * PITCH + 16 * LANE();
#pragma unroll
            for (int offset = 0; offset < 16 * PIECES; offset += 16 * WARP_SIZE) {
                if (offset < end) async_copy16(to + offset, from + offset);
            }
        }
        if (++source.tile == share.tiles) source.tile = 0, source.unit += WARPS;
    }
    async_commit();
}

// A lane's activations of one slab of 16 tokens; tokens past the end repeat the last one: columns of a product do not mix, and
// theirs are not stored.
DEVICE void load_x(Direct& held, const f16* RESTRICT x, i32 first_token, i32 k, i32 T, i32 K) {
#pragma unroll
    for (int i = 0; i < DIRECT_ROWS; i++) {
        const i32 token = first_token + direct_row(i) < T ? first_token + direct_row(i) : T - 1;
        const f16* const row = x + static_cast<i64>(token) * K + k;
        const u32x4 words = load16(row + 8 * direct_run(0));
        u32(&run)[4] = held.run[i][0];
        run[0] = words.x, run[1] = words.y, run[2] = words.z, run[3] = words.w;
    }
}

// In the order in which weights come: of four neighbours 0 2, 1 3.
DEVICE void order_x(Direct (&held)[TILES][SLABS]) {
#pragma unroll
    for (int i = 0; i < TILES * SLABS * DIRECT_ROWS; i++) {
        u32(&run)[4] = held[i / DIRECT_ROWS / SLABS][i / DIRECT_ROWS % SLABS].run[i % DIRECT_ROWS][0];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const u32 first = run[j], second = run[j + 1];
            run[j] = byte_perm(first, second, 0x5410);
            run[j + 1] = byte_perm(first, second, 0x7632);
        }
    }
}

// The products of one unit of the lane's rows. REFILL: x makes room for that of the unit at next_k.
template <bool REFILL>
DEVICE void multiply(FragC (&sum)[TILES], const u8* unit, Direct (&held)[TILES][SLABS], const f16* RESTRICT x, i32 next_k,
                     i32 T, i32 K) {
    HeldRow rows[DIRECT_ROWS];
#pragma unroll
    for (int i = 0; i < DIRECT_ROWS; i++) rows[i] = held_row(unit + direct_row(i) * PITCH, direct_run(0));
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        Direct weights;
#pragma unroll
        for (int i = 0; i < DIRECT_ROWS; i++) {
            held_halves(rows[i], slab, held_scales(rows[i], slab), weights.run[i][0]);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            direct_mma(sum[t], weights, held[t][slab]);
            if (REFILL) load_x(held[t][slab], x, 16 * t, next_k + 32 * slab, T, K);
        }
    }
#pragma unroll
    for (int i = 0; i < TILES * TILE_C_ELEMENTS; i++) {
        sum[i / TILE_C_ELEMENTS].x[i % TILE_C_ELEMENTS] *= rows[tile_c_slot(i % TILE_C_ELEMENTS)].d;
    }
}

// The sums of all warps for 32 times four elements of a tile, added to those of the steps before.
DEVICE void add_up(const float* partial, float* sums, i32 adder, bool first) {
    const i32 i = 4 * (adder * WARP_SIZE + LANE());
    f32x4 total = first ? f32x4{0, 0, 0, 0} : load16<f32x4>(sums + i);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const f32x4 own = load16<f32x4>(partial + w * SUMS + i);
        total.x += own.x, total.y += own.y, total.z += own.z, total.w += own.w;
    }
    store16(sums + i, total);
}

KERNEL(THREADS) mul_mat_thin_held(const f16* RESTRICT x, const u8* RESTRICT w0, const u8* RESTRICT w1,
                                  const u8* RESTRICT w2, const float* RESTRICT bias, void* out, i64 row_bytes, i32 n0,
                                  i32 n1, i32 n2, i32 T, i32 N, i32 K) {
    DYNAMIC_SHARED(u8, memory);
    const Matrices all = {w0, w1, w2, row_bytes, n0, n1, n2};
    const u32 results = results_of(all), blocks = gridDim.x, block = blockIdx.x, units = K / UNIT_K;
    Share share;
    share.first_tile = static_cast<i32>(results * block / blocks) * PARTS;
    share.tiles = static_cast<i32>(results * (block + 1) / blocks) * PARTS - share.first_tile;
    share.first_unit = static_cast<i32>(units * blockIdx.y / gridDim.y);
    share.last_unit = static_cast<i32>(units * (blockIdx.y + 1) / gridDim.y);

    float* const partial = reinterpret_cast<float*>(memory + STAGES * STAGE);
    float* const sums = partial + 2 * WARPS * SUMS;
    Source source = {0, share.first_unit};
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch(source, memory + s * STAGE, all, share);
    // Behind the first weights, which no kernel writes.
    GRID_DEPENDENCY();
    Direct held[TILES][SLABS];
    i32 unit = share.first_unit + WARP_ID();
    if (unit < share.last_unit) {
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
#pragma unroll
            for (int t = 0; t < TILES; t++) load_x(held[t][slab], x, 16 * t, unit * UNIT_K + 32 * slab, T, K);
        }
    }
    async_wait<STAGES - 1>();
    BARRIER();
    i32 stage = 0, half = 0, turn = 0;
    for (i32 step = share.first_unit; step < share.last_unit; step += WARPS, unit += WARPS) {
        order_x(held);
        for (i32 tile = 0; tile < share.tiles; tile++) {
            FragC sum[TILES];
#pragma unroll
            for (int t = 0; t < TILES; t++) tile_zero(sum[t]);
            const i32 next_unit = unit + WARPS;
            const u8* const packed = memory + stage * STAGE + WARP_ID() * HELD_BYTES;
            if (tile + 1 == share.tiles && next_unit < share.last_unit) {
                multiply<true>(sum, packed, held, x, next_unit * UNIT_K, T, K);
            } else if (unit < share.last_unit) {
                multiply<false>(sum, packed, held, x, 0, T, K);
            }
            // As fours of a lane, one behind the other.
            float* const own = partial + (half * WARPS + WARP_ID()) * SUMS + 4 * LANE();
#pragma unroll
            for (int t = 0; t < TILES; t++) {
#pragma unroll
                for (int i = 0; i < TILE_C_ELEMENTS; i += 4) {
                    const f32x4 four = {sum[t].x[i], sum[t].x[i + 1], sum[t].x[i + 2], sum[t].x[i + 3]};
                    store16(own + (t * TILE_C_ELEMENTS + i) * WARP_SIZE, four);
                }
            }
            async_wait<STAGES - 2>();
            BARRIER();
            fetch(source, memory + stage * STAGE, all, share);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            // Warps take turns.
            const i32 adder = WARP_ID() - turn;
            if (adder >= 0 && adder < ADDERS) {
                add_up(partial + half * WARPS * SUMS, sums + tile * SUMS, adder, step == share.first_unit);
            }
            turn = turn + ADDERS >= WARPS ? 0 : turn + ADDERS;
            half = 1 - half;
        }
    }
    BARRIER();
    for (i32 result = WARP_ID(); result < share.tiles / PARTS; result += WARPS) {
        const Rows rows = rows_of(all, share.first_tile + result * PARTS);
        const float* const own = sums + result * PARTS * SUMS + 4 * LANE();
#pragma unroll
        for (int i = 0; i < TILES * TILE_C_ELEMENTS; i++) {
            const i32 token = i / TILE_C_ELEMENTS * 16 + tile_c_col(i % TILE_C_ELEMENTS);
            const i32 r = tile_c_row(i % TILE_C_ELEMENTS);
            if (token >= T || r >= rows.count) continue;
            const float* const place = own + i / 4 * 4 * WARP_SIZE + i % 4;
            float value = place[0];
#if BIAS
            value += bias[rows.column + r];
#endif
#if GATE
            value = gated(value, place[SUMS]);
#endif
#if OUTPUT == 3
            static_cast<float*>(out)[(static_cast<i64>(blockIdx.y) * T + token) * N + rows.column + r] = value;
#else
            put(out, static_cast<i64>(token) * N + rows.column + r, value);
#endif
        }
    }
}
