// gated_delta_rule: for each value head with its matrix S, token by token
//                   S *= exp(decay softplus(alpha + dt));  S += sigmoid(beta) (v - S k) k^T;  out = S q / sqrt(HEAD_DIM)
//
// Shapes    qkv [T, 2 num_k + num_v, HEAD_DIM] f32: queries, keys, values; out [T,num_v,HEAD_DIM] f32
//           beta [T,beta_row], alpha [T,alpha_row] f32, of which num_v columns from beta_start, alpha_start on
//           decay, dt_bias [num_v] f32
//           values [rows,row_size] f32: from matrix_start on a row's matrices [num_v, HEAD_DIM of v, HEAD_DIM of k]
//           marks [rows,layers,2] u32; positions [T], cu_seqlens [S+1], seq_ids, state_rows [S] i32; state_epochs [S] u32
// Launch    grid (HEAD_DIM / 16, num_v, S), block (128): 8 threads per row of S, which they keep in registers
// Sync      none between warps: rows of S do not depend on each other. Marks of a slot's other row are read by nobody
// Numerics  f32
// Defines   HEAD_DIM, a multiple of 32; TILED: value head h uses key head h % num_k, else h / (num_v / num_k)
// Compile   HEAD_DIM=32,64,128 TILED=0,1
#include "common/faults.cuh"
#include "common/state.cuh"

#define THREADS_OF_ROW 8
#define FOURS (HEAD_DIM / (4 * THREADS_OF_ROW))  // groups of four neighbouring keys that a thread has
#define ENTRIES (4 * FOURS)

// What one token brings for one row of S.
struct Token {
    float q[ENTRIES], k[ENTRIES];
    float v, beta, alpha;
};

DEVICE void load_fours(const float* RESTRICT source, int part, float (&values)[ENTRIES]) {
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
        const f32x4 four = load16<f32x4>(source + 4 * (j * THREADS_OF_ROW + part));
        values[4 * j] = four.x, values[4 * j + 1] = four.y, values[4 * j + 2] = four.z, values[4 * j + 3] = four.w;
    }
}

DEVICE float sum_of_row(float value) {
#pragma unroll
    for (int mask = THREADS_OF_ROW / 2; mask > 0; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

// ln(1 + e^x), also where e^x is far below 1
DEVICE float softplus(float x) {
    if (x > 20) return x;
    const float e = expf(x), u = 1 + e;
    return u == 1 ? e : logf(u) * (e / (u - 1));
}

KERNEL(128) gated_delta_rule(const float* RESTRICT qkv, const float* RESTRICT beta, const float* RESTRICT alpha,
                             const float* RESTRICT decay, const float* RESTRICT dt_bias, float* values, u32* marks,
                             const i32* RESTRICT positions, const i32* RESTRICT cu_seqlens,
                             const i32* RESTRICT seq_ids, const i32* RESTRICT state_rows,
                             const u32* RESTRICT state_epochs, i32* record, float* RESTRICT out, i32 beta_start,
                             i32 beta_row, i32 alpha_start, i32 alpha_row, i32 num_k, i32 num_v, i32 row_size,
                             i32 matrix_start, i32 num_layers, i32 index, i32 layer) {
    GRID_DEPENDENCY();
    const i32 seq = blockIdx.z, head = blockIdx.y;
    const i32 first = cu_seqlens[seq], end = cu_seqlens[seq + 1];
    if (first >= end) return;
    const i32 part = threadIdx.x % THREADS_OF_ROW;
    const i32 i = blockIdx.x * (blockDim.x / THREADS_OF_ROW) + threadIdx.x / THREADS_OF_ROW;  // row of S
    const bool speaks = blockIdx.x == 0 && head == 0 && threadIdx.x == 0;
    const i64 row = state_rows[seq];
    const u32 epoch = state_epochs[seq], position = static_cast<u32>(positions[first]);
    const StateMark mark = read_mark(marks, row, num_layers, index);
    if (!is_mark(mark, epoch, position)) {
        for (i32 t = first; t < end; t++) {
            if (part == 0) out[(static_cast<i64>(t) * num_v + head) * HEAD_DIM + i] = 0;
        }
        if (speaks) {
            const bool other = mark.epoch != epoch || epoch == 0;
            report_fault(record, KIND_STATE, seq_ids[seq], layer, -1, static_cast<i32>(row),
                         static_cast<i32>(position), (other ? epoch : position) & 0x7FFFFFFF,
                         (other ? mark.epoch : mark.position) & 0x7FFFFFFF);
            write_mark(marks, row ^ 1, num_layers, index, StateMark{0, 0});
        }
        return;
    }
    const i64 offset = matrix_start + (static_cast<i64>(head) * HEAD_DIM + i) * HEAD_DIM;
    float s[ENTRIES];
    load_fours(values + row * row_size + offset, part, s);

    const i32 key_head = TILED ? head % num_k : head / (num_v / num_k);
    const i64 token_size = static_cast<i64>(2 * num_k + num_v) * HEAD_DIM;
    const float own_decay = decay[head], own_dt = dt_bias[head];
    auto load = [&](i32 t, Token& token) {
        const float* const heads = qkv + t * token_size;
        load_fours(heads + key_head * HEAD_DIM, part, token.q);
        load_fours(heads + (num_k + key_head) * HEAD_DIM, part, token.k);
        token.v = heads[(2 * num_k + head) * HEAD_DIM + i];
        token.beta = beta[static_cast<i64>(t) * beta_row + beta_start + head];
        token.alpha = alpha[static_cast<i64>(t) * alpha_row + alpha_start + head];
    };
    Token next;
    load(first, next);
    for (i32 t = first; t < end; t++) {
        const Token token = next;
        if (t + 1 < end) load(t + 1, next);  // on its way while this one is worked on
        const float factor = expf(own_decay * softplus(token.alpha + own_dt));
        float kept = 0;
#pragma unroll
        for (int j = 0; j < ENTRIES; j++) {
            s[j] *= factor;
            kept += s[j] * token.k[j];
        }
        const float change = (token.v - sum_of_row(kept)) / (1 + expf(-token.beta));
        float result = 0;
#pragma unroll
        for (int j = 0; j < ENTRIES; j++) {
            s[j] += change * token.k[j];
            result += s[j] * token.q[j];
        }
        result = sum_of_row(result) * rsqrt_f(static_cast<float>(HEAD_DIM));
        if (part == 0) out[(static_cast<i64>(t) * num_v + head) * HEAD_DIM + i] = result;
    }
    float* const target = values + (row ^ 1) * row_size + offset;
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
        const f32x4 four = {s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]};
        store16(target + 4 * (j * THREADS_OF_ROW + part), four);
    }
    if (speaks) {
        write_mark(marks, row ^ 1, num_layers, index, StateMark{epoch, position + static_cast<u32>(end - first)});
    }
}
