// top_k: the TOP largest values of each row with their columns, in descending order; equal values by column
//
// Shapes    values [rows, columns] f32 (columns: ids [rows, columns] i32, or the column itself)
//           out_values [rows, parts, TOP] f32, out_ids alike i32
// Launch    grid (rows, parts), block (512): a block chooses from one part of 512 * KEYS elements; a second launch over the
//           parts' results gives those of the row
// Shared    the chosen ones, a counter, partial counts of the warps, static
// Sync      the smallest chosen key is found bit by bit: each step counts the keys that are at least a candidate, a
//           barrier between steps; equal keys likewise, by place; barriers around the list of the chosen, which are ranked
// Numerics  values are compared as they are; NaN counts as -infinity. A part with fewer than TOP elements is filled up
//           with the id 0x7FFFFFFF, which a later launch takes for an absent one
// Defines   TOP, KEYS per thread, HAS_IDS
// Compile   TOP=64 KEYS=16 HAS_IDS=0,1
#include "common/platform.cuh"

#define THREADS 512
#define WARPS (THREADS / WARP_SIZE)
#define ABSENT 0x7FFFFFFF

// A key that sorts as the float does; 0 is left for absent elements.
DEVICE u32 order_key(float value) {
    const u32 bits = f32_bits(value != value ? -INFINITY_F : value == 0 ? 0.0f : value);  // -0 equals 0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float from_order_key(u32 key) {
    if (key == 0) return -INFINITY_F;
    return f32_from_bits(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// The sum of all threads' numbers, which are small. Calls alternate between two sets of partial sums.
DEVICE i32 block_count(float own, float (&partial)[2][WARPS], int& turn) {
    const float warp = warp_sum(own);
    if (LANE() == 0) partial[turn][WARP_ID()] = warp;
    BARRIER();
    float total = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += partial[turn][i];
    turn ^= 1;
    return static_cast<i32>(total);
}

KERNEL(THREADS) top_k(const float* RESTRICT values, const i32* RESTRICT ids, float* RESTRICT out_values,
                      i32* RESTRICT out_ids, i64 columns) {
    GRID_DEPENDENCY();
    SHARED float partial[2][WARPS];
    SHARED u32 chosen_keys[TOP];
    SHARED i32 chosen_ids[TOP];
    SHARED i32 num_chosen[1];
    const i64 first = static_cast<i64>(blockIdx.y) * (THREADS * KEYS);
    const float* row = values + blockIdx.x * columns;
    u32 keys[KEYS];
    i32 names[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const i64 column = first + j * THREADS + threadIdx.x;
        const bool inside = column < columns;
#if HAS_IDS
        names[j] = inside ? ids[blockIdx.x * columns + column] : ABSENT;
#else
        names[j] = inside ? static_cast<i32>(column) : ABSENT;
#endif
        keys[j] = names[j] != ABSENT ? order_key(row[column]) : 0;
    }
    if (threadIdx.x == 0) num_chosen[0] = 0;
    int turn = 0;
    u32 smallest = 0;
    i32 at_least = THREADS * KEYS;  // keys >= smallest
    for (int bit = 31; bit >= 0; bit--) {
        const u32 candidate = smallest | 1u << bit;
        float own = 0;
#pragma unroll
        for (int j = 0; j < KEYS; j++) own += keys[j] >= candidate ? 1.0f : 0.0f;
        const i32 count = block_count(own, partial, turn);
        if (count >= TOP) smallest = candidate, at_least = count;
    }
    // Of elements with the smallest chosen key those are taken that lie before `bound` in the part.
    u32 bound = 1u << 30;
    if (at_least > TOP) {
        float own = 0;
#pragma unroll
        for (int j = 0; j < KEYS; j++) own += keys[j] > smallest ? 1.0f : 0.0f;
        const i32 wanted = TOP - block_count(own, partial, turn);
        bound = 0;
        for (int bit = 20; bit >= 0; bit--) {
            const u32 candidate = bound | 1u << bit;
            own = 0;
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                own += keys[j] == smallest && j * THREADS + threadIdx.x < candidate ? 1.0f : 0.0f;
            }
            if (block_count(own, partial, turn) <= wanted) bound = candidate;
        }
    }
    BARRIER();  // the counter is 0
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        if (keys[j] > smallest || (keys[j] == smallest && j * THREADS + threadIdx.x < bound)) {
            const i32 slot = atomic_add(num_chosen, 1);
            chosen_keys[slot] = keys[j];
            chosen_ids[slot] = names[j];
        }
    }
    BARRIER();  // the list is complete
    const i64 target = (static_cast<i64>(blockIdx.x) * gridDim.y + blockIdx.y) * TOP;
    for (i32 i = threadIdx.x; i < TOP; i += THREADS) {
        const u32 key = chosen_keys[i];
        const i32 id = chosen_ids[i];
        i32 rank = 0;
        for (i32 j = 0; j < TOP; j++) {
            const bool equal = chosen_keys[j] == key;
            rank += chosen_keys[j] > key || (equal && (chosen_ids[j] < id || (chosen_ids[j] == id && j < i)));
        }
        out_values[target + rank] = from_order_key(key);
        out_ids[target + rank] = id;
    }
}
