// check_inputs: whether a slot that was read in place still holds the ubatch that was to run
//
// Shapes    slot, block u64; step_counter [1] i64; record i32; head_word, tail_word: where the serials lie, in u64 words
// Launch    grid (1), block (32): one thread does it
// Sync      none; no other kernel runs
// Numerics  integers only
#include "common/platform.cuh"

#define KIND_SERIAL 1
#define FAULT_CAPACITY 127
#define FAULT_WIDTH 8

KERNEL(32) check_inputs(const u64* RESTRICT slot, const u64* RESTRICT block, const i64* RESTRICT step_counter,
                        i32* RESTRICT record, i32 head_word, i32 tail_word) {
    GRID_DEPENDENCY();
    if (threadIdx.x != 0) return;
    const i64 expected = step_counter[0];
    // What copy_inputs found, and has reported, is not reported again.
    if (static_cast<i64>(block[head_word]) != expected || static_cast<i64>(block[tail_word]) != expected) return;
    const i64 head = static_cast<i64>(slot[head_word]);
    const i64 tail = static_cast<i64>(slot[tail_word]);
    if (head == expected && tail == expected) return;
    const i64 found = head != expected ? head : tail;
    const i32 index = record[0]++;
    if (index >= FAULT_CAPACITY) return;
    i32* const entry = record + (1 + index) * FAULT_WIDTH;
    entry[0] = KIND_SERIAL;
    for (i32 i = 1; i < 6; i++) entry[i] = -1;
    entry[6] = static_cast<i32>(expected & 0x7FFFFFFF);
    entry[7] = static_cast<i32>(found & 0x7FFFFFFF);
}
