// fill_rows: every byte of K/V rows first_row .. first_row + grid - 1 becomes `byte`; tags stay
//
// Shapes    k [rows, k_words] u16, v [rows, v_words] u16
// Launch    grid (num_rows), block (128)
#include "common/platform.cuh"

KERNEL(128) fill_rows(u16* RESTRICT k, u16* RESTRICT v, i32 k_words, i32 v_words, i64 first_row, i32 byte) {
    GRID_DEPENDENCY();
    const i64 row = first_row + blockIdx.x;
    const u16 pattern = static_cast<u16>(byte | (byte << 8));
    for (i32 i = threadIdx.x; i < k_words; i += blockDim.x) k[row * k_words + i] = pattern;
    for (i32 i = threadIdx.x; i < v_words; i += blockDim.x) v[row * v_words + i] = pattern;
}
