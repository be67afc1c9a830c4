// mul_mat_thin_s8: out = f(x @ w.T) for few tokens: packed weights and activations as whole numbers, on NVIDIA's products
// of signed bytes
//
// Shapes    x [T,K] f16 or f32; w0, w1, w2 [n0|n1|n2, row_bytes] packed: up to three matrices, their products side by side
//           in out [T,N] f32 or f16; norm [K], bias [N] f32; T <= TOKENS; K a multiple of UNIT_K
// Launch    grid (B), block (THREADS): each block has its share of the tiles of 16 rows (GATE: of pairs of tiles, one of w0 and one
//           of w1), its warps equal shares of the units of k of those tiles, one behind the other
// Shared    dynamic: STAGES units of 16 rows for each warp, 16 PITCH bytes each; x as whole numbers: for each token its bytes
//           [K / 32][2][32] and 64 bytes, for each token and unit a scale and what the minima are multiplied with; the sums
//           of warps, [WARPS + tiles][TOKENS][16] floats. Static: a codebook, where the format has one
// Sync      x is brought into shared memory while the first copies run; barrier. Each warp works alone: it keeps STAGES units
//           coming by asynchronous copies, waits for the oldest, multiplies, and starts the next copy behind a warp barrier. At the
//           end of a tile or of its share it writes its sums. Barrier; a tile's sums are added up in the order of k
// Numerics  x (saturated at 65504) is 256 a + b times a scale for each UNIT_K of k, a and b signed bytes: off by at most a
//           65,278th of the unit's largest. Weights, products and their sums over 16 or 32 k, or over 256 where scales are
//           whole numbers, are exact; from there on f32. NORM: x * norm is taken so, and 1 / sqrt(mean x^2 + eps) multiplies
//           the sums
// Defines   QTYPE as in quants/whole.cuh; TOKENS 4 or 8, or 1: formats of quants/apart.cuh; X_F16; NORM
//           OUTPUT 0 f32, 1 f16, 2 added to f32; GATE 0, 1: silu(w0 x) * (w1 x), 2: gelu; BIAS; THREADS
//           UNIT_K k that a warp works on at a time, 512 with TOKENS 1 only, UNIT_BYTES their bytes in a row; STAGES
//           ALIGNED: units begin at multiples of 16 bytes
// Arch      sm_80 sm_90
// SharedLimit   sm_90=232448 sm_80=166912
// Scratch   sm_80=8
// Compile   QTYPE=12 TOKENS=4 NORM=1 X_F16=0 OUTPUT=0 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1;
//           QTYPE=12 TOKENS=4 NORM=1 X_F16=0 OUTPUT=1 GATE=1,2 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1;
//           QTYPE=12 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1;
//           QTYPE=13 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=176 STAGES=2 ALIGNED=1;
//           QTYPE=14 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=210 STAGES=2 ALIGNED=0;
//           QTYPE=23 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=136 STAGES=2 ALIGNED=0;
//           QTYPE=8 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=272 STAGES=2 ALIGNED=1;
//           QTYPE=8 TOKENS=4 NORM=1 X_F16=0 OUTPUT=0 GATE=0 BIAS=1 THREADS=256 UNIT_K=64 UNIT_BYTES=68 STAGES=2 ALIGNED=0;
//           QTYPE=2,20 TOKENS=4 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1;
//           QTYPE=3 TOKENS=4 NORM=0 X_F16=0 OUTPUT=0 GATE=0 BIAS=1 THREADS=512 UNIT_K=256 UNIT_BYTES=160 STAGES=2 ALIGNED=1;
//           QTYPE=6 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=176 STAGES=2 ALIGNED=1;
//           QTYPE=7 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=192 STAGES=2 ALIGNED=1;
//           QTYPE=10 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=84 STAGES=2 ALIGNED=0;
//           QTYPE=11 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=110 STAGES=2 ALIGNED=0;
//           QTYPE=39 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=136 STAGES=2 ALIGNED=0;
//           QTYPE=40 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1;
//           QTYPE=16 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=66 STAGES=2 ALIGNED=0;
//           QTYPE=17 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=74 STAGES=2 ALIGNED=0;
//           QTYPE=22 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=82 STAGES=2 ALIGNED=0;
//           QTYPE=18 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=98 STAGES=2 ALIGNED=0;
//           QTYPE=21 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=110 STAGES=2 ALIGNED=0;
//           QTYPE=19 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=50 STAGES=2 ALIGNED=0;
//           QTYPE=29 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=56 STAGES=2 ALIGNED=0;
//           QTYPE=16 TOKENS=1 NORM=1 X_F16=0 OUTPUT=0 GATE=0 BIAS=0 THREADS=512 UNIT_K=512 UNIT_BYTES=132 STAGES=2 ALIGNED=0;
//           QTYPE=16 TOKENS=1 NORM=1 X_F16=0 OUTPUT=1 GATE=1 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=66 STAGES=2 ALIGNED=0;
//           QTYPE=17 TOKENS=1 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=512 UNIT_BYTES=148 STAGES=2 ALIGNED=0;
//           QTYPE=22 TOKENS=1 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=512 UNIT_BYTES=164 STAGES=2 ALIGNED=0;
//           QTYPE=18 TOKENS=1 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=98 STAGES=2 ALIGNED=0;
//           QTYPE=19 TOKENS=1 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=512 UNIT_BYTES=100 STAGES=2 ALIGNED=0;
//           QTYPE=29 TOKENS=1 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=512 UNIT_BYTES=112 STAGES=2 ALIGNED=1;
//           QTYPE=34 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=54 STAGES=2 ALIGNED=0;
//           QTYPE=35 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=66 STAGES=2 ALIGNED=0
#include "common/gates.cuh"
#include "common/product_apart.cuh"
#include "common/thin.cuh"

