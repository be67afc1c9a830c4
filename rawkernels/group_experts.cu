// group_experts: the (token, slot) pairs of each expert, in order, and the tiles into which they are cut
//
// Shapes    experts [num_pairs] i32, others than 0..num_experts-1 are left out; lists, all i32:
//           starts [num_experts + 1], num_tiles [1], pairs [num_pairs], tiles [max_tiles, 2]: expert, first of its pairs
// Launch    grid (num_experts), block (256): one block per expert; num_experts <= 512
// Shared    a counter per expert and two sums per warp, static
// Sync      all threads count (whole numbers: any order gives the same), barrier; warps sum up what lies before the block's
//           expert, barrier; each warp writes the pairs of its own part of `experts`
// Defines   BM: pairs of a tile
// Scratch   sm_80=8
// Compile   BM=32,64,128,160,192
#include "common/platform.cuh"

constexpr int MAX_EXPERTS = 512;
constexpr int WARPS = 256 / WARP_SIZE;

DEVICE i32 warp_total(i32 value) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

KERNEL(256) group_experts(const i32* RESTRICT experts, i32* RESTRICT lists, i32 num_pairs, i32 num_experts) {
    GRID_DEPENDENCY();
    SHARED i32 counts[MAX_EXPERTS];
    SHARED i32 own_of_warp[WARPS];
    SHARED i32 pairs_before[WARPS];
    SHARED i32 tiles_before[WARPS];
    const i32 expert = blockIdx.x;
    i32* const starts = lists;
    i32* const num_tiles = starts + num_experts + 1;
    i32* const pairs = num_tiles + 1;
    i32* const tiles = pairs + num_pairs;
    for (i32 e = threadIdx.x; e < num_experts; e += 256) counts[e] = 0;
    BARRIER();
    // A warp's part: whole rounds of all its lanes.
    const i32 rounds = (num_pairs + 255) / 256;
    const i32 first = WARP_ID() * rounds * WARP_SIZE;
    i32 own = 0;
    for (i32 round = 0; round < rounds; round++) {
        const i32 pair = first + round * WARP_SIZE + LANE();
        const i32 its = pair < num_pairs ? experts[pair] : -1;
        if (its >= 0 && its < num_experts) atomic_add(&counts[its], 1);
        own += popcount(ballot(its == expert));
    }
    if (LANE() == 0) own_of_warp[WARP_ID()] = own;
    BARRIER();  // counts are complete
    i32 before = 0, cut = 0;
    for (i32 e = threadIdx.x; e < expert; e += 256) {
        before += counts[e];
        cut += (counts[e] + BM - 1) / BM;
    }
    before = warp_total(before);
    cut = warp_total(cut);
    if (LANE() == 0) pairs_before[WARP_ID()] = before, tiles_before[WARP_ID()] = cut;
    BARRIER();  // sums are complete
    i32 start = 0, first_tile = 0, next = 0;
    for (int warp = 0; warp < WARPS; warp++) {
        start += pairs_before[warp];
        first_tile += tiles_before[warp];
        if (warp < WARP_ID()) next += own_of_warp[warp];
    }
    next += start;
    for (i32 round = 0; round < rounds; round++) {
        const i32 pair = first + round * WARP_SIZE + LANE();
        const bool wanted = pair < num_pairs && experts[pair] == expert;
        const u64 who = ballot(wanted);
        if (wanted) pairs[next + popcount(who & (((u64)1 << LANE()) - 1))] = pair;
        next += popcount(who);
    }
    const i32 cuts = (counts[expert] + BM - 1) / BM;
    for (i32 tile = threadIdx.x; tile < cuts; tile += 256) {
        tiles[2 * (first_tile + tile)] = expert;
        tiles[2 * (first_tile + tile) + 1] = start + tile * BM;
    }
    if (threadIdx.x == 0) {
        starts[expert] = start;
        if (expert == num_experts - 1) {
            starts[num_experts] = start + counts[expert];
            num_tiles[0] = first_tile + cuts;
        }
    }
}
