// top_k: the TOP largest values of each row with their columns, in descending order; equal values by column
//
// Shapes    values [rows, columns] f32 (columns: ids [rows, columns] i32, or the column itself)
//           out_values [rows, parts, TOP] f32, out_ids alike i32
// Launch    grid (rows, parts), block (512): a block chooses from one part of 512 * KEYS elements; a second launch over the
//           parts' results gives those of the row
// Shared    a list of LISTED, its length, bounds and partial counts of the warps, static
// Sync      of the threads' largest keys each warp takes its share of TOP; the smallest of these, over all warps, is a bound
//           that TOP keys reach or more. A barrier; what reaches it is listed; a barrier; who is listed is ranked. If the list
//           is too short, the smallest chosen key is found bit by bit: each step counts the keys that are at least a
//           candidate, a barrier between steps; equal keys likewise, by place; then only the chosen are listed
// Numerics  values are compared as they are; NaN counts as -infinity. A part with fewer than TOP elements is filled up
//           with the id 0x7FFFFFFF, which a later launch takes for an absent one
// Defines   TOP (256 at most), KEYS per thread, HAS_IDS
// Compile   TOP=64 KEYS=16 HAS_IDS=0,1
#if !HAS_IDS
#define KERNEL_MIN_BLOCKS 3
#endif
#include "common/platform.cuh"

#define THREADS 512
#define WARPS (THREADS / WARP_SIZE)
#define ABSENT 0x7FFFFFFF
#define SHARE ((TOP + WARPS - 1) / WARPS)  // of a warp
#define LISTED 1024

static_assert(SHARE <= WARP_SIZE && TOP <= LISTED, "TOP is at most 256");

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

// A number that sorts as key, then the lower id first.
DEVICE u64 order_of(u32 key, i32 id) { return static_cast<u64>(key) << 32 | ~static_cast<u32>(id); }

// The SHARE-th largest of the lanes' numbers, each of which counts once.
DEVICE u32 warp_bound(u32 own) {
    u32 bound = 0;
    bool taken = false;
    for (int i = 0; i < SHARE; i++) {
        bound = warp_max_u32(taken ? 0 : own);
        const u64 holders = ballot(!taken && own == bound);
        taken = taken || (own == bound && popcount(holders & ((static_cast<u64>(1) << LANE()) - 1)) == 0);
    }
    return bound;
}

KERNEL(THREADS) top_k(const float* RESTRICT values, const i32* RESTRICT ids, float* RESTRICT out_values,
                      i32* RESTRICT out_ids, i64 columns) {
    SHARED u64 list[LISTED];
    SHARED u32 bounds[WARPS];
    SHARED float partial[2][WARPS];
    SHARED i32 num_listed[1];
    GRID_DEPENDENCY();
    // The place of a thread's j-th key in the part is j * THREADS + place. Parts' results are sorted: they are dealt out so
    // that each warp gets as good ones as the others.
    const i32 dealt = LANE() * WARPS + (WARP_ID() + LANE()) % WARPS;
    const i32 place = HAS_IDS ? dealt : static_cast<i32>(threadIdx.x);
    const i64 first = static_cast<i64>(blockIdx.y) * (THREADS * KEYS) + place;
    const float* const row = values + blockIdx.x * columns;
#if HAS_IDS
    i32 names[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const i64 column = first + j * THREADS;
        names[j] = column < columns ? ids[blockIdx.x * columns + column] : ABSENT;
    }
    const auto name_of = [&](int j) { return names[j]; };
#else
    const auto name_of = [&](int j) { return static_cast<i32>(first) + j * THREADS; };
#endif
    u32 keys[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const bool exists = first + j * THREADS < columns && name_of(j) != ABSENT;
        keys[j] = exists ? order_key(row[first + j * THREADS]) : 0;
    }
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < KEYS; j++) largest = max(largest, keys[j]);
    const u32 bound_of_warp = warp_bound(largest);
    if (LANE() == 0) bounds[WARP_ID()] = bound_of_warp;
    if (threadIdx.x == 0) num_listed[0] = 0;
    BARRIER();
    u32 bound = bounds[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) bound = min(bound, bounds[w]);
    bound = max(bound, 1u);  // absent ones are not listed
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        if (keys[j] < bound) continue;
        const i32 slot = atomic_add(num_listed, 1);
        if (slot < LISTED) list[slot] = order_of(keys[j], name_of(j));
    }
    BARRIER();  // the list is complete, unless it is too short
    if (num_listed[0] > LISTED) {  // the whole block
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
        // Of elements with the smallest chosen key those are taken that lie before `end` in the part.
        i32 end = 1 << 30;
        if (at_least > TOP) {
            float own = 0;
#pragma unroll
            for (int j = 0; j < KEYS; j++) own += keys[j] > smallest ? 1.0f : 0.0f;
            const i32 wanted = TOP - block_count(own, partial, turn);
            end = 0;
            for (int bit = 20; bit >= 0; bit--) {
                const i32 candidate = end | 1 << bit;
                own = 0;
#pragma unroll
                for (int j = 0; j < KEYS; j++) {
                    own += keys[j] == smallest && j * THREADS + place < candidate ? 1.0f : 0.0f;
                }
                if (block_count(own, partial, turn) <= wanted) end = candidate;
            }
        }
        if (threadIdx.x == 0) num_listed[0] = 0;
        BARRIER();
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            if (keys[j] > smallest || (keys[j] == smallest && j * THREADS + place < end)) {
                list[atomic_add(num_listed, 1)] = order_of(keys[j], name_of(j));
            }
        }
        BARRIER();  // the list is complete
    }
    const i32 count = num_listed[0];
    const i64 target = (static_cast<i64>(blockIdx.x) * gridDim.y + blockIdx.y) * TOP;
    for (i32 i = threadIdx.x; i < count; i += THREADS) {
        const u64 own = list[i];
        i32 rank = 0;
#pragma unroll 4
        for (i32 j = 0; j < count; j++) rank += list[j] > own ? 1 : 0;
        if (rank < TOP) {
            out_values[target + rank] = from_order_key(static_cast<u32>(own >> 32));
            out_ids[target + rank] = static_cast<i32>(~static_cast<u32>(own));
        }
    }
    for (i32 i = count + static_cast<i32>(threadIdx.x); i < TOP; i += THREADS) {
        out_values[target + i] = -INFINITY_F;
        out_ids[target + i] = ABSENT;
    }
}
