// flash_attention_wgmma: flash_attention on Hopper's products of four warps, for K and V in f16
//
// Shapes    as flash_attention
// Launch    grid (heads / PACK, ceil(longest / TOKENS), S), block (384): two groups of four warps with 64 of the block's 128
//           rows each, and one group that fetches K and V. Rows as in flash_attention
// Shared    dynamic, from a multiple of 1024 bytes: the queries, then K and V of two slices of SLICE keys, in panels
// Sync      k_arrived, v_arrived: all copies of K (V) of a slice are in place; awaited by both groups, then fenced. k_done, v_done:
//           all threads of both groups are done with it; awaited before its place is filled again. Fetching threads meet
//           between looking rows up and fetching them. The groups take turns: each begins its products when the other has
//           begun its own
// Numerics  as flash_attention
// Defines   HEAD_DIM (a multiple of 64), IO_F16, HAS_SOFTCAP, PACK, SLICE (64 or 128), KV_TYPE=1
// Arch      sm_90a
// SharedLimit   sm_90a=232448
// Scratch   sm_90a=24
// Compile   KV_TYPE=1 HEAD_DIM=64,128 IO_F16=0,1 HAS_SOFTCAP=0 PACK=4 SLICE=128;
//           KV_TYPE=1 HEAD_DIM=192,256 IO_F16=1 HAS_SOFTCAP=0,1 PACK=2 SLICE=64
#include "common/attention.cuh"
#include "common/tile_wgmma.cuh"

#define GROUPS 2
#define GROUP_THREADS 128
#define THREADS (GROUP_THREADS * (GROUPS + 1))
#define ROWS (64 * GROUPS)
#define TOKENS (ROWS / PACK)
#define PANELS (HEAD_DIM / PANEL)
#define PIECES (HEAD_DIM / 8)
#define MASK_WORDS (SLICE / 32)
#define SCORES (SLICE / 2)   // of a thread
#define SUMS (HEAD_DIM / 2)  // of a thread
#define Q_PANEL (ROWS * 128)
#define KV_PANEL (SLICE * 128)
#define KV_TILE (KV_PANEL * PANELS)
#define NOTED 4  // slices whose missing rows are kept

// Numbers of the partial barriers.
#define FETCHERS 1
#define TURN 2     // and 3: of each group
#define QUERIES 4  // and 5: likewise

struct Places {
    Signal k_arrived[2], v_arrived[2], k_done[2], v_done[2];
    i32 row_of[2][SLICE];
    u32 absent[NOTED][MASK_WORDS];
    i32 position_of[ROWS];
};

// Begins one thread's copies of K or V of a slice: piece thread % PIECES of every STEP-th row. Its rows are kept in registers
// for both.
#define STEP (GROUP_THREADS / PIECES)  // rows
#define COPIES ((SLICE + STEP - 1) / STEP)

DEVICE void fetch_tile(u32 tile, const kv_t* RESTRICT cache, const i32 (&rows)[COPIES], i32 row_size, i32 thread) {
    const i32 piece = thread % PIECES;
    const u32 panel = tile + piece / 8 * KV_PANEL;
    const kv_t* const source = cache + 8 * piece;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const i32 key = thread / PIECES + i * STEP;
        if (GROUP_THREADS % PIECES && (thread >= STEP * PIECES || key >= SLICE)) continue;
        const i64 offset = static_cast<i64>(rows[i] < 0 ? 0 : rows[i]) * row_size;
        async_copy16_or_zeros(panel + panel_place(key, piece % 8), source + offset, rows[i] >= 0);
    }
}

// What a group of warps sees: slices begin at `start`; its queries' positions go from `first` to `last`.
struct View {
    i32 start, window, first, last;
};

DEVICE void begin_scores(float (&score)[SCORES], u32 q_address, u32 k_address) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
        const u64 rows = wgmma_factor(q_address + d / 4 * Q_PANEL + d % 4 * 32, 16);
        const u64 keys = wgmma_factor(k_address + d / 4 * KV_PANEL + d % 4 * 32, 16);
        wgmma_columns<SLICE>(score, rows, keys, d > 0);
    }
    wgmma_commit();
}

