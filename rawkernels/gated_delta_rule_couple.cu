// gated_delta_rule_couple: of CHUNK tokens in sequences of more than `few`, what does not depend on the state
//                          (common/delta_chunks.cuh)
//
// Shapes    as gated_delta_rule and in common/delta_chunks.cuh
// Launch    grid (slots, num_k), block (256): one chunk of one key head and its value heads
// Shared    dynamic: K and Q taken apart, in their place later the triangles; then K.K, Q.K
// Sync      barriers between the steps; a thread inverts a column without meeting others
// Numerics  Q and K as two f16 each (22 bits), three f16 products, f32 sums. G in f64, kept as two f32. The inverse by
//           substitution in f32: products of powers lose all digits where keys resemble each other
// Defines   HEAD_DIM, a multiple of 32; TILED as in gated_delta_rule
// Compile   HEAD_DIM=32,64,128 TILED=0,1
#define KERNEL_MIN_BLOCKS 2
#include "common/delta_chunks.cuh"

#define COUPLE_THREADS 256
#define COUPLED (COUPLE_THREADS / CHUNK)  // value heads whose triangles are inverted at the same time
#define SUM_LD (CHUNK + 1)

// Two numbers as two pairs of f16: high is the nearest, low what is missing.
struct Pair {
    u32 high, low;
};

DEVICE Pair split(float a, float b) {
    const u32 high = h2_pack(a, b);
    return Pair{high, h2_pack(a - low_half(high), b - high_half(high))};
}

struct alignas(8) u32x2 {
    u32 x, y;
};

#define FOURS (HEAD_DIM / 4)  // pieces of a row
#define ROWS_AT_ONCE (COUPLE_THREADS / FOURS < CHUNK ? COUPLE_THREADS / FOURS : CHUNK)  // by all threads
#define ROW_ITEMS ((CHUNK + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE)
// Whether all threads have ROW_ITEMS pieces.
#define EVEN (ROWS_AT_ONCE * FOURS == COUPLE_THREADS && CHUNK % ROWS_AT_ONCE == 0)

// A thread's part of CHUNK rows of q or k; rows from `count` on are 0.
DEVICE void load_rows(const float* RESTRICT rows, i64 row_size, i32 count, f32x4 (&x)[ROW_ITEMS]) {
    const int row = threadIdx.x / FOURS, column = threadIdx.x % FOURS * 4;
    const float* source = rows + row * row_size + column;
#pragma unroll
    for (int i = 0; i < ROW_ITEMS; i++) {
        x[i] = f32x4{0, 0, 0, 0};
        if ((EVEN || row < ROWS_AT_ONCE) && row + i * ROWS_AT_ONCE < count) x[i] = load16<f32x4>(source);
        source += ROWS_AT_ONCE * row_size;
    }
}

DEVICE void take_apart(const f32x4 (&x)[ROW_ITEMS], f16* shared, f16* global) {
    const int own_row = threadIdx.x / FOURS, column = threadIdx.x % FOURS * 4;
#pragma unroll
    for (int i = 0; i < ROW_ITEMS; i++) {
        const int row = own_row + i * ROWS_AT_ONCE;
        if (!EVEN && (own_row >= ROWS_AT_ONCE || row >= CHUNK)) continue;
        const Pair left = split(x[i].x * SCALE, x[i].y * SCALE), right = split(x[i].z * SCALE, x[i].w * SCALE);
        const u32x2 high = {left.high, right.high}, low = {left.low, right.low};
        *reinterpret_cast<u32x2*>(shared + row * KEY_LD + column) = high;
        *reinterpret_cast<u32x2*>(shared + (CHUNK + row) * KEY_LD + column) = low;
        *reinterpret_cast<u32x2*>(global + row * HEAD_DIM + column) = high;
        *reinterpret_cast<u32x2*>(global + (CHUNK + row) * HEAD_DIM + column) = low;
    }
}

