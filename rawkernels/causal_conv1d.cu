// causal_conv1d: out[t,c] = silu(sum_j w[c,j] x[t-TAPS+1+j,c]) within each sequence, its window before its first token
//
// Shapes    x [T,x_row] f32, of which channels columns from x_start on; w [channels,TAPS] f32; out [T,channels] f32
//           values [rows,row_size] f32: from window_start on a row's window [TAPS-1,channels]; marks [rows,layers,2] u32
//           positions, token_seq [T] i32; cu_seqlens [S+1] i32; state_rows [S] i32; state_epochs [S] u32
// Launch    grid (ceil(channels / 256), T), block (256): one channel of one token per thread
// Sync      none: a sequence's last token writes the window of the slot's other row, which nobody reads in this launch
// Numerics  f32
// Defines   TAPS
// Compile   TAPS=1,4
#include "common/state.cuh"

KERNEL(256) causal_conv1d(const float* RESTRICT x, const float* RESTRICT w, float* values, const u32* RESTRICT marks,
                          const i32* RESTRICT positions, const i32* RESTRICT token_seq,
                          const i32* RESTRICT cu_seqlens, const i32* RESTRICT state_rows,
                          const u32* RESTRICT state_epochs, float* RESTRICT out, i32 x_start, i32 x_row, i32 channels,
                          i32 row_size, i32 window_start, i32 num_layers, i32 index) {
    GRID_DEPENDENCY();
    const i32 c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const i32 t = blockIdx.y;
    const i32 seq = token_seq[t];
    const i32 first = cu_seqlens[seq], end = cu_seqlens[seq + 1];
    const bool inside = first <= t && t < end;
    const i64 row = state_rows[seq];
    float result = 0;
    if (inside && is_mark(read_mark(marks, row, num_layers, index), state_epochs[seq],
                          static_cast<u32>(positions[first]))) {
        const float* const before = values + row * row_size + window_start + c;
        const float* const inputs = x + x_start + c;
        // Input i of the sequence, counted from the window's first.
        auto input = [&](i32 i) {
            return i < TAPS - 1 ? before[static_cast<i64>(i) * channels]
                                : inputs[static_cast<i64>(first + i - (TAPS - 1)) * x_row];
        };
        const i32 own = t - first;
        float sum = 0;
#pragma unroll
        for (i32 j = 0; j < TAPS; j++) sum += w[static_cast<i64>(c) * TAPS + j] * input(own + j);
        result = sum / (1 + expf(-sum));
        if (t + 1 == end) {
            float* const after = values + (row ^ 1) * row_size + window_start + c;
#pragma unroll
            for (i32 j = 0; j < TAPS - 1; j++) after[static_cast<i64>(j) * channels] = input(own + 1 + j);
        }
    }
    out[static_cast<i64>(t) * channels + c] = result;
}
