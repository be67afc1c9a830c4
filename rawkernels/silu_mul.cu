// silu_mul: out[i] = gate[i] * sigmoid(gate[i]) * up[i]; out may be gate or up
//
// Shapes    [n] f32
// Launch    grid (ceil(n / 256)), block (256)
#include "common/platform.cuh"

KERNEL(256) silu_mul(const float* gate, const float* up, float* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = gate[i];
    out[i] = g / (1.0f + expf(-g)) * up[i];
}
