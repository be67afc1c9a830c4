// product_s8: what products of whole numbers share: activations as signed bytes in shared memory, packed rows on their way,
// and the products of a unit of k of 16 rows
//
// Defines   QTYPE, ALIGNED as in quants/whole.cuh; TOKENS 4 or 8: columns of a product, or 1; X_F16, NORM, THREADS,
//           UNIT_K, UNIT_BYTES, STAGES: see mul_mat_thin_s8.cu
#pragma once
#include "common/tile_s8.cuh"
#include "quants/whole.cuh"

#define WARPS (THREADS / WARP_SIZE)
#define SLABS (UNIT_K / 32)
#define APART (TOKENS == 1)  // see common/product_apart.cuh
#define COLUMNS (APART ? 1 : TOKENS / 4)  // products of eight columns: four tokens, two bytes each
#define SCALED_K (UNIT_K < 256 ? UNIT_K : 256)  // k for which x has one scale
#define SCALED (UNIT_K / SCALED_K)  // times that in a unit
#define TABLE_COPIES (APART ? 2048 / WHOLE_TABLE : 1)  // of a codebook in shared memory, entry by entry
// Units begin at multiples of STEP bytes. Bytes that one touches, in 16-byte pieces; rows in shared memory lie so that lanes
// meet no bank conflicts, of words or of pairs of them.
#define STEP (UNIT_BYTES & -UNIT_BYTES)
#define PIECES ((UNIT_BYTES + (ALIGNED ? 0 : 16 - STEP) + 15) / 16)
#define PITCH (WHOLE_PAIRS ? ((PIECES + 1) / 2 | 1) * 32 : (PIECES | 1) * 16)
#define COPIES ((16 * PIECES + WARP_SIZE - 1) / WARP_SIZE)
#define UNIT_STAGE (16 * PITCH)
#define GROUP (SCALED_K / 8)  // lanes that bring as many x as have one scale
#define BATCH (TOKENS > 4 ? 4 : 2)
#define MINIMA_BYTES (WHOLE_MINIMA ? WHOLE_SCALES ? 32 : 4 * SLABS : 0)  // of a token's unit

// The codebook, where the format has one, in static shared memory; all threads call this, a barrier comes behind it.
#if WHOLE_TABLE
#define WHOLE_TABLE_SHARED(name) SHARED u32 name[WHOLE_TABLE * TABLE_COPIES]
DEVICE void bring_table(u32* table) {
#pragma unroll
    for (int i = 0; i < WHOLE_TABLE; i += THREADS) {
        const int place = i + static_cast<int>(threadIdx.x);
        if (place < WHOLE_TABLE) {
            const u32 entry = WHOLE_SOURCE[place];
#pragma unroll
            for (int copy = 0; copy < TABLE_COPIES; copy++) table[place * TABLE_COPIES + copy] = entry;
        }
    }
}
#else
#define WHOLE_TABLE_SHARED(name) u32* const name = nullptr
DEVICE void bring_table(u32*) {}
#endif

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
    u8* bytes;       // [T][K / 32][high, low][32] and 64 bytes, in the order of quants/whole.cuh
    float* scale;    // [T][units][SCALED]
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
    u32 low[8], upper[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        low[j] = q[WHOLE_ORDER == 2 ? j / 2 + j % 2 * 4 : j];
        upper[j] = low[j] + 128;  // the lower byte counts from -128
    }
    *reinterpret_cast<u32*>(slab + first) = bytes_of(upper, 0x0051, 0x5410);
    *reinterpret_cast<u32*>(slab + second) = bytes_of(upper + 4, 0x0051, 0x5410);
    *reinterpret_cast<u32*>(slab + 32 + first) = bytes_of(low, 0x0040, 0x5410);
    *reinterpret_cast<u32*>(slab + 32 + second) = bytes_of(low + 4, 0x0040, 0x5410);
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
    const i32 place = token * (K / SCALED_K) + index / GROUP;
    i32 slab = index / 4, part = index % 4;
    if (APART) part = index / 4 % 4, slab = index / 16 * 4 + index % 4;  // see quants/apart.cuh
    else if (WHOLE_QUARTERS) part = index / 8 % 4, slab = index / 32 * 8 + index % 8;
    put_run(target.bytes + token * token_pitch(K) + slab * 64, part, q);
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

