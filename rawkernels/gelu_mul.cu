// gelu_mul: out[i] = 0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) * up[i], g = gate[i]; out may be gate or up
//
// Shapes    [n] f32
// Launch    grid (ceil(n / 256)), block (256)
#include "common/platform.cuh"

#define SQRT_2_OVER_PI 0.7978845608028654f
#define CUBIC 0.044715f

KERNEL(256) gelu_mul(const float* gate, const float* up, float* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = gate[i];
    const float inner = SQRT_2_OVER_PI * (g + CUBIC * g * g * g);
    out[i] = 0.5f * g * (1.0f + tanhf(inner)) * up[i];
}
