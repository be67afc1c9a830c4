// The fault record: i32 [1 + FAULT_CAPACITY, FAULT_WIDTH], the number of faults and then the first of them
#pragma once
#include "common/platform.cuh"

#define KIND_ROW_ID 2
#define KIND_TAG 3
#define KIND_STATE 4
#define FAULT_CAPACITY 127
#define FAULT_WIDTH 8

// Append an entry to the fault record; beyond its capacity only the count goes on.
DEVICE void report_fault(i32* record, i32 kind, i32 seq_id, i32 layer, i32 page, i32 row, i32 position, u32 expected,
                         u32 found) {
    const i32 index = atomic_add(record, 1);
    if (index >= FAULT_CAPACITY) return;
    i32* entry = record + (1 + index) * FAULT_WIDTH;
    entry[0] = kind;
    entry[1] = seq_id;
    entry[2] = layer;
    entry[3] = page;
    entry[4] = row;
    entry[5] = position;
    entry[6] = static_cast<i32>(expected);
    entry[7] = static_cast<i32>(found);
}
