// softcap: out[i] = cap * tanh(x[i] / cap); out may be x
//
// Shapes    [n] f32
// Launch    grid (ceil(n / 256)), block (256)
#include "common/platform.cuh"

KERNEL(256) softcap(const float* x, float* out, float cap, i64 n) {
    GRID_DEPENDENCY();
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = cap * tanhf(x[i] / cap);
}
