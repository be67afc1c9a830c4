// copy_rows: copy K/V rows whose tag is source_epoch to another page under target_epoch; others become absent
//
// Shapes    k [rows, k_words] u16, v [rows, v_words] u16, tags [rows] u32
// Launch    grid (num_rows), block (128): one block per row
// Sync      none: a row's tag is read by all threads of its block, the target's tag is another word
#include "common/rows.cuh"

KERNEL(128) copy_rows(u16* k, u16* v, u32* tags, i32 k_words, i32 v_words, i64 source_row, i64 target_row,
                      u32 source_epoch, u32 target_epoch) {
    GRID_DEPENDENCY();
    const i64 source = source_row + blockIdx.x;
    const i64 target = target_row + blockIdx.x;
    const bool own = tags[source] == source_epoch;
    if (own) {
        copy_row(k + source * k_words, k + target * k_words, k_words);
        copy_row(v + source * v_words, v + target * v_words, v_words);
    }
    if (threadIdx.x == 0) tags[target] = own ? target_epoch : 0;
}
