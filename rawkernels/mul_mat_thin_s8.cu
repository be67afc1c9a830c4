// mul_mat_thin_s8: out = f(x @ w.T) for few tokens: packed weights and activations as whole numbers, on NVIDIA's products
// of signed bytes
//
// Shapes    x [T,K] f16 or f32; w0, w1, w2 [n0|n1|n2, row_bytes] packed: up to three matrices, their products side by side
//           in out [T,N] f32 or f16; norm [K], bias [N] f32; T <= TOKENS; K a multiple of UNIT_K
// Launch    grid (B), block (THREADS): each block has its share of the tiles of 16 rows (GATE: of pairs of tiles, one of w0 and one
//           of w1), its warps equal shares of the units of k of those tiles, one behind the other
// Shared    dynamic: STAGES units of 16 rows for each warp, 16 PITCH bytes each; x as whole numbers: for each token its bytes
//           [K / 32][2][32] and 64 bytes, for each token and unit a scale and what the minima are multiplied with; the sums
//           of warps, [WARPS + tiles][TOKENS][16] floats
// Sync      x is brought into shared memory while the first copies run; barrier. Each warp works alone: it keeps STAGES units
//           coming by asynchronous copies, waits for the oldest, multiplies, and starts the next copy behind a warp barrier. At the
//           end of a tile or of its share it writes its sums. Barrier; a tile's sums are added up in the order of k
// Numerics  x (saturated at 65504) is 256 a + b times a scale for each UNIT_K of k, a and b signed bytes: off by at most a
//           65,278th of the unit's largest. Weights, products and their sums over 32 k, or over 256 where scales are whole
//           numbers, are exact; from there on f32. NORM: x * norm is taken so, and 1 / sqrt(mean x^2 + eps) multiplies the sums
// Defines   QTYPE as in quants/whole.cuh; TOKENS 4 or 8; X_F16; NORM
//           OUTPUT 0 f32, 1 f16, 2 added to f32; GATE 0, 1: silu(w0 x) * (w1 x), 2: gelu; BIAS; THREADS
//           UNIT_K k that a warp works on at a time, UNIT_BYTES their bytes in a row; STAGES
//           ALIGNED: units begin at multiples of 16 bytes
// Arch      sm_80 sm_90
// SharedLimit   sm_90=232448 sm_80=166912
// Compile   QTYPE=12 TOKENS=4 NORM=1 X_F16=0 OUTPUT=0 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1;
//           QTYPE=12 TOKENS=4 NORM=1 X_F16=0 OUTPUT=1 GATE=1,2 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1;
//           QTYPE=12 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1;
//           QTYPE=13 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=176 STAGES=2 ALIGNED=1;
//           QTYPE=14 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=210 STAGES=2 ALIGNED=0;
//           QTYPE=23 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=136 STAGES=2 ALIGNED=0;
//           QTYPE=8 TOKENS=4,8 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=272 STAGES=2 ALIGNED=1;
//           QTYPE=8 TOKENS=4 NORM=1 X_F16=0 OUTPUT=0 GATE=0 BIAS=1 THREADS=256 UNIT_K=64 UNIT_BYTES=68 STAGES=2 ALIGNED=0;
//           QTYPE=2,20 TOKENS=4 NORM=0 X_F16=1 OUTPUT=2 GATE=0 BIAS=0 THREADS=512 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1;
//           QTYPE=3 TOKENS=4 NORM=0 X_F16=0 OUTPUT=0 GATE=0 BIAS=1 THREADS=512 UNIT_K=256 UNIT_BYTES=160 STAGES=2 ALIGNED=1
#include "common/gates.cuh"
#include "common/thin.cuh"
#include "common/tile_s8.cuh"
#include "quants/whole.cuh"

#define WARPS (THREADS / WARP_SIZE)
#define SLABS (UNIT_K / 32)
#define COLUMNS (TOKENS / 4)  // products of eight columns: four tokens, two bytes each
// Units begin at multiples of STEP bytes. Bytes that one touches, in 16-byte pieces; rows in shared memory lie so that lanes
// meet no bank conflicts, of words or of pairs of them.
#define STEP (UNIT_BYTES & -UNIT_BYTES)
#define PIECES ((UNIT_BYTES + (ALIGNED ? 0 : 16 - STEP) + 15) / 16)
#define PITCH (WHOLE_ORDER ? ((PIECES + 1) / 2 | 1) * 32 : (PIECES | 1) * 16)
#define COPIES ((16 * PIECES + WARP_SIZE - 1) / WARP_SIZE)
#define UNIT_STAGE (16 * PITCH)
#define GROUP (UNIT_K / 8)    // lanes that bring a unit of x
#define BATCH (TOKENS > 4 ? 4 : 2)
#define MINIMA_BYTES (WHOLE_MINIMA ? WHOLE_SCALES ? 32 : 4 * SLABS : 0)  // of a token's unit

