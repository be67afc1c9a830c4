// fill_state: set every byte of a row of the recurrent memory; marks stay
//
// Shapes    values [rows,row_size] f32, as words
// Launch    grid (ceil(row_size / 1024)), block (256): four elements per thread
#include "common/platform.cuh"

KERNEL(256) fill_state(float* RESTRICT values, i32 row, i32 row_size, i32 byte) {
    GRID_DEPENDENCY();
    u32* const words = reinterpret_cast<u32*>(values + static_cast<i64>(row) * row_size);
    for (i32 j = 0; j < 4; j++) {
        const i32 i = blockIdx.x * 1024 + j * 256 + threadIdx.x;
        if (i < row_size) words[i] = static_cast<u32>(byte) * 0x01010101u;
    }
}
