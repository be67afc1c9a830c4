// gated_add: out[t] += x[t] / (1 + exp(-h[t] . w))
//
// Shapes    h [T,size] f32, f16 with H_F16; w [size] f32; x [T,columns] f32, f16 with X_F16; out [T,columns] f32
// Launch    grid (T), block (256): one block per token
// Shared    one float per warp, static
// Sync      warps write partial sums; barrier; every thread adds them up in the same order
// Numerics  f32
// Defines   H_F16, X_F16
// Compile   H_F16=0,1 X_F16=0,1
#include "common/platform.cuh"

DEVICE float value_of(f16 x) { return to_f32(x); }
DEVICE float value_of(float x) { return x; }

#if H_F16
typedef f16 h_t;
#else
typedef float h_t;
#endif
#if X_F16
typedef f16 x_t;
#else
typedef float x_t;
#endif

KERNEL(256) gated_add(const h_t* RESTRICT h, const float* RESTRICT w, const x_t* RESTRICT x, float* RESTRICT out,
                      i32 size, i32 columns) {
    GRID_DEPENDENCY();
    SHARED float partial[256 / WARP_SIZE];
    const i64 t = blockIdx.x;
    float sum = 0;
    for (i32 i = threadIdx.x; i < size; i += blockDim.x) sum += value_of(h[t * size + i]) * w[i];
    sum = warp_sum(sum);
    if (LANE() == 0) partial[WARP_ID()] = sum;
    BARRIER();
    float logit = 0;
#pragma unroll
    for (int i = 0; i < 256 / WARP_SIZE; i++) logit += partial[i];
    const float share = 1 / (1 + expf(-logit));
    for (i32 i = threadIdx.x; i < columns; i += blockDim.x) out[t * columns + i] += share * value_of(x[t * columns + i]);
}