// The units that a warp fetches, one behind the other.
struct Source {
    i32 tile, unit, left;
    Pieces pieces;
};

DEVICE void seek_tile(Source& source, const Matrices& all) {
    const Rows rows = rows_of(all, source.tile);
    seek(source.pieces, [&](i32 r) { return row_of(rows, r, all.row_bytes); }, source.unit);
}

DEVICE void fetch(Source& source, u8* stage, const Matrices& all, i32 units) {
    if (source.left > 0) {
        fetch_unit(source.pieces, stage);
        source.left--;
        if (++source.unit == units && source.left > 0) {
            source.unit = 0;
            source.tile++;
            seek_tile(source, all);
        }
    }
    async_commit();
}

KERNEL(THREADS) mul_mat_thin_s8(const x_t* RESTRICT x, const float* RESTRICT norm, const u8* RESTRICT w0,
                                const u8* RESTRICT w1, const u8* RESTRICT w2, const float* RESTRICT bias, void* out,
                                i64 row_bytes, float eps, i32 n0, i32 n1, i32 n2, i32 T, i32 N, i32 K) {
    DYNAMIC_SHARED(u8, memory);
    const i32 units = K / UNIT_K;
    const Matrices all = {w0, w1, w2, row_bytes, n0, n1, n2};

    // The tiles of this block, and what this warp does of them.
    const u32 results = results_of(all), blocks = gridDim.x, block = blockIdx.x;
    const i32 first_tile = static_cast<i32>(results * block / blocks) * PARTS;
    const i32 tiles = static_cast<i32>(results * (block + 1) / blocks) * PARTS - first_tile;
    const i32 share = (tiles * units + WARPS - 1) / WARPS;
    const i32 begin = WARP_ID() * share;
    const i32 end = begin + share < tiles * units ? begin + share : tiles * units;
    i32 tile = static_cast<u32>(begin) / static_cast<u32>(units), unit = begin - tile * units, stage = 0;

    u8* const stages = memory + WARP_ID() * STAGES * UNIT_STAGE;
    Source source;
    source.tile = first_tile + tile, source.unit = unit, source.left = end - begin;
    begin_pieces(source.pieces);
    if (source.left > 0) seek_tile(source, all);
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch(source, stages + s * UNIT_STAGE, all, units);

    WHOLE_TABLE_SHARED(table);
    bring_table(table);
    // Behind the first weights, which no kernel writes.
    GRID_DEPENDENCY();
    Batch batch;
    batch.token = 0, batch.group = WARP_ID();
    while (batch.group >= groups_of(K)) batch.group -= groups_of(K), batch.token++;
    const auto row_of_x = [&](i32 token) { return x + static_cast<i64>(token) * K; };
    load_batch(batch, row_of_x, T, K);

    Activations activations;
    activations.bytes = memory + WARPS * STAGES * UNIT_STAGE;
    activations.scale = reinterpret_cast<float*>(activations.bytes + T * token_pitch(K));
    activations.minima = reinterpret_cast<u8*>(activations.scale + (T * units * SCALED + 3) / 4 * 4);
    float* const sums = reinterpret_cast<float*>(activations.minima + (T * units * MINIMA_BYTES + 15) / 16 * 16);
    i32* const ends = reinterpret_cast<i32*>(sums + (WARPS + tiles) * TOKENS * 16);  // [tiles][first, last warp]
    activations.factor = reinterpret_cast<float*>(ends + 2 * tiles);
    activations.squares = activations.factor + TOKENS;
    put_batch(activations, batch, norm, T, K);
    while (batch.token < T) {
        load_batch(batch, row_of_x, T, K);
        put_batch(activations, batch, norm, T, K);
    }
    BARRIER();
#if NORM
    for (i32 token = WARP_ID(); token < T; token += WARPS) {
        float squares = 0;
        for (i32 i = LANE(); i < groups_of(K); i += WARP_SIZE) squares += activations.squares[token * groups_of(K) + i];
        squares = warp_sum(squares);
        if (LANE() == 0) activations.factor[token] = rsqrt_f(squares / static_cast<float>(K) + eps);
    }
#endif

    const i32 g = LANE() / 4, part = LANE() % 4;
#if APART
    ApartColumn columns = {};
    columns.bytes = activations.bytes + g % 2 * 32 + 8 * part;
    columns.scale = activations.scale;
    columns.active = part == g / 2;
    const u8* const entries = reinterpret_cast<const u8*>(table + LANE() % TABLE_COPIES);  // its copy of the codebook
#else
    Columns columns;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
        // Tokens past the end repeat the last one: columns of a product do not mix, and theirs are not stored.
        const i32 column = 4 * n + g / 2 < T ? 4 * n + g / 2 : T - 1;
        const i32 token = 4 * n + part < T ? 4 * n + part : T - 1;
        columns.bytes[n] = activations.bytes + column * token_pitch(K) + g % 2 * 32 + 8 * part;
        columns.scale[n] = activations.scale + token * units;
        columns.minima[n] = activations.minima + (WHOLE_SCALES ? column * units * MINIMA_BYTES + g % 2 * 8
                                                               : token * units * MINIMA_BYTES);
    }
