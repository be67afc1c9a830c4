// copy_state: a row of the recurrent memory, or of pinned memory, to a row of the memory, under another epoch
//
// Shapes    from [.,row_size] f32, from_marks [.,layers,2] u32: row `source` of them; values [rows,row_size] f32;
//           marks [rows,layers,2] u32. `from` may be `values`: the rows are of different slots
// Launch    grid (ceil(row_size / 1024)), block (256): four elements per thread; block 0 writes the marks
//
// Layers whose mark is not the source's epoch and position become nobody's, as does the target's other row.
#include "common/state.cuh"

KERNEL(256) copy_state(const float* from, const u32* from_marks, float* values, u32* marks, u32 source_epoch,
                       u32 position, u32 epoch, i32 source, i32 target, i32 row_size, i32 num_layers) {
    GRID_DEPENDENCY();
    const float* const left = from + static_cast<i64>(source) * row_size;
    float* const right = values + static_cast<i64>(target) * row_size;
    for (i32 j = 0; j < 4; j++) {
        const i32 i = blockIdx.x * 1024 + j * 256 + threadIdx.x;
        if (i < row_size) right[i] = left[i];
    }
    if (blockIdx.x != 0) return;
    for (i32 index = threadIdx.x; index < num_layers; index += blockDim.x) {
        const StateMark mark = read_mark(from_marks, source, num_layers, index);
        const bool own = is_mark(mark, source_epoch, position);
        write_mark(marks, target, num_layers, index, own ? StateMark{epoch, position} : StateMark{0, 0});
        write_mark(marks, target ^ 1, num_layers, index, StateMark{0, 0});
    }
}
