// gather_rows: K and V rows of all sequences with many tokens as f16, one sequence behind the other
//
// Shapes    k_cache, v_cache [rows,row_size] kv_t; tags [rows] u32; cu_seqlens [S+1], kv_lens, seq_ids [S] i32
//           page_table [S,max_pages] i32; page_epochs alike u32
//           k, v [capacity,width] f16; own [capacity] u32: 1, or 0 for a row that is not its sequence's own, which becomes zeros
//           spans [S,3] i32: row of the first position, that position, and the one behind the last; width % 8 == 0
// Launch    grid (capacity / UNIT, 2), block (256): UNIT rows of one sequence of K, or of V. Sequences with min_tokens tokens
//           and more take units one after the other; there, all rows that a token of this ubatch sees are gathered
// Shared    what its threads know of each row, static
// Sync      one thread per row looks it up; barrier; all threads convert
// Numerics  one rounding to f16, to nearest even; too large becomes the largest f16
// Defines   KV_TYPE (not 1)
// Compile   KV_TYPE=0,2,3,4
#include "common/attention_rows.cuh"

#define THREADS 256
#define UNIT 16    // rows
#define AT_ONCE 4  // pieces that a thread has on their way

// The positions of a sequence that are gathered, and the first of its units.
struct Part {
    i32 seq, unit, first, stop;
};

// Finds the sequence of a unit; seq is -1 behind the last one. Whole warps come here.
DEVICE Part find_part(const i32* RESTRICT cu_seqlens, const i32* RESTRICT kv_lens, i32* spans, i32 num_seqs,
                      i32 min_tokens, i32 window, i32 capacity, i32 unit, bool notes) {
    Part found{-1, 0, 0, 0};
    i32 before = 0;  // units of all sequences before these
    for (i32 first_seq = 0; first_seq < num_seqs; first_seq += WARP_SIZE) {
        const i32 seq = first_seq + LANE();
        const i32 tokens = seq < num_seqs ? cu_seqlens[seq + 1] - cu_seqlens[seq] : 0;
        const bool many = seq < num_seqs && tokens >= min_tokens;
        const i32 length = many ? kv_lens[seq] : 0;
        const i32 first = window > 0 && length - tokens - window + 1 > 0 ? length - tokens - window + 1 : 0;
        const i32 units = length > first ? (length - first + UNIT - 1) / UNIT : 0;
        i32 upto = units;
#pragma unroll
        for (int step = 1; step < WARP_SIZE; step *= 2) {
            const i32 others = shfl(upto, LANE() - step);
            if (LANE() >= step) upto += others;
        }
        const i32 mine = before + upto - units;
        const i32 room = capacity - mine * UNIT;
        const i32 stop = length - first <= room ? length : room > 0 ? first + room : first;
        if (notes && many) {
            spans[3 * seq] = mine * UNIT;
            spans[3 * seq + 1] = first;
            spans[3 * seq + 2] = stop;
        }
        const u64 here = ballot(mine <= unit && unit < mine + units);
        const i32 lane = popcount((here & (0 - here)) - 1) % WARP_SIZE;
        const Part part{seq, mine, first, stop};
        const Part theirs{shfl(part.seq, lane), shfl(part.unit, lane), shfl(part.first, lane), shfl(part.stop, lane)};
        if (here) found = theirs;
        before += shfl(upto, WARP_SIZE - 1);
    }
    return found;
}

KERNEL(THREADS) gather_rows(const kv_t* RESTRICT k_cache, const kv_t* RESTRICT v_cache, const u32* RESTRICT tags,
                            const i32* RESTRICT cu_seqlens, const i32* RESTRICT kv_lens, const i32* RESTRICT seq_ids,
                            const i32* RESTRICT page_table, const u32* RESTRICT page_epochs, i32* record,
                            f16* RESTRICT k, f16* RESTRICT v, u32* RESTRICT own, i32* spans, i32 num_seqs,
                            i32 min_tokens, i32 window, i32 width, i32 row_size, i32 max_pages, i32 page_size,
                            i32 layer, i32 capacity) {
    GRID_DEPENDENCY();
    SHARED i32 row_of[UNIT];  // -1: not the sequence's own
    const bool is_k = blockIdx.y == 0;
    const i32 unit = blockIdx.x;
    const Part part = find_part(cu_seqlens, kv_lens, spans, num_seqs, min_tokens, window, capacity, unit,
                                is_k && unit == 0 && WARP_ID() == 0);
    if (part.seq < 0) return;  // the whole block
    const i32 first = part.first + (unit - part.unit) * UNIT;
    const i32 num_rows = part.stop - first < UNIT ? part.stop - first : UNIT;
    const i64 target = static_cast<i64>(unit) * UNIT;
    const i32 mine = threadIdx.x;
    if (mine < num_rows) {
        const i64 pages = static_cast<i64>(part.seq) * max_pages;
        const Row row = find_row(page_table + pages, page_epochs + pages, first + mine, part.stop, page_size);
        const u32 found = tags[row.index];
        const bool right = found == row.expected;
        row_of[mine] = right ? row.index : -1;
        if (is_k) {
            own[target + mine] = right;
            if (!right) report_tag(record, seq_ids[part.seq], layer, row, first + mine, page_size, found);
        }
    }
    BARRIER();
    const kv_t* const cache = is_k ? k_cache : v_cache;
    f16* const rows = (is_k ? k : v) + target * width;
    const i32 pieces = width / 8;
    for (i32 start = threadIdx.x; start < num_rows * pieces; start += AT_ONCE * THREADS) {
        KVEight stored[AT_ONCE];
        bool wanted[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const i32 i = start + j * THREADS;
            const i32 row = i < num_rows * pieces ? row_of[i / pieces] : -1;
            wanted[j] = row >= 0;
            if (wanted[j]) kv_load_eight(stored[j], cache + static_cast<i64>(row) * row_size, width, i % pieces * 8);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const i32 i = start + j * THREADS;
            if (i >= num_rows * pieces) continue;
            u32x4 pairs{0, 0, 0, 0};
            if (wanted[j]) pairs = kv_unpack_eight(stored[j], i % pieces * 8);
            store16(rows + 8 * static_cast<i64>(i), pairs);
        }
    }
}