// `row` has where the row of x is that becomes row `token` in shared memory.
template <typename Row>
DEVICE void load_batch(Batch& batch, Row row, i32 T, i32 K) {
    i32 token = batch.token, group = batch.group;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (token < T) {
            const i32 own = group * WARP_SIZE + LANE();
            load_run(row(token) + 8 * (own < K / 8 ? own : K / 8 - 1), batch.runs[i]);
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

// A lane's pieces of the units of 16 rows that its warp fetches, one behind the other.
struct Pieces {
    i32 target[COPIES];      // bytes within the stage; -1: none
    const u8* from[COPIES];  // where the piece would lie if the unit were aligned
    u32 last;                // bits: which are the last of their row
};

DEVICE i32 piece_of(int copy) { return copy * WARP_SIZE + LANE(); }

DEVICE void begin_pieces(Pieces& pieces) {
    pieces.last = 0;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const i32 index = piece_of(i);
        pieces.target[i] = index < 16 * PIECES ? index / PIECES * PITCH + index % PIECES * 16 : -1;
        pieces.last |= static_cast<u32>(index % PIECES == PIECES - 1) << i;
    }
}

// Go on with the units from `unit` of other rows.
template <typename Row>
DEVICE void seek(Pieces& pieces, Row row, i32 unit) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const i32 index = piece_of(i);
        pieces.from[i] = row(index / PIECES) + (static_cast<i64>(unit) * UNIT_BYTES + index % PIECES * 16);
    }
}

// Start the copies of the next unit, whole pieces of 16 bytes; allocations are multiples of that.
DEVICE void fetch_unit(Pieces& pieces, u8* stage) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const u64 from = reinterpret_cast<u64>(pieces.from[i]);
        const i32 rest = ALIGNED ? 0 : static_cast<i32>(from % 16);
        // The last piece may have nothing of the unit.
        const bool empty = 16 * (PIECES - 1) >= UNIT_BYTES + rest && pieces.last >> i & 1;
        const bool last = 16 * PIECES % WARP_SIZE && i == COPIES - 1;
        pieces.from[i] += UNIT_BYTES;
        if ((last && pieces.target[i] < 0) || empty) continue;
        async_copy16(stage + pieces.target[i], reinterpret_cast<const void*>(from - rest));
    }
}

// A lane's part of the activations: of column g of each product, byte half g % 2 of token g / 2.
struct Columns {
    const u8* bytes[COLUMNS];
    const u8* minima[COLUMNS];  // WHOLE_SCALES: words of the column; else floats of the token of its results
    const float* scale[COLUMNS];
};

// Eight activations of a column.
DEVICE void load_column(u32 (&b)[2], const Columns& columns, int n, i32 slab) {
    const u64 x = *reinterpret_cast<const u64*>(columns.bytes[n] + slab * 64);
    b[0] = static_cast<u32>(x), b[1] = static_cast<u32>(x >> 32);
}

// Of two rows, as the instruction wants them.
DEVICE void load_codes(u32 (&a)[4], WholeRow (&rows)[2], int slab) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 codes[2];
        whole_codes(rows[i], slab, codes);
        a[i] = codes[0], a[2 + i] = codes[1];
    }
}

#if WHOLE_HALVES
// The products of one half of a slab.
DEVICE void multiply_half(i32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2], int half) {
#if WHOLE_HALVES == 1
    const u32 a_half[2] = {a[2 * half], a[2 * half + 1]};
    mma_m16n8k16_s8(c, a_half, b[half]);
#else
    const u32 mask = LANE() % 4 / 2 == half ? 0xFFFFFFFFu : 0;
    const u32 b_half[2] = {b[0] & mask, b[1] & mask};
    mma_m16n8k32_s8(c, a, b_half);
#endif
}
#else
DEVICE void multiply_half(i32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2], int) { mma_m16n8k32_s8(c, a, b); }
#endif
constexpr int HALVES = WHOLE_HALVES ? 2 : 1;

#if WHOLE_SCALES == 0
template <int USED>
DEVICE void multiply_floats(float (&sum)[COLUMNS][2], WholeRow (&rows)[2], const Columns& columns, i32 unit) {
    float scaled[USED][2] = {};
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        u32 a[4];
        load_codes(a, rows, slab);
        WholeScale scales[2][HALVES];
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) scales[i % 2][i / 2] = whole_scale(rows[i % 2], slab, i / 2);
#pragma unroll
        for (int n = 0; n < USED; n++) {
            u32 b[2];
            load_column(b, columns, n, unit * SLABS + slab);
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                i32 c[4] = {0, 0, 0, 0};
                multiply_half(c, a, b, half);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float whole = static_cast<float>(256 * c[2 * i] + c[2 * i + 1]);
                    scaled[n][i] = fmaf(scales[i][half].d, whole, scaled[n][i]);
#if WHOLE_MINIMA
                    const float total = reinterpret_cast<const float*>(columns.minima[n])[unit * SLABS + slab];
                    scaled[n][i] = fmaf(-scales[i][half].minimum, total, scaled[n][i]);
#endif
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < USED; n++) {
        const float factor = columns.scale[n][unit];
#pragma unroll
        for (int i = 0; i < 2; i++) sum[n][i] = fmaf(factor, scaled[n][i], sum[n][i]);
    }
}
#endif

