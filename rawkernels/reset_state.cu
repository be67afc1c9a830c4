// reset_state: a row of the recurrent memory becomes zero, with an epoch and position 0; the slot's other row nobody's
//
// Shapes    values [rows,row_size] f32; marks [rows,layers,2] u32
// Launch    grid (ceil(row_size / 1024)), block (256): four elements per thread; block 0 writes the marks
#include "common/state.cuh"

KERNEL(256) reset_state(float* RESTRICT values, u32* RESTRICT marks, u32 epoch, i32 row, i32 row_size,
                        i32 num_layers) {
    GRID_DEPENDENCY();
    float* const own = values + static_cast<i64>(row) * row_size;
    for (i32 j = 0; j < 4; j++) {
        const i32 i = blockIdx.x * 1024 + j * 256 + threadIdx.x;
        if (i < row_size) own[i] = 0;
    }
    if (blockIdx.x != 0) return;
    for (i32 index = threadIdx.x; index < num_layers; index += blockDim.x) {
        write_mark(marks, row, num_layers, index, StateMark{epoch, 0});
        write_mark(marks, row ^ 1, num_layers, index, StateMark{0, 0});
    }
}
