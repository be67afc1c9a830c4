// rms_norm: out[t,i] = x[t,i] * rsqrt(mean_i x[t,i]^2 + eps) * w[i]
//
// Shapes    x [T,size] f32; out [T,size] f32 or f16; w [size] f32; out may be x
// Launch    grid (T), block (256): one block per row
// Shared    one float per warp, static
// Sync      warps write partial sums; barrier; every thread adds them up in the same order
// Numerics  f32 sums; f16 saturates
// Defines   OUTPUT 0 f32, 1 f16, 2 added to f32; WIDE: size is a multiple of 4
// Compile   OUTPUT=0,1,2 WIDE=0,1
#include "common/platform.cuh"

#if WIDE
#define STEP 4
#else
#define STEP 1
#endif

DEVICE void load(const float* RESTRICT source, float (&values)[STEP]) {
#if WIDE
    const f32x4 four = load16<f32x4>(source);
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
#else
    values[0] = *source;
#endif
}

DEVICE void store(void* out, i64 index, const float (&values)[STEP]) {
#if OUTPUT == 1
    f16* const target = static_cast<f16*>(out) + index;
#if WIDE
    u16 bits[4];
#pragma unroll
    for (int j = 0; j < 4; j++) bits[j] = f16_to_bits(to_f16_saturated(values[j]));
    u32* const pairs = reinterpret_cast<u32*>(target);
    pairs[0] = bits[0] | static_cast<u32>(bits[1]) << 16;
    pairs[1] = bits[2] | static_cast<u32>(bits[3]) << 16;
#else
    *target = to_f16_saturated(values[0]);
#endif
#else
    float* const target = static_cast<float*>(out) + index;
    float old[STEP] = {};
#if OUTPUT == 2
    load(target, old);
#endif
#if WIDE
    store16(target, f32x4{old[0] + values[0], old[1] + values[1], old[2] + values[2], old[3] + values[3]});
#else
    *target = old[0] + values[0];
#endif
#endif
}

KERNEL(256) rms_norm(const float* x, const float* RESTRICT w, void* out, float eps, i32 size) {
    GRID_DEPENDENCY();
    SHARED float partial[256 / WARP_SIZE];
    const i64 row = static_cast<i64>(blockIdx.x) * size;
    float sum = 0;
    for (i32 i = STEP * threadIdx.x; i < size; i += STEP * blockDim.x) {
        float values[STEP];
        load(x + row + i, values);
#pragma unroll
        for (int j = 0; j < STEP; j++) sum += values[j] * values[j];
    }
    sum = warp_sum(sum);
    if (LANE() == 0) partial[WARP_ID()] = sum;
    BARRIER();
    float total = 0;
#pragma unroll
    for (int i = 0; i < 256 / WARP_SIZE; i++) total += partial[i];
    const float factor = rsqrt_f(total / static_cast<float>(size) + eps);
    for (i32 i = STEP * threadIdx.x; i < size; i += STEP * blockDim.x) {
        float values[STEP], weights[STEP];
        load(x + row + i, values);
        load(w + i, weights);
#pragma unroll
        for (int j = 0; j < STEP; j++) values[j] *= factor * weights[j];
        store(out, row + i, values);
    }
}