// One tile of a K^T, in f32.
DEVICE void couple_tile(const f16* a, const f16* k, int row_tile, int column_tile, float factor, float* sums) {
    FragC sum[3];  // of the three products: each in a chain of its own
#pragma unroll
    for (int i = 0; i < 3; i++) tile_zero(sum[i]);
    const f16* const rows = a + row_tile * 16 * KEY_LD;
    const f16* const columns = k + column_tile * 16 * KEY_LD;
#pragma unroll 2
    for (int kt = 0; kt < KEY_TILES; kt++) {
        FragA high, low;
        FragB k_high, k_low;
        tile_load_a(high, rows + kt * 16, KEY_LD);
        tile_load_a(low, rows + CHUNK * KEY_LD + kt * 16, KEY_LD);
        tile_load_b(k_high, columns + kt * 16, KEY_LD);
        tile_load_b(k_low, columns + CHUNK * KEY_LD + kt * 16, KEY_LD);
        tile_mma(sum[0], low, k_high);
        tile_mma(sum[1], high, k_low);
        tile_mma(sum[2], high, k_high);
    }
#pragma unroll
    for (int i = 0; i < TILE_C_ELEMENTS; i++) {
        sums[(row_tile * 16 + tile_c_row(i)) * SUM_LD + column_tile * 16 + tile_c_col(i)] =
            (sum[2].x[i] + (sum[0].x[i] + sum[1].x[i])) * factor;
    }
}

// exp(G_i - G_j), the sums in two floats each
DEVICE float decay_between(const float* high, const float* low, int i, int j) {
    return expf((high[i] - high[j]) + (low[i] - low[j]));
}

