// top_k: the TOP largest values of each row with their columns, in descending order; equal values by column
//
// Shapes    values [rows, columns] f32; ids alike i32 with IS_LIST: their columns, ABSENT where there is none; else not read
//           FINAL: out_values [rows, TOP] f32, out_ids alike i32; else [rows, parts, PLACES], in no order, absent ones behind
// Launch    grid (rows, parts), block (512): a block chooses from one part of 512 * KEYS elements; a last launch, over what
//           the parts' blocks have listed, gives those of the row
// Shared    the warps' largest values, a bound, the list of those that reach it and its length, partial counts, static
// Sync      each warp writes the EACH largest of its threads' largest values; a barrier; the TOP-th of all of these is a bound
//           that TOP elements or more reach; a barrier; what reaches it is listed; a barrier; who is listed last is ranked.
//           Where too many reach it, the smallest chosen value is found bit by bit: each step counts the elements that are
//           at least a candidate, a barrier between steps; equal ones likewise, by column; then only the chosen are listed
// Numerics  values are compared as they are; NaN counts as -infinity
// Defines   TOP (256 at most), KEYS per thread (a multiple of 4 without IS_LIST), PLACES (at least TOP), IS_LIST, FINAL
// Compile   TOP=64 KEYS=8,40 PLACES=96 IS_LIST=0 FINAL=0,1; TOP=64 KEYS=2,16 PLACES=96 IS_LIST=1 FINAL=0,1
#if !IS_LIST
#define KERNEL_MIN_BLOCKS 2
#endif
#include "common/platform.cuh"

#define THREADS 512
#define WARPS (THREADS / WARP_SIZE)
#define ABSENT 0x7FFFFFFF
#define SHARE ((TOP + WARPS - 1) / WARPS)  // of a warp, if they were evenly spread
#define SPARE (SHARE > 4 ? SHARE / 2 : 2)
#define EACH (SHARE + SPARE < WARP_SIZE ? SHARE + SPARE : WARP_SIZE)
#define BEST (WARPS * EACH)
#define BEST_PLACES ((BEST + 3) / 4 * 4)
#define CAPACITY (FINAL ? 4 * PLACES : PLACES)  // of the list

static_assert(SHARE <= WARP_SIZE && TOP <= PLACES, "TOP is at most 256");

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

#define MARK (THREADS - 1)  // bits of a key that make room for a thread's number: then no two are equal
#define LOWEST 0x007FFFFFu  // the key of -infinity

// Lane i gets the i-th largest of the lanes' numbers, of which no two are equal, i < EACH.
DEVICE u32 largest_of_warp(u32 own) {
    u32 kept = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const u32 largest = warp_max_u32(own);
        if (LANE() == i) kept = largest;
        if (own == largest) own = 0;
    }
    return kept;
}

KERNEL(THREADS) top_k(const float* RESTRICT values, const i32* RESTRICT ids, float* RESTRICT out_values,
                      i32* RESTRICT out_ids, i64 columns) {
    SHARED u32 best[BEST_PLACES];
    SHARED u32 bounds[1];
    SHARED i32 num_listed[1];
    SHARED float partial[2][WARPS];
#if FINAL
    SHARED u64 list[CAPACITY];
#endif
    GRID_DEPENDENCY();
    const i32 thread = static_cast<i32>(threadIdx.x);
    const i64 part = static_cast<i64>(blockIdx.y) * (THREADS * KEYS);
    const i32 elements = static_cast<i32>(columns - part < THREADS * KEYS ? columns - part : THREADS * KEYS);
    const float* const source = values + blockIdx.x * columns + part;
    const i64 target = (static_cast<i64>(blockIdx.x) * gridDim.y + blockIdx.y) * (FINAL ? TOP : PLACES);
    constexpr int RUN = IS_LIST ? 1 : 4, RUNS = KEYS / RUN;
    u32 x[KEYS];  // bits of floats, until they become keys
    // All loads come before anything depends on one: what lies behind the end is loaded from before it.
#if IS_LIST
    const i32* const names_of = ids + blockIdx.x * columns + part;
    i32 names[KEYS];
    const auto place_of = [&](int j) { return j * THREADS + thread; };
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const i32 place = min(place_of(j), elements - 1);
        names[j] = names_of[place];
        x[j] = f32_bits(source[place]);
    }
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        if (place_of(j) >= elements) names[j] = ABSENT;
    }
    constexpr i32 first_name = 0;
    const auto behind_first = [&](int j) { return names[j]; };
    const auto exists = [&](int j) { return names[j] != ABSENT; };  // one to a run
#else
    const auto behind_first = [](int j) { return j / 4 * (4 * THREADS) + j % 4; };  // columns from a thread's first to its j-th
    const auto place_of = [&](int j) { return 4 * thread + behind_first(j); };
    if (columns % 4 == 0 && (reinterpret_cast<u64>(values) & 15) == 0) {
        if (elements == THREADS * KEYS) {
#pragma unroll
            for (int j = 0; j < KEYS; j += 4) {
                const u32x4 four = load16<u32x4>(source + place_of(j));
                x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int j = 0; j < KEYS; j += 4) {
                const u32x4 four = load16<u32x4>(source + min(place_of(j), elements - 4));
                x[j] = four.x, x[j + 1] = four.y, x[j + 2] = four.z, x[j + 3] = four.w;
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < KEYS; j++) x[j] = f32_bits(source[min(place_of(j), elements - 1)]);
    }
    const i32 first_name = static_cast<i32>(part) + 4 * thread;
    const auto exists = [&](int j) { return behind_first(j) < elements - 4 * thread; };
#endif
    if (IS_LIST || elements < THREADS * KEYS) {
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            if (!exists(j)) x[j] = f32_bits(-INFINITY_F);
        }
    }
    const auto largest_of = [&](int r) {  // which leaves NaN out
        float largest = f32_from_bits(x[r * RUN]);
#pragma unroll
        for (int j = r * RUN + 1; j < r * RUN + RUN; j++) largest = fmaxf(largest, f32_from_bits(x[j]));
        return largest;
    };
    float largest = -INFINITY_F;
