// weighted_sum: out[t,d] = sum_j weights[t,j] x[t,j,d], or added to out
//
// Shapes    x [T,num_used,size] f32 or f16; weights [T,num_used] f32; out [T,size] f32
// Launch    grid (ceil(size / 256), T), block (256): one element per thread
// Numerics  f32, in the order of j
// Defines   X_F16; ADD: to what is in out
// Compile   X_F16=0,1 ADD=0,1
#include "common/platform.cuh"

#if X_F16
typedef f16 x_t;
DEVICE float value_of(f16 x) { return to_f32(x); }
#else
typedef float x_t;
DEVICE float value_of(float x) { return x; }
#endif

KERNEL(256) weighted_sum(const x_t* RESTRICT x, const float* RESTRICT weights, float* RESTRICT out, i32 num_used,
                         i32 size) {
    GRID_DEPENDENCY();
    const i32 d = blockIdx.x * 256 + threadIdx.x;
    const i64 t = blockIdx.y;
    if (d >= size) return;
    float sum = 0;
    for (i32 j = 0; j < num_used; j++) {
        sum += weights[t * num_used + j] * value_of(x[(t * num_used + j) * size + d]);
    }
    out[t * size + d] = ADD ? out[t * size + d] + sum : sum;
}
