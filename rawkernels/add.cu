// add: out[i] = x[i] + y[i % period]; out may be x or y
//
// Shapes    x, out [n] f32; y [period] f32: period = n adds element by element, a row's length adds one bias to all rows
// Launch    grid (ceil(n / 256)), block (256)
#include "common/platform.cuh"

KERNEL(256) add(const float* x, const float* y, float* out, i64 n, i64 period) {
    GRID_DEPENDENCY();
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i % period];
}
