// delta: what the kernels of gated_delta_rule have in common
#pragma once
#include "common/faults.cuh"
#include "common/state.cuh"

// ln(1 + e^x), also where e^x is far below 1
DEVICE float softplus(float x) {
    if (x > 20) return x;
    const float e = expf(x), u = 1 + e;
    return u == 1 ? e : logf(u) * (e / (u - 1));
}

DEVICE float log_decay(float decay, float step) { return decay * softplus(step); }

// By what a token multiplies the matrix.
DEVICE float state_decay(float decay, float step) { return expf(log_decay(decay, step)); }

DEVICE float write_rate(float beta) { return 1 / (1 + expf(-beta)); }

// A row with this mark is not the one that the sequence, which stands at `position`, is to go on from.
DEVICE void report_state(i32* record, i32 seq_id, i32 layer, i64 row, StateMark mark, u32 epoch, u32 position) {
    const bool other = mark.epoch != epoch || epoch == 0;
    report_fault(record, KIND_STATE, seq_id, layer, -1, static_cast<i32>(row), static_cast<i32>(position),
                 (other ? epoch : position) & 0x7FFFFFFF, (other ? mark.epoch : mark.position) & 0x7FFFFFFF);
}
