// take_rows: out[i,k] = x[ids[i],k]
//
// Shapes    x [rows, size] and out [n, size] 32-bit words; ids [n] i32
// Launch    grid (n), block (256)
#include "common/platform.cuh"

KERNEL(256) take_rows(const u32* RESTRICT x, const i32* RESTRICT ids, u32* RESTRICT out, i32 size) {
    GRID_DEPENDENCY();
    const u32* source = x + static_cast<i64>(ids[blockIdx.x]) * size;
    u32* target = out + static_cast<i64>(blockIdx.x) * size;
    for (i32 i = threadIdx.x; i < size; i += blockDim.x) target[i] = source[i];
}
