// sigmoid_mul: out[i] = x[i] / (1 + exp(-gate[i])); out may be x
//
// Shapes    gate [n] f32; x, out [n] f32, f16 with X_F16
// Launch    grid (ceil(n / 256)), block (256)
// Numerics  f32, one rounding
// Defines   X_F16
// Compile   X_F16=0,1
#include "common/platform.cuh"

#if X_F16
typedef f16 x_t;
DEVICE float value_of(f16 x) { return to_f32(x); }
DEVICE f16 stored(float value) { return to_f16(value); }
#else
typedef float x_t;
DEVICE float value_of(float x) { return x; }
DEVICE float stored(float value) { return value; }
#endif

KERNEL(256) sigmoid_mul(const float* RESTRICT gate, const x_t* x, x_t* out, i64 n) {
    GRID_DEPENDENCY();
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = stored(value_of(x[i]) / (1 + expf(-gate[i])));
}