#pragma unroll
    for (int r = 0; r < RUNS; r++) largest = fmaxf(largest, largest_of(r));
    const u32 kept = largest_of_warp((order_key(largest) & ~static_cast<u32>(MARK)) | thread);
    if (LANE() < EACH) best[WARP_ID() * EACH + LANE()] = kept;
    if (thread < BEST_PLACES - BEST) best[BEST + thread] = 0;
    if (thread == 0) num_listed[0] = 0;
    BARRIER();
    if (thread < BEST) {
        const u32 own = best[thread];
        i32 before = 0;
#pragma unroll 8
        for (i32 i = 0; i < BEST_PLACES; i += 4) {
            const u32x4 four = load16<u32x4>(best + i);
            before += (four.x > own) + (four.y > own) + (four.z > own) + (four.w > own);
        }
        if (before == TOP - 1) bounds[0] = own & ~static_cast<u32>(MARK);
    }
    BARRIER();
    const bool all = elements <= CAPACITY;
    const float bound = from_order_key(bounds[0]);
    const auto put = [&](u64 order) {
        const i32 slot = atomic_add(num_listed, 1);
        if (slot >= CAPACITY) return;
#if FINAL
        list[slot] = order;
#else
        out_values[target + slot] = from_order_key(static_cast<u32>(order >> 32));
        out_ids[target + slot] = static_cast<i32>(~static_cast<u32>(order));
#endif
    };
    const bool found = all || bounds[0] > LOWEST;
    // Lists what comes no later than `last`. Most runs have nothing, and the code would be long: so a run is a loop.
    const auto list_up_to = [&](u64 last, bool any_run, bool are_keys) {
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            if (!any_run && !(largest_of(r) >= bound)) continue;
#pragma unroll 1
            for (int i = 0; i < RUN; i++) {
                u32 own = x[r * RUN];
#pragma unroll
                for (int j = 1; j < RUN; j++) own = i == j ? x[r * RUN + j] : own;
                const u64 order = order_of(are_keys ? own : order_key(f32_from_bits(own)), first_name + behind_first(r * RUN) + i);
                if (exists(r * RUN + i) && order >= last) put(order);
            }
        }
    };
    if (all || (found && largest >= bound)) list_up_to(all ? 0 : order_of(bounds[0], ABSENT), all, false);
    BARRIER();  // the list is complete, unless it is too short
    if (!found || num_listed[0] > CAPACITY) {  // the whole block
#pragma unroll
        for (int j = 0; j < KEYS; j++) x[j] = exists(j) ? order_key(f32_from_bits(x[j])) : 0;
        int turn = 0;
        u32 smallest = 0;
        i32 at_least = THREADS * KEYS;  // keys >= smallest
        for (int bit = 31; bit >= 0; bit--) {
            const u32 candidate = smallest | 1u << bit;
            float own = 0;
#pragma unroll
            for (int j = 0; j < KEYS; j++) own += x[j] >= candidate ? 1.0f : 0.0f;
            const i32 count = block_count(own, partial, turn);
            if (count >= TOP) smallest = candidate, at_least = count;
        }
        // Of elements with the smallest chosen key those are taken whose columns lie before `end`.
        i32 end = ABSENT;
        if (at_least > TOP && smallest > 0) {
            float own = 0;
#pragma unroll
            for (int j = 0; j < KEYS; j++) own += x[j] > smallest ? 1.0f : 0.0f;
            const i32 wanted = TOP - block_count(own, partial, turn);
            end = 0;
            for (int bit = 30; bit >= 0; bit--) {
                const i32 candidate = end | 1 << bit;
                own = 0;
#pragma unroll
                for (int j = 0; j < KEYS; j++) own += x[j] == smallest && behind_first(j) < candidate - first_name ? 1.0f : 0.0f;
                if (block_count(own, partial, turn) <= wanted) end = candidate;
            }
        }
        if (thread == 0) num_listed[0] = 0;
        BARRIER();
        list_up_to(order_of(smallest, end) + 1, true, true);
        BARRIER();  // the list is complete
    }
    const i32 count = num_listed[0];
#if FINAL
    for (i32 i = thread; i < count; i += THREADS) {
        const u64 own = list[i];
        i32 rank = 0;
#pragma unroll 8
        for (i32 j = 0; j < count; j++) rank += list[j] > own ? 1 : 0;
        if (rank < TOP) {
            out_values[target + rank] = from_order_key(static_cast<u32>(own >> 32));
            out_ids[target + rank] = static_cast<i32>(~static_cast<u32>(own));
        }
    }
#endif
    for (i32 i = count + thread; i < (FINAL ? TOP : PLACES); i += THREADS) {
        out_values[target + i] = -INFINITY_F;
        out_ids[target + i] = ABSENT;
    }
}
