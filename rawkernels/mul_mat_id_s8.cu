// mul_mat_id_s8: out[t,j] = x[t,j] w[experts[t,j]]^T for few (token, slot) pairs, packed weights and activations as whole
//     numbers, on NVIDIA's products of signed bytes. GATE: silu of that, times the same product with w_up
//
// Shapes    x [T,x_slots,K] f16 or f32, x_slots 1 or num_used; experts [T,num_used] i32, at most MAX_PAIRS; w, w_up
//           [num_experts,N,row_bytes] packed; out [T,num_used,N] f32 or f16; K a multiple of UNIT_K
// Launch    grid (B), block (THREADS): a group is up to TOKENS pairs of one expert; its rows of w are cut into tiles of 16.
//           Each block has an equal share of the tiles of all groups, one behind the other, GATE: of pairs of tiles; its warps
//           equal shares of the chunks of k of those
// Shared    static: how many pairs each expert has, the choice, the block's groups, a codebook. Dynamic: STAGES units of 16
//           rows for each warp; `capacity` rows of x as whole numbers (common/product_s8.cuh); for each warp SLOTS sums
//           [TOKENS][16]
// Sync      SMALL: each warp finds the groups for itself. Else all threads count, barrier; each warp finds where groups begin,
//           one writes down those of the block, barrier. The block works in rounds of whole groups with up to `capacity`
//           pairs, nearly always a single one: the first weights are asked for; pairs are listed, barrier (not if SMALL); x is
//           brought, barrier; each warp works alone as in mul_mat_thin_s8; barrier; results whose sums are of several warps
//           are added up; barrier
// Numerics  as mul_mat_thin_s8. Sums over a chunk of k, then over chunks in their order, whichever warp has them: a pair's
//           results do not depend on other pairs. Pairs whose expert does not exist are left as they were
// Defines   QTYPE as in quants/whole.cuh; TOKENS 4 or 8; SMALL: at most 32 pairs; X_F16; OUTPUT 0 f32, 1 f16; GATE 0 or 1
//           THREADS; UNIT_K, UNIT_BYTES, STAGES, ALIGNED as in mul_mat_thin_s8; CHUNKS of a row
// Arch      sm_80 sm_90
// SharedLimit   sm_90=232448 sm_80=166912
// Scratch   sm_80=24
// Compile   QTYPE=12 TOKENS=4,8 SMALL=0,1 X_F16=1 OUTPUT=1 GATE=0,1 THREADS=384 UNIT_K=256 UNIT_BYTES=144 STAGES=2
//           ALIGNED=1 CHUNKS=4;
//           QTYPE=13 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=0,1 THREADS=384 UNIT_K=256 UNIT_BYTES=176 STAGES=2 ALIGNED=1
//           CHUNKS=4;
//           QTYPE=14 TOKENS=4,8 SMALL=0,1 X_F16=1 OUTPUT=1 GATE=0,1 THREADS=384 UNIT_K=256 UNIT_BYTES=210 STAGES=2
//           ALIGNED=0 CHUNKS=4;
//           QTYPE=23 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=0,1 THREADS=384 UNIT_K=256 UNIT_BYTES=136 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=8 TOKENS=4,8 SMALL=0,1 X_F16=1 OUTPUT=1 GATE=0,1 THREADS=384 UNIT_K=256 UNIT_BYTES=272 STAGES=2
//           ALIGNED=1 CHUNKS=4;
//           QTYPE=2,20 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1
//           CHUNKS=4;
//           QTYPE=3 TOKENS=8 SMALL=0 X_F16=0 OUTPUT=0 GATE=0 THREADS=384 UNIT_K=256 UNIT_BYTES=160 STAGES=2 ALIGNED=1
//           CHUNKS=4;
//           QTYPE=6 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=176 STAGES=2 ALIGNED=1
//           CHUNKS=4;
//           QTYPE=7 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=192 STAGES=2 ALIGNED=1
//           CHUNKS=4;
//           QTYPE=10 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=84 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=11 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=110 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=16 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=66 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=17 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=74 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=18 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=98 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=19 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=50 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=21 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=110 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=22 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=82 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=29 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=56 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=34 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=54 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=35 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=66 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=39 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=136 STAGES=2 ALIGNED=0
//           CHUNKS=4;
//           QTYPE=40 TOKENS=8 SMALL=0 X_F16=1 OUTPUT=1 GATE=1 THREADS=384 UNIT_K=256 UNIT_BYTES=144 STAGES=2 ALIGNED=1
//           CHUNKS=4
#define NORM 0
#include "common/gates.cuh"
#include "common/product_s8.cuh"

