// gated_delta_rule_chunks: gated_delta_rule for sequences of more than `few` tokens, CHUNK at once, as products of
//                          matrices (the WY form), from what gated_delta_rule_couple left (common/delta_chunks.cuh)
//
//     N = T (V - e^G K S^T);   out = e^G Q S^T / sqrt(HEAD_DIM) + P N;   S = e^G_last S + N^T (e^(G_last - G) K)
//
// Shapes    as gated_delta_rule and in common/delta_chunks.cuh
// Launch    grid (HEAD_DIM / SLICE, num_v, S), block (4 warps): each has 16 of the slice's rows of S and half of the
//           keys, in registers; products are transposed (rows are elements of a value), so that each one's result is the
//           next one's left factor as it is
// Shared    dynamic: what STAGES chunks bring, then sums that the halves of the keys exchange
// Sync      all copies of a chunk have arrived and all warps are done with the stage before; both halves of the keys
//           have left their sums for each other. With one stage all are done with it before it is filled again
// Numerics  factors as two f16 (22 bits), three f16 products, f32 sums. S is f32; its rows are scaled by powers of two
//           before they are taken apart, as are those of V - e^G K S^T
// Defines   HEAD_DIM, a multiple of 32; TILED as in gated_delta_rule; STAGES: 1 or 2 chunks in shared memory
// SharedLimit   sm_80=166912 sm_90=232448
// Scratch   sm_80=16
// Compile   HEAD_DIM=32,64,128 TILED=0,1 STAGES=1; @sm_90 HEAD_DIM=64,128 TILED=0,1 STAGES=2
#include "common/delta_chunks.cuh"

#define SLICE 32
#define HALVES 2
#define WARPS (SLICE / 16 * HALVES)
#define THREADS (WARPS * WARP_SIZE)
#define OWN_TILES (KEY_TILES / HALVES)     // tiles of keys that a warp has
#define OWN_TOKENS (TOKEN_TILES / HALVES)  // tiles of tokens whose outputs a warp writes
#define PAIR_LD (CHUNK + 8)
#define VALUE_LD (SLICE + 4)

// What a chunk brings, in shared memory.
struct alignas(16) Stage {
    f16 keys[4][CHUNK][KEY_LD];      // K, its rest, Q, its rest
    f16 pairs[4][CHUNK][PAIR_LD];    // T, its rest, P, its rest
    float values[CHUNK][VALUE_LD];
    float gates[2][CHUNK];           // e^G, e^(G_last - G)
};

// For each row of a lane the power of two that brings a number of this size to 2^BITS, up to twice that.
template <int BITS>
DEVICE void scales_of(const float (&largest)[TILE_ROWS], float (&scale)[TILE_ROWS], float (&inverse)[TILE_ROWS]) {
#pragma unroll
    for (int slot = 0; slot < TILE_ROWS; slot++) {
        const i32 exponent = min(max(static_cast<i32>(f32_bits(tile_row_max(largest[slot])) >> 23), 1 + BITS), 253);
        scale[slot] = f32_from_bits(static_cast<u32>(254 + BITS - exponent) << 23);
        inverse[slot] = f32_from_bits(static_cast<u32>(exponent - BITS) << 23);
    }
}

DEVICE void note_largest(const FragC& c, float (&largest)[TILE_ROWS]) {
#pragma unroll
    for (int i = 0; i < TILE_C_ELEMENTS; i++) {
        largest[tile_c_slot(i)] = fmaxf(largest[tile_c_slot(i)], fabsf(c.x[i]));
    }
}

// A result as left factor: what is nearest in f16, and the rest.
struct Parts {
    FragA high, low;
};

DEVICE Parts take_apart(const FragC& c) {
    FragC rest;
#pragma unroll
    for (int i = 0; i < TILE_C_ELEMENTS; i += 2) {
        const u32 pair = h2_pack(c.x[i], c.x[i + 1]);
        rest.x[i] = c.x[i] - low_half(pair);
        rest.x[i + 1] = c.x[i + 1] - high_half(pair);
    }
    Parts parts;
    tile_c_to_a(parts.high, c);
    tile_c_to_a(parts.low, rest);
    return parts;
}

DEVICE FragC times(const FragC& c, const float (&scale)[TILE_ROWS]) {
    FragC product;
#pragma unroll
    for (int i = 0; i < TILE_C_ELEMENTS; i++) product.x[i] = c.x[i] * scale[tile_c_slot(i)];
    return product;
}

