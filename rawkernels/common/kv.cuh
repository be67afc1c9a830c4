// K/V rows in their storage type, and the fault record.
//
// Defines   KV_TYPE: 0 float32, 1 float16, 2 bfloat16 (as u16)
#pragma once
#include "common/platform.cuh"

#define KIND_ROW_ID 2
#define KIND_TAG 3
#define FAULT_CAPACITY 127
#define FAULT_WIDTH 8

#if KV_TYPE == 0
typedef float kv_t;
DEVICE float kv_load(kv_t x) { return x; }
DEVICE kv_t kv_store(float x) { return x; }
#elif KV_TYPE == 1
typedef u16 kv_t;
DEVICE float kv_load(kv_t x) { return to_f32(f16_from_bits(x)); }
DEVICE kv_t kv_store(float x) { return f16_to_bits(to_f16(x)); }
#elif KV_TYPE == 2
typedef u16 kv_t;
DEVICE float kv_load(kv_t x) { return bf16_to_f32(x); }
DEVICE kv_t kv_store(float x) { return f32_to_bf16(x); }
#else
#error "KV_TYPE names a row type that has no kernel"
#endif

// Eight consecutive elements of a row; rows are 16-byte aligned, the first element's index is a multiple of 8.
DEVICE void kv_load8(const kv_t* RESTRICT x, float* values) {
#if KV_TYPE == 0
    const f32x4 a = load16<f32x4>(x);
    const f32x4 b = load16<f32x4>(x + 4);
    values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
    values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
#else
    const u32x4 words = load16<u32x4>(x);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        values[2 * j] = kv_load(static_cast<u16>(pairs[j] & 0xFFFF));
        values[2 * j + 1] = kv_load(static_cast<u16>(pairs[j] >> 16));
    }
#endif
}

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
