// Moving rows as bytes: whole numbers of words, which need no wider alignment; 16 bytes at a time where they have it.
#pragma once
#include "common/platform.cuh"

// All threads of a block copy one row.
template <typename Word>
DEVICE void copy_row(const Word* RESTRICT source, Word* RESTRICT target, i32 num_words) {
    constexpr i32 piece = 16 / static_cast<i32>(sizeof(Word));
    if ((reinterpret_cast<u64>(source) | reinterpret_cast<u64>(target)) % 16 == 0 && num_words % piece == 0) {
        for (i32 i = threadIdx.x; i < num_words / piece; i += blockDim.x) {
            store16(target + i * piece, load16<u32x4>(source + i * piece));
        }
    } else {
        for (i32 i = threadIdx.x; i < num_words; i += blockDim.x) target[i] = source[i];
    }
}