// sum += a B, B and its rest from rows of columns ("transposed")
DEVICE void add_product(FragC& sum, const Parts& a, const f16* b, const f16* rest, int ld) {
    FragB high, low;
    tile_load_b(high, b, ld);
    tile_load_b(low, rest, ld);
    tile_mma(sum, a.low, high);
    tile_mma(sum, a.high, low);
    tile_mma(sum, a.high, high);
}

DEVICE void add_product_rows(FragC& sum, const Parts& a, const f16* b, const f16* rest, int ld) {
    FragB high, low;
    tile_load_b_rows(high, b, ld);
    tile_load_b_rows(low, rest, ld);
    tile_mma(sum, a.low, high);
    tile_mma(sum, a.high, low);
    tile_mma(sum, a.high, high);
}

// ROWS rows of PIECES times 16 bytes, behind each other in global memory; distances of a thread's pieces are constants.
template <int ROWS, int PIECES, int TARGET_ROW>
DEVICE void copy_rows(void* target, const void* source) {
    constexpr int step = THREADS / PIECES;  // rows that the block copies at once
    const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES * 16;
    u8* const to = reinterpret_cast<u8*>(target) + row * TARGET_ROW + piece;
    const u8* const from = reinterpret_cast<const u8*>(source) + row * PIECES * 16 + piece;
#pragma unroll
    for (int i = 0; i < ROWS; i += step) {
        const bool own = (THREADS % PIECES == 0 || row < step) && (i + step <= ROWS || row < ROWS - i);
        if (own) async_copy16(to + i * TARGET_ROW, from + i * PIECES * 16);
    }
}