#endif
    float sum[COLUMNS][2] = {};
    u32 place[2] = {0, 0};  // where a unit begins in its first piece
    bool fresh = true;
    i32 origin = unit;  // where this warp's part of the tile begins
    for (i32 item = begin; item < end; item++) {
        const u8* packed[2];
        if (!ALIGNED && fresh) {
            const Rows rows = rows_of(all, first_tile + tile);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u8* const row = row_of(rows, g + 8 * i, row_bytes) + static_cast<i64>(unit) * UNIT_BYTES;
                place[i] = static_cast<u32>(reinterpret_cast<u64>(row));
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            packed[i] = stages + stage * UNIT_STAGE + (g + 8 * i) * PITCH + (ALIGNED ? 0 : place[i] % 16);
            place[i] += UNIT_BYTES;
        }
        async_wait<STAGES - 1>();
        WARP_BARRIER();
#if APART
#pragma unroll
        for (int j = 0; j < SCALED; j++) {
            multiply_block(sum[0], packed, columns, unit * SCALED + j, entries);
#pragma unroll
            for (int i = 0; i < 2; i++) packed[i] += UNIT_BYTES / SCALED;
        }
#else
        multiply(sum, packed, columns, unit, table);
#endif
        WARP_BARRIER();  // all lanes have read the stage
        fetch(source, stages + stage * UNIT_STAGE, all, units);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        unit++;
        fresh = unit == units;
        if (fresh || item + 1 == end) {
            if (LANE() == 0 && origin == 0) ends[2 * tile] = WARP_ID();
            if (LANE() == 0 && fresh) ends[2 * tile + 1] = WARP_ID();
            float* const own = sums + (WARP_ID() + tile) * TOKENS * 16;  // of one warp and tile only
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
#if APART
                    sum[n][i] += shfl_xor(sum[n][i], 1);
                    sum[n][i] += shfl_xor(sum[n][i], 2);
                    if (part == 0) own[g + 8 * i] = sum[n][i];
#else
                    own[(4 * n + part) * 16 + g + 8 * i] = sum[n][i];
#endif
                    sum[n][i] = 0;
                }
            }
        }
        if (fresh) unit = 0, origin = 0, tile++;
    }
    BARRIER();
    for (i32 i = threadIdx.x; i < tiles / PARTS * TOKENS * 16; i += THREADS) {
        const i32 r = i % 16;
        const i32 token = i / 16 % TOKENS;
        const i32 result = i / (16 * TOKENS);
        const Rows rows = rows_of(all, first_tile + result * PARTS);
        if (token >= T || r >= rows.count) continue;
        float total[2] = {0, 0};
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const i32 own = result * PARTS + p;
            for (i32 w = ends[2 * own]; w <= ends[2 * own + 1]; w++) total[p] += sums[((w + own) * TOKENS + token) * 16 + r];
#if NORM
            total[p] *= activations.factor[token];
#endif
        }
        float value = total[0];
#if BIAS
        value += bias[rows.column + r];
#endif
#if GATE
        value = gated(value, total[1]);
#endif
        put(out, static_cast<i64>(token) * N + rows.column + r, value);
    }
}
