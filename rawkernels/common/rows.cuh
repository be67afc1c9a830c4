// Moving K/V rows as bytes. Rows are whole numbers of 16-bit words and need no wider alignment.
#pragma once
#include "common/platform.cuh"

// All threads of a block copy one row.
DEVICE void copy_row(const u16* RESTRICT source, u16* RESTRICT target, i32 num_words) {
    for (i32 i = threadIdx.x; i < num_words; i += blockDim.x) target[i] = source[i];
}