KERNEL(THREADS) gated_delta_rule_chunks(
        const float* RESTRICT qkv, float* values, u32* marks, const i32* RESTRICT positions,
        const i32* RESTRICT cu_seqlens, const i32* RESTRICT seq_ids, const i32* RESTRICT state_rows,
        const u32* RESTRICT state_epochs, i32* record, float* scratch, float* RESTRICT out, i32 num_k, i32 num_v,
        i32 row_size, i32 matrix_start, i32 num_layers, i32 index, i32 layer, i32 few, i32 slot_size) {
    GRID_DEPENDENCY();
    DYNAMIC_SHARED(Stage, stages);
    f32x4* const exchange = reinterpret_cast<f32x4*>(stages + STAGES);
    const i32 seq = blockIdx.z, head = blockIdx.y, warp = WARP_ID();
    const i32 first = cu_seqlens[seq], end = cu_seqlens[seq + 1];
    const i64 row = state_rows[seq];
    const u32 epoch = state_epochs[seq];
    if (end - first <= few) return;
    const i32 key_head = TILED ? head % num_k : head / (num_v / num_k);
    const i64 token_size = static_cast<i64>(2 * num_k + num_v) * HEAD_DIM;
    const i32 chunks = (end - first + CHUNK - 1) / CHUNK;
    float* const slots = scratch + static_cast<i64>(first / CHUNK + seq) * slot_size;
    const float* const own_values = qkv + (2 * num_k + head) * HEAD_DIM + blockIdx.x * SLICE;
    auto fetch = [&](i32 chunk) {
        float* const slot = slots + static_cast<i64>(chunk) * slot_size;
        Stage& stage = stages[chunk % STAGES];
        copy_rows<4 * CHUNK, HEAD_DIM / 8, 2 * KEY_LD>(stage.keys, keys_of(slot, key_head));
        copy_rows<4 * CHUNK, CHUNK / 8, 2 * PAIR_LD>(stage.pairs, pairs_of(slot, num_k, head));
        copy_rows<1, GATES / 4, 0>(stage.gates, gates_of(slot, num_k, num_v, head));
        constexpr int step = THREADS / (SLICE / 4);  // tokens at once
        const int own = threadIdx.x / (SLICE / 4), column = threadIdx.x % (SLICE / 4) * 4;
#pragma unroll
        for (int i = 0; i < CHUNK; i += step) {
            const i64 t = min(first + chunk * CHUNK + own + i, end - 1);  // behind the end: any number, T is 0 there
            async_copy16(&stage.values[own + i][column], own_values + t * token_size + column);
        }
        async_commit();
    };
    fetch(0);

    // This warp's part of S: rows v0 to v0 + 15 of the slice, keys from k0 on.
    const int half = warp % HALVES, v0 = warp / HALVES * 16, k0 = half * OWN_TILES * 16;
    const i64 offset = matrix_start + (static_cast<i64>(head) * HEAD_DIM + blockIdx.x * SLICE + v0) * HEAD_DIM + k0;
    FragC s[OWN_TILES];
#pragma unroll
    for (int kt = 0; kt < OWN_TILES; kt++) {
#pragma unroll
        for (int i = 0; i < TILE_C_ELEMENTS; i++) {
            s[kt].x[i] = values[row * row_size + offset + tile_c_row(i) * HEAD_DIM + kt * 16 + tile_c_col(i)];
        }
    }

    // Whose the row is shows while it is on its way; nothing is made of one that is not the sequence's own.
    const u32 position = static_cast<u32>(positions[first]);
    const StateMark mark = read_mark(marks, row, num_layers, index);
    const bool speaks = blockIdx.x == 0 && head == 0 && threadIdx.x == 0;
    if (!is_mark(mark, epoch, position)) {
        for (i32 item = threadIdx.x; item < (end - first) * SLICE; item += THREADS) {
            const i64 t = first + item / SLICE;
            out[(t * num_v + head) * HEAD_DIM + blockIdx.x * SLICE + item % SLICE] = 0;
        }
        async_wait<0>();
        if (speaks) {
            report_state(record, seq_ids[seq], layer, row, mark, epoch, position);
            write_mark(marks, row ^ 1, num_layers, index, StateMark{0, 0});
        }
        return;
    }

    for (i32 chunk = 0; chunk < chunks; chunk++) {
        const Stage& stage = stages[chunk % STAGES];
        async_wait<0>();
        BARRIER();
        if (STAGES > 1 && chunk + 1 < chunks) fetch(chunk + 1);

        // K S^T and Q S^T over the own keys
        float largest[TILE_ROWS] = {}, scale[TILE_ROWS], inverse[TILE_ROWS];
#pragma unroll
        for (int kt = 0; kt < OWN_TILES; kt++) note_largest(s[kt], largest);
        scales_of<10>(largest, scale, inverse);
        FragC kept[TOKEN_TILES], asked[TOKEN_TILES];
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            tile_zero(kept[n]);
            tile_zero(asked[n]);
        }
#pragma unroll
        for (int kt = 0; kt < OWN_TILES; kt++) {
            const Parts a = take_apart(times(s[kt], scale));
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
                const int k = k0 + kt * 16;
                add_product(kept[n], a, &stage.keys[0][n * 16][k], &stage.keys[1][n * 16][k], KEY_LD);
                add_product(asked[n], a, &stage.keys[2][n * 16][k], &stage.keys[3][n * 16][k], KEY_LD);
            }
        }
#pragma unroll
        for (int slot = 0; slot < TILE_ROWS; slot++) inverse[slot] *= 1 / SCALE;

        // The other half of the keys: of K S^T both need all, of Q S^T each the tokens whose outputs it writes.
        constexpr int fours = TILE_C_ELEMENTS / 4;
        f32x4* const given = exchange + warp * (TOKEN_TILES + OWN_TOKENS) * fours * WARP_SIZE + LANE();
        const f32x4* const taken = exchange + (warp ^ 1) * (TOKEN_TILES + OWN_TOKENS) * fours * WARP_SIZE + LANE();
        FragC result[OWN_TOKENS];
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            kept[n] = times(kept[n], inverse);
            asked[n] = times(asked[n], inverse);
#pragma unroll
            for (int i = 0; i < fours; i++) {
                const float* const x = kept[n].x + 4 * i;
                store16(given + (n * fours + i) * WARP_SIZE, f32x4{x[0], x[1], x[2], x[3]});
            }
        }
#pragma unroll
        for (int n = 0; n < OWN_TOKENS; n++) {
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                const float even = asked[HALVES * n].x[i], odd = asked[HALVES * n + 1].x[i];
                result[n].x[i] = half ? odd : even;
                asked[n].x[i] = half ? even : odd;
            }
#pragma unroll
            for (int i = 0; i < fours; i++) {
                const float* const x = asked[n].x + 4 * i;
                store16(given + ((TOKEN_TILES + n) * fours + i) * WARP_SIZE, f32x4{x[0], x[1], x[2], x[3]});
            }
        }
        BARRIER();

        // V - e^G K S^T, in place of K S^T