// Column j of (I + triangle)^-1 by substitution; rows of `triangle` are CHUNK long.
DEVICE void invert_column(const float* triangle, int j, float (&x)[CHUNK]) {
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float sums[4] = {i == j ? 1.0f : 0.0f, 0, 0, 0};
#pragma unroll
        for (int m = 0; m < i; m += 4) {  // beyond the diagonal the triangle is 0, and x not known yet
            const f32x4 four = load16<f32x4>(triangle + i * CHUNK + m);
            sums[0] -= four.x * x[m];
            if (m + 1 < i) sums[1] -= four.y * x[m + 1];
            if (m + 2 < i) sums[2] -= four.z * x[m + 2];
            if (m + 3 < i) sums[3] -= four.w * x[m + 3];
        }
        x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

KERNEL(COUPLE_THREADS) gated_delta_rule_couple(
        const float* RESTRICT qkv, const float* RESTRICT beta, const float* RESTRICT alpha,
        const float* RESTRICT decay, const float* RESTRICT dt_bias, const i32* RESTRICT cu_seqlens, float* scratch,
        i32 beta_start, i32 beta_row, i32 alpha_start, i32 alpha_row, i32 num_k, i32 num_v, i32 num_seqs, i32 few,
        i32 slot_size) {
    GRID_DEPENDENCY();
    DYNAMIC_SHARED(f16, tiles);
    SHARED i32 own[2];  // the chunk's first token, and how many it has
    SHARED float rates[COUPLED][CHUNK], steps[COUPLED][CHUNK], high[COUPLED][CHUNK], low[COUPLED][CHUNK];
    const i32 tid = threadIdx.x, key_head = blockIdx.y, member = tid / CHUNK, token = tid % CHUNK;
    if (tid == 0) own[1] = 0;
    BARRIER();
    for (i32 seq = tid; seq < num_seqs; seq += COUPLE_THREADS) {
        const i32 start = cu_seqlens[seq], count = cu_seqlens[seq + 1] - start;
        const i32 passed = (static_cast<i32>(blockIdx.x) - (start / CHUNK + seq)) * CHUNK;
        if (count > few && passed >= 0 && passed < count) {
            own[0] = start + passed;
            own[1] = min(count - passed, CHUNK);
        }
    }
    BARRIER();
    const i32 first = own[0], count = own[1];
    if (count == 0) return;  // the whole block

    float* const slot = scratch + static_cast<i64>(blockIdx.x) * slot_size;
    const i64 token_size = static_cast<i64>(2 * num_k + num_v) * HEAD_DIM;
    const float* const q = qkv + first * token_size + key_head * HEAD_DIM;
    f16* const shared_q = tiles + 2 * CHUNK * KEY_LD;
    f16* const global_k = keys_of(slot, key_head);
    f32x4 rows_q[ROW_ITEMS], rows_k[ROW_ITEMS];
    load_rows(q + num_k * HEAD_DIM, token_size, count, rows_k);
    load_rows(q, token_size, count, rows_q);
    constexpr int tile_floats = 2 * CHUNK * KEY_LD, triangle_floats = COUPLED * CHUNK * CHUNK;
    float* const of_keys =
        reinterpret_cast<float*>(tiles) + (tile_floats > triangle_floats ? tile_floats : triangle_floats);
    float* const of_queries = of_keys + CHUNK * SUM_LD;
    float* const triangles = reinterpret_cast<float*>(tiles);

    const i32 group = num_v / num_k;
    auto value_head = [&](i32 place) { return TILED ? place * num_k + key_head : key_head * group + place; };
    for (i32 start = 0; start < group; start += COUPLED) {
        const i32 members = min(COUPLED, group - start);
        const i32 head = value_head(start + min(member, members - 1));
        float step = 0, rate = 0;
        if (token < count) {
            const i64 t = first + token;
            step = alpha[t * alpha_row + alpha_start + head] + dt_bias[head];
            rate = beta[t * beta_row + beta_start + head];
        }
        if (start == 0) {  // while these are on their way
            take_apart(rows_k, tiles, global_k);
            take_apart(rows_q, shared_q, global_k + 2 * CHUNK * HEAD_DIM);
        }
        rate = token < count ? write_rate(rate) : 0;
        rates[member][token] = rate;
        steps[member][token] = token < count ? log_decay(decay[head], step) : 0;
        BARRIER();
        if (start == 0) {
            constexpr int lower = TOKEN_TILES * (TOKEN_TILES + 1) / 2;
            const float unscaled = 1 / (SCALE * SCALE);
            for (int job = WARP_ID(); job < 2 * lower; job += COUPLE_THREADS / WARP_SIZE) {
                int row_tile = 0, column_tile = job % lower;
                while (column_tile > row_tile) column_tile -= ++row_tile;
                const bool of_q = job >= lower;
                const float factor = of_q ? unscaled * rsqrt_f(static_cast<float>(HEAD_DIM)) : unscaled;
                couple_tile(of_q ? shared_q : tiles, tiles, row_tile, column_tile, factor, of_q ? of_queries : of_keys);
            }
        }
        double total = 0;
#pragma unroll 8
        for (int i = 0; i < CHUNK; i++) total += i <= token ? steps[member][i] : 0.0f;
        high[member][token] = static_cast<float>(total);
        low[member][token] = static_cast<float>(total - static_cast<float>(total));
        BARRIER();  // also: the tiles' products are done
        for (i32 item = tid; item < members * CHUNK * CHUNK / 2; item += COUPLE_THREADS) {
            const i32 m = item / (CHUNK * CHUNK / 2), i = item / (CHUNK / 2) % CHUNK, j = item % (CHUNK / 2) * 2;
            float score[2], coupling[2];
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const bool before = j + side <= i;
                const float between = before ? decay_between(high[m], low[m], i, j + side) : 0;
                score[side] = before ? of_queries[i * SUM_LD + j + side] * between : 0;
                coupling[side] = j + side < i ? rates[m][i] * of_keys[i * SUM_LD + j + side] * between : 0;
                triangles[(m * CHUNK + i) * CHUNK + j + side] = coupling[side];
            }
            const Pair pair = split(score[0] * SCALE, score[1] * SCALE);
            f16* const target = pairs_of(slot, num_k, value_head(start + m)) + (2 * CHUNK + i) * CHUNK + j;
            *reinterpret_cast<u32*>(target) = pair.high;
            *reinterpret_cast<u32*>(target + CHUNK * CHUNK) = pair.low;
        }
        BARRIER();
        if (member < members) {
            float x[CHUNK];
            invert_column(triangles + member * CHUNK * CHUNK, token, x);
            f16* const target = pairs_of(slot, num_k, head) + token;
            const float factor = SCALE * rate;
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                const f16 nearest = to_f16(x[i] * factor);
                target[i * CHUNK] = nearest;
                target[(CHUNK + i) * CHUNK] = to_f16(x[i] * factor - to_f32(nearest));
            }
            float* const gates = gates_of(slot, num_k, num_v, head);
            gates[token] = expf(high[member][token] + low[member][token]);
            gates[CHUNK + token] = decay_between(high[member], low[member], CHUNK - 1, token);
        }
        BARRIER();
    }
}
