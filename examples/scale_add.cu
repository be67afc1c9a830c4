// scale_add: out[i] = scale * x[i] + y[i]
//
// Shapes    x, y, out [n] f32
// Launch    grid (ceil(n / 256)), block (256): one thread per element
// Numerics  one rounding
#include "common/platform.cuh"

KERNEL(256) scale_add(const float* RESTRICT x, const float* RESTRICT y, float* RESTRICT out, float scale, i32 n) {
    const i32 i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) out[i] = fmaf(scale, x[i], y[i]);
}