#define PARTS (GATE ? 2 : 1)  // tiles that one result takes
// Sums of a warp: chunks 1 and on of the tile in which its share begins, each for itself. Else all that it has of a tile: 0 of
// a tile of w, CHUNKS of one of w_up that belongs to the warp's first result, CHUNKS + 1 to its last.
#define SLOTS (CHUNKS + (GATE ? 2 : 0))
#define SUM (TOKENS * 16)

constexpr int MAX_EXPERTS = 512;
constexpr int MAX_PAIRS = 1024;

#if OUTPUT == 1
typedef f16 out_t;
DEVICE f16 to_out(float value) { return to_f16_saturated(value); }
#else
typedef float out_t;
DEVICE float to_out(float value) { return value; }
#endif

DEVICE i32 passes_of(i32 pairs) { return (pairs + TOKENS - 1) / TOKENS; }

DEVICE i32 sum_of_lanes_before(i32 value) {
    i32 sum = value;
#pragma unroll
    for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
        const i32 other = shfl(sum, static_cast<int>(LANE() + WARP_SIZE - distance) % WARP_SIZE);
        if (static_cast<int>(LANE()) >= distance) sum += other;
    }
    return sum - value;
}

struct Stack {
    const u8 *w, *w_up;
    i64 row_bytes;
    i32 N;
};

// Groups and results are counted from the first group of the block.
struct Round {
    const u32* groups;
    i32 first, begin, end;  // the first group, and results
};

// A tile of 16 rows.
struct Tile {
    i32 group;  // of the round
    i32 row;    // the first; and those that exist
    i32 rows;
    const u8* packed;
};

DEVICE Tile tile_at(const Stack& stack, const Round& round, i32 tile, i32 results_of_group) {
    const u32 result = round.begin + tile / PARTS;
    const u32 group = result / static_cast<u32>(results_of_group);
    Tile found;
    found.group = group - round.first;
    found.row = 16 * (result - group * results_of_group);
    found.rows = stack.N - found.row < 16 ? stack.N - found.row : 16;
    const i64 expert = round.groups[group] / MAX_PAIRS;
    found.packed = (tile % PARTS ? stack.w_up : stack.w) + (expert * stack.N + found.row) * stack.row_bytes;
    return found;
}

DEVICE const u8* row_of(const Tile& tile, i32 r, i64 row_bytes) {
    return tile.packed + (r < tile.rows ? r : tile.rows - 1) * row_bytes;
}

// The chunks that a warp works on; they are counted over the tiles of a round.
struct Share {
    i32 size;  // chunks of each warp
    i32 begin, end;
};

// The sum of one tile and element from all warps that have some of it, in the order of k.
DEVICE float gathered(const float* sums, const Share& share, i32 tile, i32 element) {
    const i32 first = tile * CHUNKS;
    const i32 warp = first / share.size;
    const i32 of_result = PARTS * CHUNKS;
    const i32 slot = tile % PARTS == 0 ? 0 : warp * share.size / of_result == first / of_result ? CHUNKS : CHUNKS + 1;
    float total = sums[(warp * SLOTS + slot) * SUM + element];
    for (i32 c = (warp + 1) * share.size - first; c < CHUNKS; c++) {
        total += sums[((first + c) / share.size * SLOTS + c) * SUM + element];
    }
    return total;
}

// The results of a block, and the groups that they are of.
struct Part {
    i32 first_group, num_groups;
    i32 begin, end;  // counted from the first group
};

DEVICE Part part_of(i32 groups, i32 results_of_group) {
    const u32 results = groups * results_of_group, block = blockIdx.x;
    const i32 begin = static_cast<i32>(results * block / gridDim.x);
    const i32 end = static_cast<i32>(results * (block + 1) / gridDim.x);
    const i32 first = begin / results_of_group;
    const i32 num_groups = end > begin ? (end - 1) / results_of_group + 1 - first : 0;
    return {first, num_groups, begin - first * results_of_group, end - first * results_of_group};
}

// The block's groups, and of a round its pairs, where those of a group begin, and how many it has. SMALL: each warp has one.
struct Book {
    u32 groups[SMALL ? WARP_SIZE : MAX_PAIRS];  // expert times MAX_PAIRS and the number of passes before it
    i8 sizes[SMALL ? WARP_SIZE : MAX_PAIRS];    // pairs
    i32 pairs[WARP_SIZE];
    i32 starts[WARP_SIZE];
    i32 group_pairs[WARP_SIZE];
};

