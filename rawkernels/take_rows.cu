// take_rows: out[i,k] = x[ids[i],k]
//
// Shapes    x [rows, size] and out [n, size] 32-bit words; ids [n] i32
// Launch    grid (n), block (256)
#include "common/rows.cuh"

KERNEL(256) take_rows(const u32* RESTRICT x, const i32* RESTRICT ids, u32* RESTRICT out, i32 size) {
    GRID_DEPENDENCY();
    copy_row(x + static_cast<i64>(ids[blockIdx.x]) * size, out + static_cast<i64>(blockIdx.x) * size, size);
}
