// clear_tags: tags[layer, row] = 0 for rows first_row .. first_row + num_rows - 1 of all layers
//
// Shapes    tags [layers, rows_of_cache] u32
// Launch    grid (layers), block (128)
#include "common/platform.cuh"

KERNEL(128) clear_tags(u32* RESTRICT tags, i64 rows_of_cache, i64 first_row, i32 num_rows) {
    GRID_DEPENDENCY();
    u32* row = tags + blockIdx.x * rows_of_cache + first_row;
    for (i32 i = threadIdx.x; i < num_rows; i += blockDim.x) row[i] = 0;
}