DEVICE void put_group_of(Book& book, i32 group, i32 expert, i32 pass, i32 count) {
    book.groups[group] = expert * MAX_PAIRS + pass;
    const i32 left = count - pass * TOKENS;
    book.sizes[group] = static_cast<i8>(left < TOKENS ? left : TOKENS);
}

DEVICE void put_sums(float* target, const float (&sum)[COLUMNS][2]) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) target[(4 * n + LANE() % 4) * 16 + LANE() / 4 + 8 * i] = sum[n][i];
    }
}

// A result of which the warp has all sums; those of w lie in its slot 0 where there is a gate.
// pairs: those of the tile's group.
DEVICE void put_result(out_t* out, const Stack& stack, const Tile& tile, const i32* pairs, i32 count, const float* own_sums,
                       const float (&sum)[COLUMNS][2]) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const i32 pair = 4 * n + LANE() % 4, r = LANE() / 4 + 8 * i;
            float value = sum[n][i];
#if GATE
            value = gated(own_sums[pair * 16 + r], value);
#endif
            if (pair < count && r < tile.rows) {
                out[static_cast<i64>(pairs[pair]) * stack.N + tile.row + r] = to_out(value);
            }
        }
    }
}

KERNEL(THREADS) mul_mat_id_s8(const x_t* RESTRICT x, const i32* RESTRICT experts, const u8* RESTRICT w,
                              const u8* RESTRICT w_up, out_t* RESTRICT out, i64 row_bytes, i32 N, i32 K, i32 num_experts,
                              i32 num_used, i32 x_slots, i32 num_pairs, i32 capacity, i32 chunk) {
    DYNAMIC_SHARED(u8, memory);
    SHARED Book books[SMALL ? WARPS : 1];
    Book& book = books[SMALL ? WARP_ID() : 0];
    const i32 results_of_group = (N + 15) / 16;
    WHOLE_TABLE_SHARED(table);
    bring_table(table);
#if SMALL
    GRID_DEPENDENCY();
    const i32 named = LANE() < static_cast<u32>(num_pairs) ? experts[LANE()] : -1;
    const i32 expert = named >= 0 && named < num_experts ? named : -1;
    i32 rank = 0, alike = 0;  // pairs before this one that have its expert, and all of those
    for (i32 i = 0; i < num_pairs; i++) {
        const bool same = shfl(expert, i) == expert;
        alike += same;
        rank += same && i < static_cast<i32>(LANE());
    }
    const bool leads = expert >= 0 && rank % TOKENS == 0;
    const u64 leaders = ballot(leads);
    const i32 number = popcount(leaders & ((static_cast<u64>(1) << LANE()) - 1));
    const Part own = part_of(popcount(leaders), results_of_group);
    if (leads && number >= own.first_group && number < own.first_group + own.num_groups) {
        put_group_of(book, number - own.first_group, expert, rank / TOKENS, alike);
    }
    WARP_BARRIER();
#else
    SHARED i32 counts[MAX_EXPERTS];
    SHARED i16 chosen[MAX_PAIRS];
    for (i32 e = threadIdx.x; e < num_experts; e += THREADS) counts[e] = 0;
    BARRIER();
    GRID_DEPENDENCY();
    for (i32 pair = threadIdx.x; pair < num_pairs; pair += THREADS) {
        const i32 expert = experts[pair];
        const bool exists = expert >= 0 && expert < num_experts;
        chosen[pair] = static_cast<i16>(exists ? expert : -1);
        if (exists) atomic_add(&counts[expert], 1);
    }
    BARRIER();
    const i32 lane_experts = (num_experts + WARP_SIZE - 1) / WARP_SIZE;
    const i32 first_expert = LANE() * lane_experts;
    const i32 last_expert = first_expert + lane_experts < num_experts ? first_expert + lane_experts : num_experts;
    i32 own_groups = 0;
    for (i32 e = first_expert; e < last_expert; e++) own_groups += passes_of(counts[e]);
    i32 number = sum_of_lanes_before(own_groups);
    const Part own = part_of(shfl(number + own_groups, WARP_SIZE - 1), results_of_group);
    if (WARP_ID() == 0) {
        for (i32 e = first_expert; e < last_expert; e++) {
            for (i32 pass = 0; pass < passes_of(counts[e]); pass++, number++) {
                const i32 group = number - own.first_group;
                if (group >= 0 && group < own.num_groups) put_group_of(book, group, e, pass, counts[e]);
            }
        }
    }
    BARRIER();
#endif
    i32 next = own.begin;

    const i32 units = K / UNIT_K;
    const Stack stack = {w, w_up, row_bytes, N};
    u8* const stages = memory + WARP_ID() * STAGES * UNIT_STAGE;
    Activations activations;
    activations.bytes = memory + WARPS * STAGES * UNIT_STAGE;
    activations.scale = reinterpret_cast<float*>(activations.bytes + capacity * token_pitch(K));
    activations.minima = reinterpret_cast<u8*>(activations.scale + (capacity * units + 3) / 4 * 4);
    float* const sums = reinterpret_cast<float*>(activations.minima + (capacity * units * MINIMA_BYTES + 15) / 16 * 16);
    float* const own_sums = sums + WARP_ID() * SLOTS * SUM;
    const i32 g = LANE() / 4, part = LANE() % 4;

    while (next < own.end) {
        const i32 first_group = next / results_of_group, group = first_group + LANE();
        const i32 own_pairs = group < own.num_groups ? book.sizes[group] : 0;
        const i32 own_start = sum_of_lanes_before(own_pairs);
        const i32 fitting = popcount(ballot(group < own.num_groups && own_start + own_pairs <= capacity));
        const i32 pairs = shfl(own_start + own_pairs, fitting - 1);
        const i32 end_of_groups = (first_group + fitting) * results_of_group;
        const Round round = {book.groups, first_group, next, end_of_groups < own.end ? end_of_groups : own.end};
        if (SMALL || WARP_ID() == 0) book.starts[LANE()] = own_start, book.group_pairs[LANE()] = own_pairs;

        // This warp's share, and its first weights.
        Share share;
        const i32 chunks = (round.end - round.begin) * PARTS * CHUNKS;
        share.size = (chunks + WARPS - 1) / WARPS;
        share.begin = WARP_ID() * share.size < chunks ? WARP_ID() * share.size : chunks;
        share.end = share.begin + share.size < chunks ? share.begin + share.size : chunks;
        i32 tile = share.begin / CHUNKS, unit = share.begin % CHUNKS * chunk, stage = 0;
        const auto units_before = [&](i32 chunks_before) {
            return chunks_before / CHUNKS * units + chunks_before % CHUNKS * chunk;
        };
        const i32 count = units_before(share.end) - units_before(share.begin);
        Pieces pieces;
        begin_pieces(pieces);
        i32 fetched_tile = tile, fetched_unit = unit;
        const auto seek_tile = [&]() {
            const Tile at = tile_at(stack, round, fetched_tile, results_of_group);
            seek(pieces, [&](i32 r) { return row_of(at, r, row_bytes); }, fetched_unit);
        };
        const auto fetch = [&](i32 item, u8* target) {
            if (item < count) {
                if (fetched_unit == units) {
                    fetched_unit = 0;
                    fetched_tile++;
                    seek_tile();
                }
                fetch_unit(pieces, target);
                fetched_unit++;
            }
            async_commit();
        };
        if (count > 0) seek_tile();
#pragma unroll
        for (int s = 0; s < STAGES; s++) fetch(s, stages + s * UNIT_STAGE);

#if SMALL
        for (i32 i = 0; i < fitting; i++) {
            const u32 of_group = book.groups[first_group + i];
            const i32 place = rank - static_cast<i32>(of_group % MAX_PAIRS) * TOKENS, wanted = shfl(own_pairs, i);
            const bool its = expert == static_cast<i32>(of_group / MAX_PAIRS) && place >= 0 && place < wanted;
            const i32 start = shfl(own_start, i);
            if (its) book.pairs[start + place] = LANE();
        }
        WARP_BARRIER();
#else
        for (i32 i = WARP_ID(); i < fitting; i += WARPS) {
            const u32 of_group = book.groups[first_group + i];
            const i32 start = shfl(own_start, i), wanted = shfl(own_pairs, i);
            i32 before = -static_cast<i32>(of_group % MAX_PAIRS) * TOKENS;
            for (i32 first = 0; first < num_pairs && before < wanted; first += WARP_SIZE) {
                const i32 pair = first + LANE();
                const bool its = pair < num_pairs && chosen[pair] == static_cast<i32>(of_group / MAX_PAIRS);
                const u64 who = ballot(its);
                const i32 place = before + popcount(who & ((static_cast<u64>(1) << LANE()) - 1));
                if (its && place >= 0 && place < wanted) book.pairs[start + place] = pair;
                before += popcount(who);
            }
        }
        BARRIER();
#endif
        const auto row_of_x = [&](i32 i) {
            const i32 pair = book.pairs[i];
            return x + static_cast<i64>(x_slots == 1 ? pair / num_used : pair) * K;
        };
        Batch batch;
        batch.token = 0, batch.group = WARP_ID();
        while (batch.group >= groups_of(K)) batch.group -= groups_of(K), batch.token++;
        while (batch.token < pairs) {
            load_batch(batch, row_of_x, pairs, K);
            put_batch(activations, batch, nullptr, pairs, K);
        }
        BARRIER();

        Columns columns;
        i32 its_pairs = 0;  // of the tile
        float sum[COLUMNS][2] = {}, total[COLUMNS][2] = {};
        u32 place[2] = {0, 0};  // where a unit begins in its first piece
        bool fresh = true, from_start = unit == 0, holds = false;
        i32 in_chunk = 0;
        for (i32 item = 0; item < count; item++) {
            if (fresh) {
                const Tile at = tile_at(stack, round, tile, results_of_group);
                const i32 start = book.starts[at.group];
                its_pairs = book.group_pairs[at.group];
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) {
                    // Columns past the end repeat the last one, and are not stored.
                    const i32 column = start + (4 * n + g / 2 < its_pairs ? 4 * n + g / 2 : its_pairs - 1);
                    const i32 token = start + (4 * n + part < its_pairs ? 4 * n + part : its_pairs - 1);
                    columns.bytes[n] = activations.bytes + column * token_pitch(K) + g % 2 * 32 + 8 * part;
                    columns.scale[n] = activations.scale + token * units;
                    columns.minima[n] = activations.minima + (WHOLE_SCALES ? column * units * MINIMA_BYTES + g % 2 * 8
                                                                           : token * units * MINIMA_BYTES);
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u8* const first = row_of(at, g + 8 * i, row_bytes) + static_cast<i64>(unit) * UNIT_BYTES;
                    place[i] = static_cast<u32>(reinterpret_cast<u64>(first));
                }
            }
            const u8* packed[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                packed[i] = stages + stage * UNIT_STAGE + (g + 8 * i) * PITCH + (ALIGNED ? 0 : place[i] % 16);
                place[i] += UNIT_BYTES;
            }
            async_wait<STAGES - 1>();
            WARP_BARRIER();
            if (COLUMNS == 1 || its_pairs <= 4) {
                multiply<1>(sum, packed, columns, unit, table);
            } else {
                multiply<COLUMNS>(sum, packed, columns, unit, table);
            }
            WARP_BARRIER();  // all lanes have read the stage
            fetch(item + STAGES, stages + stage * UNIT_STAGE);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            unit++, in_chunk++;
            fresh = unit == units;
            if (in_chunk < chunk && !fresh) continue;

            // The end of a chunk.
            if (!from_start) {
                put_sums(own_sums + (unit - in_chunk) / chunk * SUM, sum);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    total[n][i] = in_chunk == unit ? sum[n][i] : total[n][i] + sum[n][i];
                    sum[n][i] = 0;
                }
            }
            in_chunk = 0;
            const bool last = item + 1 == count;
            if (from_start && (fresh || last)) {
                const bool all = fresh && (PARTS == 1 || (tile % PARTS && holds));
                if (all) {
                    const Tile at = tile_at(stack, round, tile, results_of_group);
                    put_result(out, stack, at, book.pairs + book.starts[at.group], its_pairs, own_sums, total);
                } else {
                    const bool of_first = tile / PARTS == share.begin / (PARTS * CHUNKS);
                    put_sums(own_sums + (tile % PARTS == 0 ? 0 : of_first ? CHUNKS : CHUNKS + 1) * SUM, total);
                }
                holds = tile % PARTS == 0;
            }
            if (fresh) unit = 0, from_start = true, tile++;
        }
        BARRIER();
        // Results that begin in one warp's share and end in another's, each once: at the first share that begins within it.
        const i32 of_result = PARTS * CHUNKS;
        for (i32 i = SUM + threadIdx.x; i < WARPS * SUM; i += THREADS) {
            const i32 boundary = i / SUM * share.size, element = i % SUM, r = element % 16, token = element / 16;
            const i32 result = boundary / of_result;
            if (boundary >= chunks || boundary % of_result == 0 || boundary - share.size > result * of_result) continue;
            const Tile at = tile_at(stack, round, result * PARTS, results_of_group);
            if (token < book.group_pairs[at.group] && r < at.rows) {
                float value = gathered(sums, share, result * PARTS, element);
#if GATE
                value = gated(value, gathered(sums, share, result * PARTS + 1, element));
#endif
                out[static_cast<i64>(book.pairs[book.starts[at.group] + token]) * N + at.row + r] = to_out(value);
            }
        }
        next = round.end;
        BARRIER();
    }
}