#if X_F16
typedef f16 x_t;
#else
typedef float x_t;
#endif

// Eight activations.
struct Run {
#if X_F16
    u32x4 words;
#else
    f32x4 low, high;
#endif
};

DEVICE void load_run(const f16* source, Run& run) {
#if X_F16
    run.words = load16(source);
#endif
}

DEVICE void load_run(const float* source, Run& run) {
#if !X_F16
    run.low = load16<f32x4>(source);
    run.high = load16<f32x4>(source + 4);
#endif
}

DEVICE void values_of_run(const Run& run, float (&v)[8]) {
#if X_F16
    const u32 pairs[4] = {run.words.x, run.words.y, run.words.z, run.words.w};
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = j % 2 ? high_half(pairs[j / 2]) : low_half(pairs[j / 2]);
#else
    v[0] = run.low.x, v[1] = run.low.y, v[2] = run.low.z, v[3] = run.low.w;
    v[4] = run.high.x, v[5] = run.high.y, v[6] = run.high.z, v[7] = run.high.w;
#endif
}

// x as whole numbers, in shared memory.
struct Activations {
    u8* bytes;       // [T][K / 32][high, low][32] and 64 bytes
    float* scale;    // [T][units]
    float* squares;  // NORM: [T][groups], of the runs that a warp brings at a time
    float* factor;   // NORM: [T], 1 / sqrt(mean x^2 + eps)
    u8* minima;      // [T][units][MINIMA_BYTES]
};

DEVICE i32 token_pitch(i32 K) { return 2 * K + 64; }
DEVICE i32 groups_of(i32 K) { return (K / 8 + WARP_SIZE - 1) / WARP_SIZE; }

DEVICE u32 bytes_of(const u32* words, u32 first, u32 second) {
    return byte_perm(byte_perm(words[0], words[1], first), byte_perm(words[2], words[3], first), second);
}

// Whole numbers, in the lower halves of words, as the two rows of bytes of their slab.
DEVICE void put_run(u8* slab, i32 run, const u32 (&q)[8]) {
    // In the order in which a lane takes them: one of eight bytes, or of four and four.
    const i32 first = WHOLE_ORDER ? 8 * run : run % 2 * 16 + run / 2 * 4;
    const i32 second = first + (WHOLE_ORDER ? 4 : 8);
    u32 upper[8];
#pragma unroll
    for (int j = 0; j < 8; j++) upper[j] = q[j] + 128;  // the lower byte counts from -128
    *reinterpret_cast<u32*>(slab + first) = bytes_of(upper, 0x0051, 0x5410);
    *reinterpret_cast<u32*>(slab + second) = bytes_of(upper + 4, 0x0051, 0x5410);
    *reinterpret_cast<u32*>(slab + 32 + first) = bytes_of(q, 0x0040, 0x5410);
    *reinterpret_cast<u32*>(slab + 32 + second) = bytes_of(q + 4, 0x0040, 0x5410);
}

// What the minima of one slab are multiplied with: the sum of its whole numbers.
DEVICE void put_sum(u8* minima, i32 slab, i32 sum) {
#if WHOLE_SCALES
    // As 65536 c + 256 b + a, three signed bytes.
    const i32 rest = (sum + 128) >> 8;
    minima[slab] = static_cast<u8>(rest);
    minima[8 + slab] = static_cast<u8>(sum);
    minima[16 + slab] = static_cast<u8>((rest + 128) >> 8);
    minima[24 + slab] = 0;
#else
    reinterpret_cast<float*>(minima)[slab] = static_cast<float>(sum);
#endif
}

// A warp's runs of one token; a lane past the last repeats that one, and stores nothing.
DEVICE void put_group(const Activations& target, const Run& run, const float* RESTRICT norm, i32 token, i32 group, i32 K) {
    const i32 runs = K / 8;
    const i32 own = group * WARP_SIZE + LANE();
    const bool exists = own < runs;
    const i32 index = exists ? own : runs - 1;
    float v[8];
    values_of_run(run, v);
#if NORM
    float squares = 0;
    const f32x4 a = load16<f32x4>(norm + 8 * index), b = load16<f32x4>(norm + 8 * index + 4);
    const float weight[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        squares += v[j] * v[j];
        v[j] *= weight[j];
    }
    squares = warp_sum(exists ? squares : 0.0f);
    if (LANE() == 0) target.squares[token * groups_of(K) + group] = squares;
#endif
    u32 largest = 0;  // of the bits without sign, which order numbers and put NaN last
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (!X_F16 && !NORM) v[j] = f16_range(v[j]);
        largest = max(largest, f32_bits(v[j]) & 0x7FFFFFFFu);
    }
    if (GROUP == WARP_SIZE) {
        largest = warp_max_u32(largest);
    } else {
#pragma unroll
        for (int mask = 1; mask < GROUP; mask *= 2) largest = max(largest, shfl_xor(largest, mask));
    }
    const float range = f32_from_bits(largest);
    const float inverse = range > 1e-30f ? 32639.0f / range : 0.0f;
    u32 q[8];
    i32 sum = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        // The last places of 1.5 2^23 count whole numbers, in two's complement.
        q[j] = f32_bits(fmaf(v[j], inverse, 12582912.0f));
        sum += static_cast<i32>(q[j] - 0x4B400000u);
    }
    if (WHOLE_MINIMA) {
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
    }
    if (!exists) return;
    const i32 place = token * (K / UNIT_K) + index / GROUP;
    put_run(target.bytes + token * token_pitch(K) + index / 4 * 64, index % 4, q);
    if (index % GROUP == 0) target.scale[place] = range * (1.0f / 32639.0f);
    if (WHOLE_MINIMA && index % 4 == 0) put_sum(target.minima + place * MINIMA_BYTES, index / 4 % SLABS, sum);
}

