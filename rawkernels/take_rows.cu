// take_rows: out[i,k] = x[ids[i],k]
//
// Shapes    x [rows, size] f32; ids [n] i32; out [n, size] f32
// Launch    grid (n), block (256)
#include "common/platform.cuh"

KERNEL(256) take_rows(const float* RESTRICT x, const i32* RESTRICT ids, float* RESTRICT out, i32 size) {
    const float* source = x + static_cast<i64>(ids[blockIdx.x]) * size;
    float* target = out + static_cast<i64>(blockIdx.x) * size;
    for (i32 i = threadIdx.x; i < size; i += blockDim.x) target[i] = source[i];
}
