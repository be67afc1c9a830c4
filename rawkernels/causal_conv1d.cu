// causal_conv1d: out[t,c] = silu(sum_j w[c,j] x[t-TAPS+1+j,c]) within each sequence, its window before its first token;
//                then, with HEAD, each head among the first norm_channels times rsqrt(sum of its squares + eps)
//
// Shapes    x [T,x_row] f32, of which channels columns from x_start on; w [channels,TAPS] f32; out [T,channels] f32
//           values [rows,row_size] f32: from window_start on a row's window [TAPS-1,channels]; marks [rows,layers,2] u32
//           positions, token_seq [T] i32; cu_seqlens [S+1] i32; state_rows [S] i32; state_epochs [S] u32
//           VEC divides channels, x_start, x_row, row_size and window_start
// Launch    grid (ceil(channels / (THREADS VEC)), ceil(T / TOKENS)), block (THREADS): VEC channels of TOKENS tokens per thread
// Sync      none: a sequence's last token writes the window of the slot's other row, which nobody reads in this launch.
//           HEAD / VEC neighbouring lanes add up a head
// Numerics  f32
// Defines   TAPS; VEC: 1 or 4; TOKENS; THREADS; ONE_SEQ: all tokens are of sequence 0
//           HEAD: elements of a head, VEC times a power of 2 up to 32; 0: no norm
// Compile   TAPS=1,4 VEC=1 TOKENS=1,8 THREADS=128 ONE_SEQ=0 HEAD=0; TAPS=4 VEC=4 TOKENS=1,8 THREADS=64 ONE_SEQ=0,1 HEAD=0,128;
//           TAPS=4 VEC=4 TOKENS=8 THREADS=128 ONE_SEQ=0 HEAD=32,64
#include "common/state.cuh"
#include "common/values.cuh"

// VEC channels of one token.
struct Channels {
    float x[VEC];
};

KERNEL(THREADS) causal_conv1d(const float* RESTRICT x, const float* RESTRICT w, float* values,
                              const u32* RESTRICT marks, const i32* RESTRICT positions,
                              const i32* RESTRICT token_seq, const i32* RESTRICT cu_seqlens,
                              const i32* RESTRICT state_rows, const u32* RESTRICT state_epochs, float* RESTRICT out,
                              float eps, i32 x_start, i32 x_row, i32 channels, i32 norm_channels, i32 num_tokens,
                              i32 row_size, i32 window_start, i32 num_layers, i32 index) {
    const i32 c = (blockIdx.x * THREADS + threadIdx.x) * VEC;
    const bool active = c < channels;  // the others only take part in sums
    const i32 own = active ? c : 0;
    float taps[VEC * TAPS];
#pragma unroll
    for (int v = 0; v < VEC * TAPS; v++) taps[v] = w[own * TAPS + v];
    GRID_DEPENDENCY();
    const i32 t0 = blockIdx.y * TOKENS, left = num_tokens - t0;
    const float* const inputs = x + x_start + own;
    Channels rows[TOKENS];
#pragma unroll
    for (int j = 0; j < TOKENS; j++) {
        if (j < left) load_values(inputs + static_cast<i64>(t0 + j) * x_row, rows[j].x);
    }
    Channels past[TAPS];  // the TAPS - 1 tokens before this one, and this one
    i32 seq = -1, end = 0;
    i64 row = 0;
    bool known = false;
#pragma unroll
    for (int j = 0; j < TOKENS; j++) {
        if (j >= left) break;
        const i32 t = t0 + j;
        const i32 next = ONE_SEQ ? 0 : token_seq[t];
        if (next != seq) {  // also at the first
            seq = next;
            row = state_rows[seq];
            end = cu_seqlens[seq + 1];
            const u32 epoch = state_epochs[seq];
            const i32 first = cu_seqlens[seq];
            known = first <= t && t < end;
            if (known) {
                const float* const window = values + row * row_size + window_start + own;
#pragma unroll
                for (int i = 0; i < TAPS - 1; i++) {
                    const i32 place = t - first + i;  // counted from the window's first
                    load_values(place < TAPS - 1 ? window + static_cast<i64>(place) * channels
                                                 : inputs + static_cast<i64>(first + place - (TAPS - 1)) * x_row,
                                past[i].x);
                }
                known = is_mark(read_mark(marks, row, num_layers, index), epoch, static_cast<u32>(positions[first]));
            }
        }
        past[TAPS - 1] = rows[j];
        Channels result;
        float squares = 0;
#pragma unroll
        for (int v = 0; v < VEC; v++) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < TAPS; i++) sum += taps[v * TAPS + i] * past[i].x[v];
            result.x[v] = known && t < end ? sum / (1 + expf(-sum)) : 0;
            squares += result.x[v] * result.x[v];
        }
#if HEAD
        if (blockIdx.x * THREADS * VEC < norm_channels) {  // the whole block
#pragma unroll
            for (int mask = HEAD / VEC / 2; mask > 0; mask /= 2) squares += shfl_xor(squares, mask);
            const float factor = c < norm_channels ? rsqrt_f(squares + eps) : 1;
#pragma unroll
            for (int v = 0; v < VEC; v++) result.x[v] *= factor;
        }
#endif
        if (active) store_values(out + static_cast<i64>(t) * channels + c, result.x);
        if (active && known && t + 1 == end) {
            float* const after = values + (row ^ 1) * row_size + window_start + c;
#pragma unroll
            for (int i = 0; i < TAPS - 1; i++) store_values(after + static_cast<i64>(i) * channels, past[i + 1].x);
        }
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) past[i] = past[i + 1];
    }
}