// Runs on their way: those of BATCH groups of a warp.
struct Batch {
    i32 token, group;  // of the first
    Run runs[BATCH];
};

DEVICE void advance(i32& token, i32& group, i32 groups) {
    group += WARPS;
    while (group >= groups) group -= groups, token++;
}

DEVICE void load_batch(Batch& batch, const x_t* RESTRICT x, i32 T, i32 K) {
    i32 token = batch.token, group = batch.group;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (token < T) {
            const i32 own = group * WARP_SIZE + LANE();
            load_run(x + static_cast<i64>(token) * K + 8 * (own < K / 8 ? own : K / 8 - 1), batch.runs[i]);
            advance(token, group, groups_of(K));
        }
    }
}

DEVICE void put_batch(const Activations& target, Batch& batch, const float* RESTRICT norm, i32 T, i32 K) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (batch.token < T) {
            put_group(target, batch.runs[i], norm, batch.token, batch.group, K);
            advance(batch.token, batch.group, groups_of(K));
        }
    }
}

// The units that a warp fetches, one behind the other.
struct Source {
    i32 tile, unit, left;
    i32 piece[COPIES], target[COPIES];  // of this lane: bytes within the unit, and within the stage; -1: none
    const u8* from[COPIES];             // where the piece would lie if the unit were aligned
};

DEVICE void seek(Source& source, const Matrices& all) {
    const Rows rows = rows_of(all, source.tile);
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const i32 r = (i * WARP_SIZE + LANE()) / PIECES;
        source.from[i] = row_of(rows, r, all.row_bytes) + (static_cast<i64>(source.unit) * UNIT_BYTES + source.piece[i]);
    }
}

DEVICE void begin_source(Source& source, const Matrices& all, i32 tile, i32 unit, i32 count) {
    source.tile = tile, source.unit = unit, source.left = count;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const i32 index = i * WARP_SIZE + LANE();
        source.piece[i] = index % PIECES * 16;
        source.target[i] = index < 16 * PIECES ? index / PIECES * PITCH + source.piece[i] : -1;
    }
    if (count > 0) seek(source, all);
}

// Start the copies of the next unit, whole pieces of 16 bytes; allocations are multiples of that.
DEVICE void fetch(Source& source, u8* stage, const Matrices& all, i32 units) {
    if (source.left > 0) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const u64 from = reinterpret_cast<u64>(source.from[i]);
            const i32 rest = ALIGNED ? 0 : static_cast<i32>(from % 16);
            const bool partial = 16 * (PIECES - 1) >= UNIT_BYTES;  // the last piece may have nothing of the unit
            const bool last = 16 * PIECES % WARP_SIZE && i == COPIES - 1;
            source.from[i] += UNIT_BYTES;
            if ((last && source.target[i] < 0) || (partial && source.piece[i] >= UNIT_BYTES + rest)) continue;
            async_copy16(stage + source.target[i], reinterpret_cast<const void*>(from - rest));
        }
        source.left--;
        if (++source.unit == units && source.left > 0) {
            source.unit = 0;
            source.tile++;
            seek(source, all);
        }
    }
    async_commit();
}

// A lane's part of the activations: of column g of each product, byte half g % 2 of token g / 2.
struct Columns {
    const u8* bytes[COLUMNS];
    const u8* minima[COLUMNS];  // WHOLE_SCALES: words of the column; else floats of the token of its results
    const float* scale[COLUMNS];
};

