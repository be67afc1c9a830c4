// sigmoid_mul: out[i] = x[i] / (1 + exp(-gate[i])); out may be x
//
// Shapes    gate [n] f32; x, out [n] f32, f16 with X_F16; VEC divides n
// Launch    grid (ceil(n / (256 VEC))), block (256)
// Numerics  f32, one rounding
// Defines   X_F16; VEC: 1 or 8
// Compile   X_F16=0,1 VEC=1,8
#include "common/values.cuh"

#if X_F16
typedef f16 x_t;
#else
typedef float x_t;
#endif

KERNEL(256) sigmoid_mul(const float* RESTRICT gate, const x_t* x, x_t* out, i64 n) {
    GRID_DEPENDENCY();
    const i64 i = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    float gates[VEC], result[VEC];
    load_values(gate + i, gates);
    load_values(x + i, result);
#pragma unroll
    for (int v = 0; v < VEC; v++) result[v] /= 1 + expf(-gates[v]);
    store_values(out + i, result);
}
