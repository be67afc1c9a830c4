// gated_delta_rule: for each value head with its matrix S, token by token
//                   S *= exp(decay softplus(alpha + dt));  S += sigmoid(beta) (v - S k) k^T;  out = S q / sqrt(HEAD_DIM)
//                   in sequences of up to `most` tokens; gated_delta_rule_chunks does the others
//
// Shapes    qkv [T, 2 num_k + num_v, HEAD_DIM] f32: queries, keys, values; out [T,num_v,HEAD_DIM] f32
//           beta [T,beta_row], alpha [T,alpha_row] f32, of which num_v columns from beta_start, alpha_start on
//           decay, dt_bias [num_v] f32
//           values [rows,row_size] f32: from matrix_start on a row's matrices [num_v, HEAD_DIM of v, HEAD_DIM of k]
//           marks [rows,layers,2] u32; positions [T], cu_seqlens [S+1], seq_ids, state_rows [S] i32
//           state_epochs [S] u32
// Launch    grid (HEAD_DIM / ROWS_OF_BLOCK, num_v, S), block (THREADS_OF_ROW * ROWS_OF_BLOCK): so many threads have a row of
//           S in registers
// Shared    gates of a few tokens, static
// Sync      a thread each computes the gates of a few tokens; barrier. Else none: rows of S do not depend on each other.
//           Marks of a slot's other row are read by nobody
// Numerics  f32
// Defines   HEAD_DIM, a multiple of 32; TILED: value head h uses key head h % num_k, else h / (num_v / num_k)
//           THREADS_OF_ROW, a power of 2 up to HEAD_DIM / 4; ROWS_OF_BLOCK; ONE: token s is sequence s's only one
// Compile   HEAD_DIM=32,64,128 TILED=0,1 THREADS_OF_ROW=8 ROWS_OF_BLOCK=16 ONE=0;
//           HEAD_DIM=64,128 TILED=0,1 THREADS_OF_ROW=16 ROWS_OF_BLOCK=8 ONE=1;
//           HEAD_DIM=32 TILED=0,1 THREADS_OF_ROW=8 ROWS_OF_BLOCK=8 ONE=1
#include "common/delta.cuh"

#define FOURS (HEAD_DIM / (4 * THREADS_OF_ROW))  // groups of four neighbouring keys that a thread has
#define ENTRIES (4 * FOURS)
#define GATED 32  // tokens whose gates are computed at once

// What one token brings for one row of S.
struct Token {
    float q[ENTRIES], k[ENTRIES];
    float v;
};

DEVICE void load_fours(const float* RESTRICT source, int part, float (&values)[ENTRIES]) {
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
        const f32x4 four = load16<f32x4>(source + 4 * (j * THREADS_OF_ROW + part));
        values[4 * j] = four.x, values[4 * j + 1] = four.y, values[4 * j + 2] = four.z, values[4 * j + 3] = four.w;
    }
}