DEVICE void begin_sums(float (&sum)[SUMS], const u32 (&weights)[SCORES / 2], u32 v_address) {
#pragma unroll
    for (int n = 0; n < SLICE / 16; n++) {
        const u32 values = v_address + n * 2048;
#pragma unroll
        for (int d = 0; d + 128 <= HEAD_DIM; d += 128) {
            wgmma_rows<128>(sum + d / 2, weights + 4 * n, wgmma_factor(values + d / PANEL * KV_PANEL, KV_PANEL));
        }
#if HEAD_DIM % 128
        wgmma_rows<64>(sum + (HEAD_DIM - 64) / 2, weights + 4 * n,
                       wgmma_factor(values + (PANELS - 1) * KV_PANEL, KV_PANEL));
#endif
    }
    wgmma_commit();
}

// Scores of slice j become weights; `shrink` is what sums so far are to be multiplied with. K is done with.
DEVICE void soften(float (&score)[SCORES], float (&peak)[2], float (&total)[2], float (&shrink)[2], Places& places,
                   const View& view, i32 j, i32 my_row, i32 my_column, float scale, float softcap, float factor) {
    u32 missing[MASK_WORDS];
    bool all_there = true;
#pragma unroll
    for (int w = 0; w < MASK_WORDS; w++) {
        missing[w] = places.absent[j % NOTED][w];
        all_there = all_there && missing[w] == 0;
    }
    signal_arrive(&places.k_done[j % 2]);
    const i32 base = view.start + j * SLICE;
    const i32 window = view.window;
    const bool all_visible =
        all_there && base + SLICE - 1 <= view.first && (window <= 0 || view.last - base < window);
    float highest[2] = {peak[0], peak[1]};
#if HAS_SOFTCAP
#pragma unroll
    for (int i = 0; i < SCORES; i++) score[i] = score_of(score[i], scale, softcap);
#endif
    if (!all_visible) {
        const i32 position[2] = {places.position_of[my_row], places.position_of[my_row + 8]};
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            const i32 column = i / 4 * 8 + my_column + i % 2;
            const i32 distance = position[i / 2 % 2] - (base + column);
            const bool visible = distance >= 0 && (window <= 0 || distance < window) &&
                                 !(missing[i / 16] >> column % 32 & 1);
            if (!visible) score[i] = -INFINITY_F;
        }
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], score[i]);
    float anchor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        highest[r] = fmaxf(highest[r], shfl_xor(highest[r], 1));
        highest[r] = fmaxf(highest[r], shfl_xor(highest[r], 2));
        anchor[r] = anchor_of(highest[r], factor);
        shrink[r] = weight_of(peak[r], factor, anchor[r]);
        peak[r] = highest[r];
        total[r] *= shrink[r];
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
        score[i] = weight_of(score[i], factor, anchor[i / 2 % 2]);
        total[i / 2 % 2] += score[i];
    }
}

