// keep_tokens: kept[places[i]] = ids[i, 0]; -1 keeps nothing
//
// Shapes    ids [rows, columns], places [rows], kept [num_places] i32
// Launch    grid (ceil(rows / 128)), block (128): one thread per row
#include "common/platform.cuh"

KERNEL(128) keep_tokens(const i32* RESTRICT ids, const i32* RESTRICT places, i32* RESTRICT kept, i32 rows, i32 columns,
                        i32 num_places) {
    GRID_DEPENDENCY();
    const i32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const i32 place = places[row];
    if (place >= 0 && place < num_places) kept[place] = ids[static_cast<i64>(row) * columns];
}
