// rms_norm: x[t,i] += delta[t,i]; out[t,i] = x[t,i] * rsqrt(mean_i x[t,i]^2 + eps) * w[i]
//
// Shapes    x, delta, out [T,size] f32; w [size] f32; out may be x
// Launch    grid (T), block (256): one block per row
// Shared    one float per warp, static
// Sync      warps write partial sums; barrier; every thread adds them up in the same order
// Numerics  f32 sums
// Defines   HAS_DELTA: 0 leaves delta and the store to x out
// Compile   HAS_DELTA=0,1
#include "common/platform.cuh"

KERNEL(256) rms_norm(float* x, const float* RESTRICT delta, const float* RESTRICT w, float* out, float eps,
                     i32 size) {
    SHARED float partial[256 / WARP_SIZE];
    const i64 row = static_cast<i64>(blockIdx.x) * size;
    float sum = 0;
    for (i32 i = threadIdx.x; i < size; i += blockDim.x) {
        float value = x[row + i];
#if HAS_DELTA
        value += delta[row + i];
        x[row + i] = value;
#endif
        sum += value * value;
    }
    sum = warp_sum(sum);
    if (LANE() == 0) partial[WARP_ID()] = sum;
    BARRIER();
    float total = 0;
#pragma unroll
    for (int i = 0; i < 256 / WARP_SIZE; i++) total += partial[i];
    const float factor = rsqrt_f(total / static_cast<float>(size) + eps);
    for (i32 i = threadIdx.x; i < size; i += blockDim.x) out[row + i] = x[row + i] * factor * w[i];
}
