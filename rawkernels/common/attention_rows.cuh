// Rows of a sequence and their tags.
//
// Defines   KV_TYPE
#pragma once
#include "common/kv.cuh"

// Where the row of a position lies and the tag that it must carry, from a sequence's own pages.
struct Row {
    i32 index;  // -1: none is wanted
    u32 expected;
};

DEVICE Row find_row(const i32* RESTRICT pages, const u32* RESTRICT epochs, i32 position, i32 stop, i32 page_size) {
    if (position >= stop) return Row{-1, 0};
    const i32 slot = position / page_size;
    return Row{pages[slot] * page_size + (position - slot * page_size), epochs[slot]};
}

DEVICE void report_tag(i32* record, i32 seq_id, i32 layer, const Row& row, i32 position, i32 page_size, u32 found) {
    report_fault(record, KIND_TAG, seq_id, layer, row.index / page_size, position % page_size, position, row.expected,
                 found);
}