#pragma unroll
        for (int slot = 0; slot < TILE_ROWS; slot++) largest[slot] = 0;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i += 4) {
                const f32x4 four = load16<f32x4>(taken + (n * fours + i / 4) * WARP_SIZE);
                const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int t = n * 16 + tile_c_col(i + j);
                    const float v = stage.values[t][v0 + tile_c_row(i + j)];
                    kept[n].x[i + j] = v - stage.gates[0][t] * (kept[n].x[i + j] + others[j]);
                }
            }
            note_largest(kept[n], largest);
        }
#pragma unroll
        for (int n = 0; n < OWN_TOKENS; n++) {
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i += 4) {
                const f32x4 four = load16<f32x4>(taken + ((TOKEN_TILES + n) * fours + i / 4) * WARP_SIZE);
                const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; j++) result[n].x[i + j] += others[j];
            }
        }

        // N = T (V - e^G K S^T): entries of T are at most 1, so that sums over CHUNK of them stay in range
        scales_of<9>(largest, scale, inverse);
        Parts known[TOKEN_TILES];
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) known[n] = take_apart(times(kept[n], scale));
        Parts fresh[TOKEN_TILES], lasting[TOKEN_TILES];  // N, and as much of it as is left at the chunk's end
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            FragC sum;
            tile_zero(sum);
#pragma unroll
            for (int j = 0; j <= n; j++) {
                add_product(sum, known[j], &stage.pairs[0][n * 16][j * 16], &stage.pairs[1][n * 16][j * 16], PAIR_LD);
            }
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i++) sum.x[i] *= 1 / SCALE;
            fresh[n] = take_apart(sum);
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i++) sum.x[i] *= stage.gates[1][n * 16 + tile_c_col(i)];
            lasting[n] = take_apart(sum);
        }
#pragma unroll
        for (int slot = 0; slot < TILE_ROWS; slot++) inverse[slot] *= 1 / SCALE;

        // S = e^G_last S + N^T (e^(G_last - G) K)
        const float left = stage.gates[0][CHUNK - 1];
#pragma unroll
        for (int kt = 0; kt < OWN_TILES; kt++) {
            FragC sum;
            tile_zero(sum);
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; j++) {
                const int k = k0 + kt * 16;
                add_product_rows(sum, lasting[j], &stage.keys[0][j * 16][k], &stage.keys[1][j * 16][k], KEY_LD);
            }
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                s[kt].x[i] = s[kt].x[i] * left + sum.x[i] * inverse[tile_c_slot(i)];
            }
            tile_settle(s[kt]);
        }

        // out = e^G Q S^T / sqrt(HEAD_DIM) + P N
#pragma unroll
        for (int n = 0; n < OWN_TOKENS; n++) {
            const int t0 = (HALVES * n + half) * 16;
            FragC sum;
            tile_zero(sum);
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; j++) {
                if (j > HALVES * n + half) continue;
                add_product(sum, fresh[j], &stage.pairs[2][t0][j * 16], &stage.pairs[3][t0][j * 16], PAIR_LD);
            }
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                const i32 t = t0 + tile_c_col(i);
                const i64 token = first + chunk * CHUNK + t;
                const float before = stage.gates[0][t] * rsqrt_f(static_cast<float>(HEAD_DIM)) * result[n].x[i];
                if (token < end) {
                    out[(token * num_v + head) * HEAD_DIM + blockIdx.x * SLICE + v0 + tile_c_row(i)] =
                        before + sum.x[i] * inverse[tile_c_slot(i)];
                }
            }
        }
        if (STAGES == 1) {
            BARRIER();
            if (chunk + 1 < chunks) fetch(chunk + 1);
        }
    }

    float* const target = values + (row ^ 1) * row_size + offset;
#pragma unroll
    for (int kt = 0; kt < OWN_TILES; kt++) {
#pragma unroll
        for (int i = 0; i < TILE_C_ELEMENTS; i++) {
            target[tile_c_row(i) * HEAD_DIM + kt * 16 + tile_c_col(i)] = s[kt].x[i];
        }
    }
    if (speaks) {
        write_mark(marks, row ^ 1, num_layers, index,
                   StateMark{epoch, position + static_cast<u32>(end - first)});
    }
}