DEVICE float sum_of_row(const float (&parts)[4]) {
    float value = (parts[0] + parts[1]) + (parts[2] + parts[3]);
#pragma unroll
    for (int mask = THREADS_OF_ROW / 2; mask > 0; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

KERNEL(THREADS_OF_ROW * ROWS_OF_BLOCK) gated_delta_rule(
        const float* RESTRICT qkv, const float* RESTRICT beta, const float* RESTRICT alpha,
        const float* RESTRICT decay, const float* RESTRICT dt_bias, float* values, u32* marks,
        const i32* RESTRICT positions, const i32* RESTRICT cu_seqlens, const i32* RESTRICT seq_ids,
        const i32* RESTRICT state_rows, const u32* RESTRICT state_epochs, i32* record, float* RESTRICT out,
        i32 beta_start, i32 beta_row, i32 alpha_start, i32 alpha_row, i32 num_k, i32 num_v, i32 row_size,
        i32 matrix_start, i32 num_layers, i32 index, i32 layer, i32 most) {
    const i32 seq = blockIdx.z, head = blockIdx.y;
    const float own_decay = decay[head], own_dt = dt_bias[head];
    GRID_DEPENDENCY();
    const i64 row = state_rows[seq];
    const u32 epoch = state_epochs[seq];
    const i32 begin = cu_seqlens[seq], stop = cu_seqlens[seq + 1];
    // With ONE nothing waits for these two; in a ubatch that was emptied they are equal, and then nothing is written.
    const i32 first = ONE ? seq : begin, end = ONE ? seq + 1 : stop;
    if (!ONE && (first >= end || end - first > most)) return;
    const i32 part = threadIdx.x % THREADS_OF_ROW;
    const i32 i = blockIdx.x * ROWS_OF_BLOCK + threadIdx.x / THREADS_OF_ROW;  // row of S
    const i32 key_head = TILED ? head % num_k : head / (num_v / num_k);
    const i64 token_size = static_cast<i64>(2 * num_k + num_v) * HEAD_DIM;
    auto load = [&](i32 t, Token& token) {
        const float* const heads = qkv + t * token_size;
        load_fours(heads + key_head * HEAD_DIM, part, token.q);
        load_fours(heads + (num_k + key_head) * HEAD_DIM, part, token.k);
        token.v = heads[(2 * num_k + head) * HEAD_DIM + i];
    };
    Token next;
    load(first, next);
    auto gate = [&](i32 t, float& factor, float& rate) {
        const float step = alpha[static_cast<i64>(t) * alpha_row + alpha_start + head] + own_dt;
        rate = beta[static_cast<i64>(t) * beta_row + beta_start + head];
        factor = state_decay(own_decay, step);
        rate = write_rate(rate);
    };
    const i64 offset = matrix_start + (static_cast<i64>(head) * HEAD_DIM + i) * HEAD_DIM;
    float s[ENTRIES];
    load_fours(values + row * row_size + offset, part, s);
    // Whose the row is shows while it is on its way; what is not the sequence's own never leaves the registers.
    const u32 position = static_cast<u32>(positions[first]);
    const StateMark mark = read_mark(marks, row, num_layers, index);
    const bool own = is_mark(mark, epoch, position);

    auto work = [&](i32 t, const Token& token, float factor, float rate) {
        // S k and S q of the old S side by side: S' q = factor S q + change (k q), one exchange instead of two.
        float kept[4] = {}, asked[4] = {}, common[4] = {};
#pragma unroll
        for (int j = 0; j < ENTRIES; j++) {
            kept[j % 4] += s[j] * token.k[j];
            asked[j % 4] += s[j] * token.q[j];
            common[j % 4] += token.k[j] * token.q[j];
        }
        const float change = (token.v - factor * sum_of_row(kept)) * rate;
        const float result = factor * sum_of_row(asked) + change * sum_of_row(common);
#pragma unroll
        for (int j = 0; j < ENTRIES; j++) s[j] = factor * s[j] + change * token.k[j];
        if (ONE && begin >= stop) return;
        if (part == 0) {
            out[(static_cast<i64>(t) * num_v + head) * HEAD_DIM + i] =
                own ? result * rsqrt_f(static_cast<float>(HEAD_DIM)) : 0;
        }
    };
#if ONE
    float factor, rate;
    gate(seq, factor, rate);
    work(seq, next, factor, rate);
#else
    SHARED float factors[GATED], rates[GATED];
    for (i32 start = first; start < end; start += GATED) {
        const i32 count = min(end - start, GATED);
        if (start > first) BARRIER();
        for (i32 t = threadIdx.x; t < count; t += THREADS_OF_ROW * ROWS_OF_BLOCK) {
            gate(start + t, factors[t], rates[t]);
        }
        BARRIER();
        for (i32 t = 0; t < count; t++) {
            const Token token = next;
            if (start + t + 1 < end) load(start + t + 1, next);  // on its way while this one is worked on
            work(start + t, token, factors[t], rates[t]);
        }
    }
#endif
    if (ONE && begin >= stop) return;
    if (own) {
        float* const target = values + (row ^ 1) * row_size + offset;
#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            const f32x4 four = {s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]};
            store16(target + 4 * (j * THREADS_OF_ROW + part), four);
        }
    }
    if (blockIdx.x == 0 && head == 0 && threadIdx.x == 0) {
        const StateMark reached = {epoch, position + static_cast<u32>(end - first)};
        if (!own) report_state(record, seq_ids[seq], layer, row, mark, epoch, position);
        write_mark(marks, row ^ 1, num_layers, index, own ? reached : StateMark{0, 0});
    }
}
