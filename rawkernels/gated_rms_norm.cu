// gated_rms_norm: out = x * rsqrt(mean x^2 + eps) * w * silu(gate), with the mean over each head
//
// Shapes    x, out [T,num_heads,head_dim] f32, out f16 with OUT_F16; w [head_dim] f32; out may be x
//           gate [T,gate_row] f32, of which as many columns from gate_start on
// Launch    grid (ceil(T * num_heads / warps)), block (256): one warp per head
// Numerics  f32; f16 saturates
// Defines   OUT_F16
// Compile   OUT_F16=0,1
#include "common/platform.cuh"

#if OUT_F16
typedef f16 out_t;
DEVICE f16 stored(float value) { return to_f16_saturated(value); }
#else
typedef float out_t;
DEVICE float stored(float value) { return value; }
#endif

KERNEL(256) gated_rms_norm(const float* x, const float* RESTRICT w, const float* RESTRICT gate, out_t* out, float eps,
                           i32 count, i32 num_heads, i32 head_dim, i32 gate_start, i32 gate_row) {
    GRID_DEPENDENCY();
    const i32 item = blockIdx.x * (256 / WARP_SIZE) + WARP_ID();
    if (item >= count) return;  // whole warps
    const i64 start = static_cast<i64>(item) * head_dim;
    const float* const gates =
        gate + static_cast<i64>(item / num_heads) * gate_row + gate_start + (item % num_heads) * head_dim;
    float sum = 0;
    for (i32 i = LANE(); i < head_dim; i += WARP_SIZE) sum += x[start + i] * x[start + i];
    const float factor = rsqrt_f(warp_sum(sum) / static_cast<float>(head_dim) + eps);
    for (i32 i = LANE(); i < head_dim; i += WARP_SIZE) {
        const float g = gates[i];
        out[start + i] = stored(x[start + i] * factor * w[i] * (g / (1 + expf(-g))));
    }
}
