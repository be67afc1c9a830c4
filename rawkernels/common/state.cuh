// state: whose a row of the recurrent memory is
//
// marks [rows,layers,2] u32: epoch (0: nobody's) and position of each layer's part of a row
#pragma once
#include "common/platform.cuh"

#define MARK_WIDTH 2

struct StateMark {
    u32 epoch, position;
};

DEVICE StateMark read_mark(const u32* RESTRICT marks, i64 row, i32 num_layers, i32 index) {
    const u32* const mark = marks + (row * num_layers + index) * MARK_WIDTH;
    return StateMark{mark[0], mark[1]};
}

DEVICE void write_mark(u32* marks, i64 row, i32 num_layers, i32 index, StateMark value) {
    u32* const mark = marks + (row * num_layers + index) * MARK_WIDTH;
    mark[0] = value.epoch;
    mark[1] = value.position;
}

DEVICE bool is_mark(StateMark mark, u32 epoch, u32 position) {
    return epoch != 0 && mark.epoch == epoch && mark.position == position;
}
