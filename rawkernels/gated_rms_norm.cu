// gated_rms_norm: out = x * rsqrt(mean x^2 + eps) * w * silu(gate), with the mean over each head
//
// Shapes    x, out [T,num_heads,head_dim] f32, out f16 with OUT_F16; w [head_dim] f32; out may be x
//           gate [T,gate_row] f32, of which as many columns from gate_start on
//           VEC divides head_dim, gate_start and gate_row
// Launch    grid (ceil(T * num_heads / warps)), block (256): one warp per head
// Numerics  f32; f16 saturates
// Defines   OUT_F16; VEC: 1 or 4
// Compile   OUT_F16=0,1 VEC=1,4
#include "common/values.cuh"

#if OUT_F16
typedef f16 out_t;
#else
typedef float out_t;
#endif

KERNEL(256) gated_rms_norm(const float* x, const float* RESTRICT w, const float* RESTRICT gate, out_t* out, float eps,
                           i32 count, i32 num_heads, i32 head_dim, i32 gate_start, i32 gate_row) {
    GRID_DEPENDENCY();
    const i32 item = blockIdx.x * (256 / WARP_SIZE) + WARP_ID();
    if (item >= count) return;  // whole warps
    const i64 start = static_cast<i64>(item) * head_dim;
    const float* const gates =
        gate + static_cast<i64>(item / num_heads) * gate_row + gate_start + (item % num_heads) * head_dim;
    const i32 first = LANE() * VEC;
    float own[VEC], open[VEC], weight[VEC];  // of the first piece, all on their way at once
    if (first < head_dim) {
        load_values(x + start + first, own);
        load_values(gates + first, open);
        load_values(w + first, weight);
    }
    float sum = 0;
    for (i32 i = first; i < head_dim; i += WARP_SIZE * VEC) {
        float values[VEC];
        if (i > first) load_values(x + start + i, values);
#pragma unroll
        for (int v = 0; v < VEC; v++) {
            const float value = i > first ? values[v] : own[v];
            sum += value * value;
        }
    }
    const float factor = rsqrt_f(warp_sum(sum) / static_cast<float>(head_dim) + eps);
    for (i32 i = first; i < head_dim; i += WARP_SIZE * VEC) {
        if (i > first) {
            load_values(x + start + i, own);
            load_values(gates + i, open);
            load_values(w + i, weight);
        }
#pragma unroll
        for (int v = 0; v < VEC; v++) own[v] = own[v] * factor * weight[v] * (open[v] / (1 + expf(-open[v])));
        store_values(out + start + i, own);
    }
}