// The products of a unit: 16 rows and the tokens of this lane's results, rows g and g + 8.
DEVICE void multiply(float (&sum)[COLUMNS][2], const u8* const (&packed)[2], const Columns& columns, i32 unit) {
    const i32 part = LANE() % 4;
    const WholeRow rows[2] = {whole_row(packed[0], part), whole_row(packed[1], part)};
#if WHOLE_SCALES
    const WholeHead heads[2] = {whole_head(packed[0]), whole_head(packed[1])};
    i32 high[COLUMNS][2] = {}, low[COLUMNS][2] = {};
#else
    float scaled[COLUMNS][2] = {};
#endif
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        u32 codes[2][2];
        whole_codes(rows[0], slab, codes[0]);
        whole_codes(rows[1], slab, codes[1]);
        const u32 a[4] = {codes[0][0], codes[1][0], codes[0][1], codes[1][1]};
#if !WHOLE_SCALES
        const WholeScale scales[2] = {whole_scale(rows[0], slab), whole_scale(rows[1], slab)};
#endif
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            const u64 x = *reinterpret_cast<const u64*>(columns.bytes[n] + (unit * SLABS + slab) * 64);
            const u32 b[2] = {static_cast<u32>(x), static_cast<u32>(x >> 32)};
#if WHOLE_HALVES
#pragma unroll
            for (int half = 0; half < 2; half++) {
                i32 c[4] = {0, 0, 0, 0};
                const u32 a_half[2] = {a[2 * half], a[2 * half + 1]};
                mma_m16n8k16_s8(c, a_half, b[half]);
#else
            {
                constexpr int half = 0;
                i32 c[4] = {0, 0, 0, 0};
                mma_m16n8k32_s8(c, a, b);
#endif
#pragma unroll
                for (int i = 0; i < 2; i++) {
#if WHOLE_SCALES
                    const i32 scale = whole_scale(heads[i], slab, half);
                    high[n][i] += scale * c[2 * i];
                    low[n][i] += scale * c[2 * i + 1];
#else
                    (void)half;
                    scaled[n][i] += scales[i].d * static_cast<float>(256 * c[2 * i] + c[2 * i + 1]);
#if WHOLE_MINIMA
                    scaled[n][i] -= scales[i].minimum * reinterpret_cast<const float*>(columns.minima[n])[unit * SLABS + slab];
#endif
#endif
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#if WHOLE_SCALES
        float scaled[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scaled[i] = whole_d(heads[i]) * fmaf(256.0f, static_cast<float>(high[n][i]), static_cast<float>(low[n][i]));
        }
#if WHOLE_MINIMA
        // k counts the slabs here.
        const u32* const words = reinterpret_cast<const u32*>(columns.minima[n] + unit * MINIMA_BYTES);
        const u32 minima[2] = {part < 2 ? whole_minima(heads[0], part) : 0, part < 2 ? whole_minima(heads[1], part) : 0};
        i32 upper[4] = {0, 0, 0, 0}, lower[4] = {0, 0, 0, 0};
        mma_m16n8k16_s8(lower, minima, words[part % 2]);
        mma_m16n8k16_s8(upper, minima, words[4 + part % 2]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const i32 total = (upper[2 * i] * 256 + lower[2 * i]) * 256 + lower[2 * i + 1];
            scaled[i] -= whole_dmin(heads[i]) * static_cast<float>(total);
        }
#endif
        const float factor = columns.scale[n][unit];
        sum[n][0] += factor * scaled[0];
        sum[n][1] += factor * scaled[1];
#else
        const float factor = columns.scale[n][unit];
        sum[n][0] += factor * scaled[n][0];
        sum[n][1] += factor * scaled[n][1];
#endif
    }
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
    begin_source(source, all, first_tile + tile, unit, end - begin);
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch(source, stages + s * UNIT_STAGE, all, units);

    // Behind the first weights, which no kernel writes.
    GRID_DEPENDENCY();
    Batch batch;
    batch.token = 0, batch.group = WARP_ID();
    while (batch.group >= groups_of(K)) batch.group -= groups_of(K), batch.token++;
    load_batch(batch, x, T, K);

    Activations activations;
    activations.bytes = memory + WARPS * STAGES * UNIT_STAGE;
    activations.scale = reinterpret_cast<float*>(activations.bytes + T * token_pitch(K));
    activations.minima = reinterpret_cast<u8*>(activations.scale + (T * units + 3) / 4 * 4);
    float* const sums = reinterpret_cast<float*>(activations.minima + (T * units * MINIMA_BYTES + 15) / 16 * 16);
    i32* const ends = reinterpret_cast<i32*>(sums + (WARPS + tiles) * TOKENS * 16);  // [tiles][first, last warp]
    activations.factor = reinterpret_cast<float*>(ends + 2 * tiles);
    activations.squares = activations.factor + TOKENS;
    put_batch(activations, batch, norm, T, K);
    while (batch.token < T) {
        load_batch(batch, x, T, K);
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
        multiply(sum, packed, columns, unit);
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
                    own[(4 * n + part) * 16 + g + 8 * i] = sum[n][i];
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