#if WHOLE_SCALES == 1
template <int USED>
DEVICE void multiply_whole(float (&sum)[COLUMNS][2], const u8* const (&packed)[2], WholeRow (&rows)[2],
                           const Columns& columns, i32 unit) {
    const WholeHead heads[2] = {whole_head(packed[0]), whole_head(packed[1])};
    i32 high[USED][2] = {}, low[USED][2] = {};
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        u32 a[4];
        load_codes(a, rows, slab);
#pragma unroll
        for (int n = 0; n < USED; n++) {
            u32 b[2];
            load_column(b, columns, n, unit * SLABS + slab);
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                i32 c[4] = {0, 0, 0, 0};
                multiply_half(c, a, b, half);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const i32 scale = whole_scale(heads[i], slab, half);
                    high[n][i] += scale * c[2 * i];
                    low[n][i] += scale * c[2 * i + 1];
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < USED; n++) {
        float scaled[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float whole = fmaf(256.0f, static_cast<float>(high[n][i]), static_cast<float>(low[n][i]));
            scaled[i] = mul_rn(whole_d(heads[i]), whole);
        }
#if WHOLE_MINIMA
        // k counts the slabs here.
        const i32 part = LANE() % 4;
        const u32* const words = reinterpret_cast<const u32*>(columns.minima[n] + unit * MINIMA_BYTES);
        const u32 minima[2] = {part < 2 ? whole_minima(heads[0], part) : 0, part < 2 ? whole_minima(heads[1], part) : 0};
        i32 upper[4] = {0, 0, 0, 0}, lower[4] = {0, 0, 0, 0};
        mma_m16n8k16_s8(lower, minima, words[part % 2]);
        mma_m16n8k16_s8(upper, minima, words[4 + part % 2]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const i32 total = (upper[2 * i] * 256 + lower[2 * i]) * 256 + lower[2 * i + 1];
            scaled[i] = fmaf(-whole_dmin(heads[i]), static_cast<float>(total), scaled[i]);
        }
#endif
        const float factor = columns.scale[n][unit];
        sum[n][0] = fmaf(factor, scaled[0], sum[n][0]);
        sum[n][1] = fmaf(factor, scaled[1], sum[n][1]);
    }
}
#endif

#if WHOLE_SCALES == 2
template <int USED>
DEVICE void multiply_scaled(float (&sum)[COLUMNS][2], const u8* const (&packed)[2], WholeRow (&rows)[2],
                            const Columns& columns, i32 unit) {
    i32 first[USED][4] = {}, second[USED][4] = {};
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        u32 a[4];
        load_codes(a, rows, slab);
        const u32 seconds[2] = {whole_second(rows[0], slab), whole_second(rows[1], slab)};
        const u32 a_second[4] = {seconds[0], seconds[1], seconds[0], seconds[1]};
#pragma unroll
        for (int n = 0; n < USED; n++) {
            u32 b[2];
            load_column(b, columns, n, unit * SLABS + slab);
            mma_m16n8k32_s8(first[n], a, b);
            mma_m16n8k32_s8(second[n], a_second, b);
        }
    }
    const WholeHead heads[2] = {whole_head(packed[0]), whole_head(packed[1])};
#pragma unroll
    for (int n = 0; n < USED; n++) {
        const float factor = columns.scale[n][unit];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float whole = static_cast<float>(256 * first[n][2 * i] + first[n][2 * i + 1]);
            const float of_second = static_cast<float>(256 * second[n][2 * i] + second[n][2 * i + 1]);
            const float scaled = fmaf(whole_second_d(heads[i]), of_second, mul_rn(whole_d(heads[i]), whole));
            sum[n][i] = fmaf(factor, scaled, sum[n][i]);
        }
    }
}
#endif

// Which sums are fused is said, so that variants round alike.
//
// The products of a unit: 16 rows and the tokens of this lane's results, rows g and g + 8, in the first USED columns.
template <int USED = COLUMNS>
DEVICE void multiply(float (&sum)[COLUMNS][2], const u8* const (&packed)[2], const Columns& columns, i32 unit,
                     const u32* table) {
    const i32 part = LANE() % 4;
    WholeRow rows[2] = {whole_row(packed[0], part, table), whole_row(packed[1], part, table)};
#if WHOLE_SCALES == 2
    multiply_scaled<USED>(sum, packed, rows, columns, unit);
#elif WHOLE_SCALES == 1
    multiply_whole<USED>(sum, packed, rows, columns, unit);
#else
    multiply_floats<USED>(sum, rows, columns, unit);
#endif
}