KERNEL(THREADS) flash_attention_wgmma(const io_t* RESTRICT q, const kv_t* RESTRICT k_cache,
                                            const kv_t* RESTRICT v_cache, const u32* RESTRICT tags,
                                            const i32* RESTRICT positions, const i32* RESTRICT cu_seqlens,
                                            const i32* RESTRICT seq_ids, const i32* RESTRICT page_table,
                                            const u32* RESTRICT page_epochs, i32* record, io_t* RESTRICT out,
                                            float scale, float softcap, float factor, i32 window, i32 kv_heads,
                                            i32 row_size, i32 max_pages, i32 page_size, i32 layer, i32 min_tokens) {
    GRID_DEPENDENCY();
    DYNAMIC_SHARED(u8, dynamic);
    SHARED Places places;
    const i32 seq = blockIdx.z;
    const i32 seq_start = cu_seqlens[seq];
    const i32 seq_stop = cu_seqlens[seq + 1];
    const i32 first_token = seq_start + (gridDim.y - 1 - blockIdx.y) * TOKENS;
    if (first_token >= seq_stop || seq_stop - seq_start < min_tokens) return;  // the whole block
    const i32 heads = gridDim.x * PACK;
    const i32 first_head = blockIdx.x * PACK;
    const i32 kv_head = first_head / (heads / kv_heads);
    const i32 stop_token = first_token + TOKENS < seq_stop ? first_token + TOKENS : seq_stop;
    const i32 block_first = positions[first_token];
    const i32 stop = positions[stop_token - 1] + 1;
    const i32 start = window > 0 && block_first - window + 1 > 0 ? block_first - window + 1 : 0;
    const i32 num_slices = (stop - start + SLICE - 1) / SLICE;
    u8* const q_tile = dynamic + (-shared_address(dynamic) & 1023);
    const u32 k_address = shared_address(q_tile) + Q_PANEL * PANELS;
    const u32 v_address = k_address + 2 * KV_TILE;
    const i32 group = threadIdx.x / GROUP_THREADS;
    const i32 thread = threadIdx.x % GROUP_THREADS;

    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            signal_init(&places.k_arrived[s], 2 * GROUP_THREADS);
            signal_init(&places.v_arrived[s], GROUP_THREADS);
            signal_init(&places.k_done[s], GROUPS * GROUP_THREADS);
            signal_init(&places.v_done[s], GROUPS * GROUP_THREADS);
        }
    }
    BARRIER();

    if (group == GROUPS) {
        fewer_registers<56>();
        const i32* const pages = page_table + static_cast<i64>(seq) * max_pages;
        const u32* const epochs = page_epochs + static_cast<i64>(seq) * max_pages;
        // Each stale row is reported once: by the first heads and the last block of queries that sees it.
        const i32 next_start = first_head ? 0 : stop_token == seq_stop ? 0x7FFFFFFF : window > 0 ? stop - window + 1 : 0;
        const i32 my_stop = thread < SLICE ? stop : 0;
        Row row = find_row(pages, epochs, start + thread, my_stop, page_size);
        Row next = find_row(pages, epochs, start + SLICE + thread, my_stop, page_size);
        u32 found = row.index >= 0 ? tags[row.index] : 0;
#pragma unroll 1
        for (i32 j = 0; j < num_slices; j++) {
            const i32 place = j % 2;
            const u32 last_phase = (j / 2 % 2) ^ 1;
            const i32 position = start + j * SLICE + thread;
            const bool own = row.index >= 0 && found == row.expected;
            if (row.index >= 0 && !own && position < next_start) {
                report_tag(record, seq_ids[seq], layer, row, position, page_size, found);
            }
            const u64 missing = ballot(thread < SLICE && !own);
            if (thread < SLICE) {
                places.row_of[place][thread] = own ? row.index : -1;
                if (LANE() == 0) places.absent[j % NOTED][thread / WARP_SIZE] = static_cast<u32>(missing);
            }
            row = next;
            found = row.index >= 0 ? tags[row.index] : 0;
            next = find_row(pages, epochs, position + 2 * SLICE, my_stop, page_size);
            part_barrier(FETCHERS, GROUP_THREADS);
            i32 rows[COPIES];
#pragma unroll
            for (int i = 0; i < COPIES; i++) rows[i] = places.row_of[place][(thread / PIECES + i * STEP) % SLICE];
            if (j >= 2) signal_wait(&places.k_done[place], last_phase);
            fetch_tile(k_address + place * KV_TILE, k_cache + kv_head * HEAD_DIM, rows, row_size, thread);
            signal_arrive_behind_copies(&places.k_arrived[place]);
            signal_arrive(&places.k_arrived[place]);  // for `absent`
            if (j >= 2) signal_wait(&places.v_done[place], last_phase);
            fetch_tile(v_address + place * KV_TILE, v_cache + kv_head * HEAD_DIM, rows, row_size, thread);
            signal_arrive_behind_copies(&places.v_arrived[place]);
        }
        async_commit();
        async_wait<0>();  // no thread ends before its copies
        return;
    }

    more_registers<224>();
    // The queries; each group brings its own.
    for (i32 i = thread; i < 64 * PIECES; i += GROUP_THREADS) {
        const i32 row = 64 * group + i / PIECES;
        const i32 piece = i % PIECES;
        const i32 token = first_token + row / PACK;
        float values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (token < stop_token) {
            io_load8(q + (static_cast<i64>(token) * heads + first_head + row % PACK) * HEAD_DIM + 8 * piece, values);
        }
        store16(q_tile + piece / 8 * Q_PANEL + panel_place(row, piece % 8), pack8(values));
    }
    for (i32 i = thread; i < 64; i += GROUP_THREADS) {
        const i32 token = first_token + (64 * group + i) / PACK;
        places.position_of[64 * group + i] = token < stop_token ? positions[token] : -1;
    }
    fence_products();
    part_barrier(QUERIES + group, GROUP_THREADS);

    const i32 group_token = first_token + 64 * group / PACK;
    const i32 group_last_token = first_token + (64 * group + 63) / PACK;
    const bool busy = group_token < stop_token;
    const i32 group_first = busy ? positions[group_token] : 0;
    const i32 group_last = busy ? positions[group_last_token < stop_token ? group_last_token : stop_token - 1] : 0;
    const i32 my_row = 64 * group + thread / WARP_SIZE * 16 + LANE() / 4;  // and eight rows further
    const i32 my_column = LANE() % 4 * 2;

    float sum[SUMS];
    float peak[2] = {-INFINITY_F, -INFINITY_F};
    float total[2] = {0, 0};
    float score[SCORES];
    u32 weights[SCORES / 2];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sum[i] = 0;
    const u32 q_address = shared_address(q_tile) + 64 * group * 128;

    View view{start, window, group_first, group_last};
    float shrink[2];
    if (group == 1) part_arrive(TURN, GROUPS * GROUP_THREADS);
    signal_wait(&places.k_arrived[0], 0);
    fence_products();
    part_barrier(TURN + group, GROUPS * GROUP_THREADS);
    wgmma_begin();
    begin_scores(score, q_address, k_address);
    part_arrive(TURN + (group ^ 1), GROUPS * GROUP_THREADS);
    wgmma_wait<0>();
    wgmma_pin(score);
    soften(score, peak, total, shrink, places, view, 0, my_row, my_column, scale, softcap, factor);
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) weights[i] = h2_pack(score[2 * i], score[2 * i + 1]);
#pragma unroll 1
    for (i32 j = 1; j < num_slices; j++) {
        const i32 place = j % 2;
        signal_wait(&places.k_arrived[place], j / 2 % 2);
        fence_products();
        part_barrier(TURN + group, GROUPS * GROUP_THREADS);
        wgmma_begin();
        begin_scores(score, q_address, k_address + place * KV_TILE);
        signal_wait(&places.v_arrived[place ^ 1], (j - 1) / 2 % 2);
        fence_products();
        begin_sums(sum, weights, v_address + (place ^ 1) * KV_TILE);
        part_arrive(TURN + (group ^ 1), GROUPS * GROUP_THREADS);
        wgmma_wait<1>();
        wgmma_pin(score);
        soften(score, peak, total, shrink, places, view, j, my_row, my_column, scale, softcap, factor);
        wgmma_wait<0>();
        wgmma_pin(sum);
        signal_arrive(&places.v_done[place ^ 1]);
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] *= shrink[i / 2 % 2];
#pragma unroll
        for (int i = 0; i < SCORES / 2; i++) weights[i] = h2_pack(score[2 * i], score[2 * i + 1]);
    }
    const i32 place = (num_slices - 1) % 2;
    signal_wait(&places.v_arrived[place], (num_slices - 1) / 2 % 2);
    fence_products();
    wgmma_begin();
    begin_sums(sum, weights, v_address + place * KV_TILE);
    wgmma_wait<0>();
    wgmma_pin(sum);
    if (group == 0) part_barrier(TURN, GROUPS * GROUP_THREADS);  // for the other's last arrival
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += shfl_xor(total[r], 1);
        total[r] += shfl_xor(total[r], 2);
        const float share = total[r] > 0 ? 1 / total[r] : 0;
        const i32 row = my_row + 8 * r;
        const i32 token = first_token + row / PACK;
        if (row >= TOKENS * PACK || token >= stop_token) continue;
        io_t* const target = out + (static_cast<i64>(token) * heads + first_head + row % PACK) * HEAD_DIM + my_column;
#pragma unroll
        for (int i = 0; i < SUMS / 4; i++) {
            const float low = sum[4 * i + 2 * r] * share;
            const float high = sum[4 * i + 2 * r + 1] * share;
#if IO_F16
            *reinterpret_cast<u32*>(target + 8 * i) = io_store(low).bits | static_cast<u32>(io_store(high).bits) << 16;
#else
            target[8 * i] = low;
            target[8 * i + 1] = high;
#endif
        }
    }
}
