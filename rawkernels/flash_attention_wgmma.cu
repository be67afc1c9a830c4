// flash_attention_wgmma: flash_attention on Hopper's products of four warps
//
// Shapes    as flash_attention; counter [1] i32: zero before and after the launch
// Launch    grid (blocks), as many as run at once or fewer; block (384): two groups of four warps with 64 of a tile's 128 rows
//           each, and one group that fetches queries, K and V. Tiles are (HEADS / PACK) times those of TOKENS queries of the
//           sequences with min_tokens tokens and more; rows of a tile as in flash_attention. A block's first tile is that of
//           its own number, its next one what the counter says
// Shared    dynamic, from a multiple of 1024 bytes: the queries, then K and V of two slices of SLICE keys, in panels; behind
//           them, unless rows are f16, STAGES units of copies as they are stored
// Sync      Slices are counted through all tiles of a block. q_arrived: a tile's queries and its Info are in place, or Info says
//           that there is no tile. q_done: both groups have read the queries. k_arrived, v_arrived: all of K (V) of a slice is
//           in place; awaited by both groups, then fenced. k_done, v_done: both groups are done with it; awaited before its
//           place is filled again. Fetching threads meet between looking rows up and fetching them; a thread converts
//           what it has copied itself. The groups take turns: each begins its products when the other has begun its own
// Numerics  as flash_attention
// Defines   KV_TYPE, HEAD_DIM (a multiple of 64), IO_F16, HAS_SOFTCAP, PACK, SLICE (64 or 128), STAGES; GATHERED, with f16: rows are
//           those of gather_rows, whose spans take the place of the page table, max_pages being 3, and `own` that of the
//           tags; page_epochs is not read, and nothing is reported
// Arch      sm_90a
// SharedLimit   sm_90a=232448
// Scratch   sm_90a=64
// Compile   KV_TYPE=1 HEAD_DIM=64,128 IO_F16=0,1 HAS_SOFTCAP=0 PACK=4 SLICE=128 STAGES=0 GATHERED=0,1;
//           KV_TYPE=1 HEAD_DIM=192,256 IO_F16=1 HAS_SOFTCAP=0,1 PACK=2 SLICE=64 STAGES=0 GATHERED=0;
//           KV_TYPE=0,2,3,4 HEAD_DIM=128 IO_F16=1 HAS_SOFTCAP=0 PACK=4 SLICE=128 STAGES=3 GATHERED=0
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

// Of a thread. The three groups together have what the block was started with, 168 for each thread; who wants more waits
// until it is there.
#define FETCHER_REGISTERS (KV_TYPE == 1 ? 56 : 72)
#define GROUP_REGISTERS (KV_TYPE == 1 ? 224 : 216)
static_assert(FETCHER_REGISTERS + GROUPS * GROUP_REGISTERS <= 3 * 168, "the second group would wait for ever");

// Numbers of the partial barriers.
#define FETCHERS 1
#define TURN 2  // and 3: of each group

// What the groups have to know of a tile.
struct Info {
    i64 first_head;  // of its first token, counted through all tokens
    i32 tokens, start, num_slices;  // no slices: there is no tile
};

struct Places {
    Signal q_arrived, q_done, k_arrived[2], v_arrived[2], k_done[2], v_done[2];
    Info info[2];
    i32 position_of[2][ROWS];  // of each row's query; -1 behind the last
    i32 row_of[3][SLICE];
    u32 absent[NOTED][MASK_WORDS];
    i32 counted;
};

// Looks rows up, each thread one of a slice.
struct Finder {
    const i32* pages;
    const u32* epochs;
    i32 start, stop, page_size;
    Row row, next;  // of the slice that is noted next, and of the one behind it
    u32 found;

    DEVICE void begin(const u32* RESTRICT tags, i32 thread) {
        row = find(0, thread);
        next = find(1, thread);
        found = row.index >= 0 ? tags[row.index] : 0;
    }

    DEVICE Row find(i32 slice, i32 thread) const {
        const i32 position = start + slice * SLICE + thread;
        const i32 behind = thread < SLICE ? stop : 0;
#if GATHERED
        const bool there = position >= pages[1] && position < pages[2] && position < behind;
        return there ? Row{pages[0] + position - pages[1], 1} : Row{-1, 0};
#else
        return find_row(pages, epochs, position, behind, page_size);
#endif
    }

    // Writes down where the rows of a slice lie, -1 for those that are absent, and goes on to the next one.
    DEVICE void note(i32* row_of, u32* absent, const u32* RESTRICT tags, i32 slice, i32 thread, i32* record, i32 seq_id,
                     i32 layer, i32 next_start) {
        const i32 position = start + slice * SLICE + thread;
        const bool own = row.index >= 0 && found == row.expected;
        if (!GATHERED && row.index >= 0 && !own && position < next_start) {
            report_tag(record, seq_id, layer, row, position, page_size, found);
        }
        const u64 missing = ballot(thread < SLICE && !own);
        if (thread < SLICE) {
            row_of[thread] = own ? row.index : -1;
            if (LANE() == 0) absent[thread / WARP_SIZE] = static_cast<u32>(missing);
        }
        row = next;
        found = row.index >= 0 ? tags[row.index] : 0;
        next = find(slice + 2, thread);
    }
};

// The `rest`-th block of TOKENS queries: its sequence, and its number there from the last on. Whole warps come here.
struct Block {
    i32 seq, number;  // -1: there are not so many; then number is by how many too few
};

DEVICE Block find_block(const i32* RESTRICT cu_seqlens, i32 num_seqs, i32 min_tokens, i32 rest) {
    for (i32 first = 0; first < num_seqs; first += WARP_SIZE) {
        const i32 seq = first + LANE();
        const i32 tokens = seq < num_seqs ? cu_seqlens[seq + 1] - cu_seqlens[seq] : 0;
        i32 upto = tokens >= min_tokens ? (tokens + TOKENS - 1) / TOKENS : 0;
#pragma unroll
        for (int step = 1; step < WARP_SIZE; step *= 2) {
            const i32 others = shfl(upto, LANE() - step);
            if (LANE() >= step) upto += others;
        }
        const i32 before = popcount(ballot(upto <= rest));  // sequences that end before
        const i32 skipped = shfl(upto, before - 1);
        if (before < WARP_SIZE) return Block{first + before, before ? rest - skipped : rest};
        rest -= skipped;
    }
    return Block{-1, rest};
}

#if KV_TYPE == 1

// Begins one thread's copies of K or V of a slice: piece thread % PIECES of every STEP-th row.
#define STEP (GROUP_THREADS / PIECES)  // rows
#define COPIES ((SLICE + STEP - 1) / STEP)

DEVICE void fetch_tile(u32 tile, const kv_t* RESTRICT cache, const i32* row_of, i32 row_size, i32 thread) {
    const i32 piece = thread % PIECES;
    const u32 panel = tile + piece / 8 * KV_PANEL;
    const kv_t* const source = cache + 8 * piece;
    i32 rows[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) rows[i] = row_of[(thread / PIECES + i * STEP) % SLICE];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const i32 key = thread / PIECES + i * STEP;
        if (GROUP_THREADS % PIECES && (thread >= STEP * PIECES || key >= SLICE)) continue;
        const i64 offset = static_cast<i64>(rows[i] < 0 ? 0 : rows[i]) * row_size;
        async_copy16_or_zeros(panel + panel_place(key, piece % 8), source + offset, rows[i] >= 0);
    }
}

#else

// Rows in other types are copied as they are, 16 bytes at a time, and converted by the thread that has copied them. Copies of
// a slice: K, then V; of each panel after panel; there LANES threads beside each other, and STEP rows at once. UNIT
// copies of a thread make a unit.
#define EACH (KV_TYPE == 0 ? 4 : KV_PIECE)  // elements of a copy
#define LANES (PANEL / EACH)
#define STEP (GROUP_THREADS / LANES)
#define COPIES (PANELS * SLICE / STEP)  // of a thread, of K or V
#define UNIT (COPIES % 4 == 0 ? 4 : COPIES % 3 == 0 ? 3 : COPIES % 2 == 0 ? 2 : 1)
#define UNITS (COPIES / UNIT)
#define UNIT_BYTES (GROUP_THREADS * UNIT * (KV_QUANTISED ? 20 : 16))

static_assert(STAGES >= 2 && STAGES - 1 <= 2 * UNITS, "rows are known of one slice ahead");

// Where a thread's copies of a head come from.
struct Source {
    const u8 *k, *v;
    i64 row_bytes;
    i32 scales;  // bytes from there to the scales of the head
};

// Begins the copies of a unit of a slice.
DEVICE void fetch_unit(u32 stage, const Source& source, const i32* row_of, i32 unit, i32 thread) {
    const u8* const cache = unit < UNITS ? source.k : source.v;
    i32 rows[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        rows[i] = row_of[(unit % UNITS * UNIT + i) % (SLICE / STEP) * STEP + thread / LANES];
    }
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        const i32 panel = (unit % UNITS * UNIT + i) / (SLICE / STEP);
        const u8* const first = cache + (rows[i] < 0 ? 0 : rows[i]) * source.row_bytes;
        async_copy16_or_zeros(stage + 16 * (i * GROUP_THREADS + thread), first + 16 * LANES * panel, rows[i] >= 0);
#if KV_QUANTISED  // the scales of two blocks, of one panel
        async_copy4_or_zeros(stage + 16 * UNIT * GROUP_THREADS + 4 * (i * GROUP_THREADS + thread),
                             first + source.scales + 4 * panel, rows[i] >= 0);
#endif
    }
}

// Converts a unit into a tile.
DEVICE void convert_unit(u8* tile, const u8* stage, i32 unit, i32 thread) {
    const i32 column = thread % LANES;
    u32x4 codes[UNIT];
#if KV_QUANTISED
    u16 scales[UNIT];
#endif
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        codes[i] = load16<u32x4>(stage + 16 * (i * GROUP_THREADS + thread));
#if KV_QUANTISED
        const u8* const pair = stage + 16 * UNIT * GROUP_THREADS + 4 * (i * GROUP_THREADS + thread);
        scales[i] = reinterpret_cast<const u16*>(pair)[column * EACH / KV_BLOCK];
#endif
    }
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        const i32 copy = unit % UNITS * UNIT + i;
        u8* const panel = tile + copy / (SLICE / STEP) * KV_PANEL;
        const i32 key = copy % (SLICE / STEP) * STEP + thread / LANES;
#if KV_TYPE == 0
        const u64 low = h2_pack_saturated(f32_from_bits(codes[i].x), f32_from_bits(codes[i].y));
        const u64 high = h2_pack_saturated(f32_from_bits(codes[i].z), f32_from_bits(codes[i].w));
        *reinterpret_cast<u64*>(panel + panel_place(key, column / 2) + column % 2 * 8) = low | high << 32;
#else
        u32 pairs[KV_PIECE / 2];
#if KV_QUANTISED
        kv_unpack_piece(codes + i, scales[i], pairs);
#else
        kv_unpack_piece(codes + i, 0, pairs);
#endif
#pragma unroll
        for (int j = 0; j < EACH / 8; j++) {
            store16(panel + panel_place(key, column * (EACH / 8) + j),
                    u32x4{pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]});
        }
#endif
    }
}

#endif

// Brings a tile's queries, or begins to.
DEVICE void fetch_queries(u8* q_tile, const io_t* RESTRICT q, i32 tokens, i32 heads, i32 thread) {
#pragma unroll 4
    for (i32 i = thread; i < ROWS * PIECES; i += GROUP_THREADS) {
        const i32 row = i / PIECES;
        const i32 piece = i % PIECES;
        const bool exists = row / PACK < tokens;
        const io_t* const source = q + (exists ? (row / PACK * heads + row % PACK) * HEAD_DIM + 8 * piece : 0);
        u8* const target = q_tile + piece / 8 * Q_PANEL + panel_place(row, piece % 8);
#if IO_F16
        async_copy16_or_zeros(shared_address(target), source, exists);
#else
        float values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (exists) io_load8(source, values);
        store16(target, pack8(values));
#endif
    }
}

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

// Scores of a tile's slice j, the block's slice `slice`, become weights; `shrink` is what sums so far are to be multiplied with. K is done with.
DEVICE void soften(float (&score)[SCORES], float (&peak)[2], float (&total)[2], float (&shrink)[2], Places& places,
                   i32 tile, i32 slice, i32 j, i32 my_row, i32 my_column, float scale, float softcap, float factor,
                   i32 window) {
    u32 missing[MASK_WORDS];
    bool all_there = true;
#pragma unroll
    for (int w = 0; w < MASK_WORDS; w++) {
        missing[w] = places.absent[slice % NOTED][w];
        all_there = all_there && missing[w] == 0;
    }
    signal_arrive(&places.k_done[slice % 2]);
    const i32* const position_of = places.position_of[tile % 2];
    const i32 base = places.info[tile % 2].start + j * SLICE;
    const i32 tokens = places.info[tile % 2].tokens;
    const i32 last_token = (my_row / 64 * 64 + 63) / PACK < tokens ? (my_row / 64 * 64 + 63) / PACK : tokens - 1;
    const bool all_visible = all_there && base + SLICE - 1 <= position_of[my_row / 64 * 64] &&
                             (window <= 0 || position_of[last_token * PACK] - base < window);
    float highest[2] = {peak[0], peak[1]};
#if HAS_SOFTCAP
#pragma unroll
    for (int i = 0; i < SCORES; i++) score[i] = score_of(score[i], scale, softcap);
#endif
    if (!all_visible) {
        const i32 position[2] = {position_of[my_row], position_of[my_row + 8]};
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

// Eight bytes of two floats, or two f16.
DEVICE void store_pair(io_t* target, float low, float high) {
#if IO_F16
    *reinterpret_cast<u32*>(target) = h2_pack_saturated(low, high);
#else
    *reinterpret_cast<u64*>(target) = f32_bits(low) | static_cast<u64>(f32_bits(high)) << 32;
#endif
}

KERNEL(THREADS) flash_attention_wgmma(const io_t* RESTRICT q, const kv_t* RESTRICT k_cache,
                                      const kv_t* RESTRICT v_cache, const u32* RESTRICT tags,
                                      const i32* RESTRICT positions, const i32* RESTRICT cu_seqlens,
                                      const i32* RESTRICT seq_ids, const i32* RESTRICT page_table,
                                      const u32* RESTRICT page_epochs, i32* record, i32* counter, io_t* RESTRICT out,
                                      float scale, float softcap, float factor, i32 window, i32 num_seqs, i32 heads,
                                      i32 kv_heads, i32 row_size, i32 max_pages, i32 page_size, i32 layer,
                                      i32 min_tokens) {
    DYNAMIC_SHARED(u8, dynamic);
    SHARED Places places;
    GRID_DEPENDENCY();
    u8* const q_tile = dynamic + (-shared_address(dynamic) & 1023);
    const u32 k_address = shared_address(q_tile) + Q_PANEL * PANELS;
    const u32 v_address = k_address + 2 * KV_TILE;
    const i32 group = threadIdx.x / GROUP_THREADS;
    const i32 thread = threadIdx.x % GROUP_THREADS;

    if (threadIdx.x == 0) {
        const u32 twice = IO_F16 ? 2 : 1;  // for the copies, and for what was written
        signal_init(&places.q_arrived, twice * GROUP_THREADS);
        signal_init(&places.q_done, GROUPS * GROUP_THREADS);
        for (int s = 0; s < 2; s++) {
            signal_init(&places.k_arrived[s], (KV_TYPE == 1 ? 2 : 1) * GROUP_THREADS);
            signal_init(&places.v_arrived[s], GROUP_THREADS);
            signal_init(&places.k_done[s], GROUPS * GROUP_THREADS);
            signal_init(&places.v_done[s], GROUPS * GROUP_THREADS);
        }
    }
    BARRIER();

    if (group == GROUPS) {
        fewer_registers<FETCHER_REGISTERS>();
        i32 slice = 0;  // of all tiles
        i32 number = blockIdx.x;
        const i32 across = heads / PACK;
        for (i32 n = 0;; n++) {
            const Block block = find_block(cu_seqlens, num_seqs, min_tokens, number / across);
            if (block.seq < 0) {
                // The last to ask beyond the last tile: number is then that of all tiles and blocks together, less one.
                const i32 all = number - block.number * across - number % across;
                if (n > 0 && thread == 0 && number == all + static_cast<i32>(gridDim.x) - 1) *counter = 0;
                if (n > 0) signal_wait(&places.q_done, (n - 1) % 2);  // all have seen that the tile before is there
                if (thread == 0) places.info[n % 2].num_slices = 0;
                signal_arrive(&places.q_arrived);
                if (IO_F16) signal_arrive(&places.q_arrived);
                break;
            }
            const i32 seq = block.seq;
            const i32 seq_start = cu_seqlens[seq];
            const i32 seq_stop = cu_seqlens[seq + 1];
            // The last queries, which see the most rows, first.
            const i32 first_token = seq_start + ((seq_stop - seq_start - 1) / TOKENS - block.number) * TOKENS;
            const i32 stop_token = first_token + TOKENS < seq_stop ? first_token + TOKENS : seq_stop;
            const i32 first_head = number % across * PACK;
            const i32 kv_head = first_head / (heads / kv_heads);
            const i32 block_first = positions[first_token];
            const i32 stop = positions[stop_token - 1] + 1;
            const i32 start = window > 0 && block_first - window + 1 > 0 ? block_first - window + 1 : 0;
            const i32 num_slices = (stop - start + SLICE - 1) / SLICE;
            const i32 my_token = first_token + thread / PACK;
            const i32 my_position = my_token < stop_token ? positions[my_token] : -1;
            const i32 seq_id = seq_ids[seq];
            // Each stale row is reported once: by the first heads and the last block of queries that sees it.
            const i32 next_start =
                first_head ? 0 : stop_token == seq_stop ? 0x7FFFFFFF : window > 0 ? stop - window + 1 : 0;
            part_barrier(FETCHERS, GROUP_THREADS);  // all of them are through with the tile before
            Finder finder{page_table + static_cast<i64>(seq) * max_pages, page_epochs + static_cast<i64>(seq) * max_pages,
                          start, stop, page_size, {-1, 0}, {-1, 0}, 0};
            finder.begin(tags, thread);
            const i64 tile_head = static_cast<i64>(first_token) * heads + first_head;
#if KV_TYPE != 1
            const i64 head_bytes = static_cast<i64>(kv_head) * (HEAD_DIM / EACH * 16);
            Source source;
            source.k = reinterpret_cast<const u8*>(k_cache) + head_bytes + thread % LANES * 16;
            source.v = reinterpret_cast<const u8*>(v_cache) + head_bytes + thread % LANES * 16;
            source.row_bytes = static_cast<i64>(row_size) * static_cast<i32>(sizeof(kv_t));
#if KV_QUANTISED
            source.scales = kv_code_bytes(kv_heads * HEAD_DIM) + kv_head * (HEAD_DIM / KV_BLOCK * 2) -
                            static_cast<i32>(head_bytes) - thread % LANES * 16;
#endif
            u8* const stages = q_tile + Q_PANEL * PANELS + 4 * KV_TILE;
            finder.note(places.row_of[0], places.absent[slice % NOTED], tags, 0, thread, record, seq_id, layer, next_start);
            part_barrier(FETCHERS, GROUP_THREADS);
            i32 filled = 0;  // stages
            for (; filled < STAGES - 1; filled++) {
                fetch_unit(shared_address(stages) + filled * UNIT_BYTES, source, places.row_of[0], filled, thread);
                async_commit();
            }
            i32 emptied = 0;
#endif
#pragma unroll 1
            for (i32 j = 0; j < num_slices; j++, slice++) {
                const i32 place = slice % 2;
                const u32 last_phase = (slice / 2 % 2) ^ 1;
                if (j == num_slices - 1 && thread == 0) places.counted = atomic_add(counter, 1);
#if KV_TYPE == 1
                finder.note(places.row_of[slice % 3], places.absent[slice % NOTED], tags, j, thread, record, seq_id, layer,
                            next_start);
                part_barrier(FETCHERS, GROUP_THREADS);
                const i32* const row_of = places.row_of[slice % 3];
                if (slice >= 2) signal_wait(&places.k_done[place], last_phase);
                fetch_tile(k_address + place * KV_TILE, k_cache + kv_head * HEAD_DIM, row_of, row_size, thread);
                signal_arrive_behind_copies(&places.k_arrived[place]);
                signal_arrive(&places.k_arrived[place]);  // for `absent`
#else
                finder.note(places.row_of[(j + 1) % 3], places.absent[(slice + 1) % NOTED], tags, j + 1, thread, record,
                            seq_id, layer, next_start);
                part_barrier(FETCHERS, GROUP_THREADS);
#pragma unroll 1
                for (i32 unit = 0; unit < 2 * UNITS; unit++) {
                    const i32 ahead = unit + STAGES - 1;
                    const bool same = ahead < 2 * UNITS;
                    const i32* const row_of = places.row_of[(same ? j : j + 1) % 3];
                    if (same || j + 1 < num_slices) {
                        fetch_unit(shared_address(stages) + filled * UNIT_BYTES, source, row_of,
                                   same ? ahead : ahead - 2 * UNITS, thread);
                    }
                    async_commit();
                    filled = filled == STAGES - 1 ? 0 : filled + 1;
                    const bool is_k = unit < UNITS;
                    if (slice >= 2 && unit == 0) signal_wait(&places.k_done[place], last_phase);
                    if (slice >= 2 && unit == UNITS) signal_wait(&places.v_done[place], last_phase);
                    async_wait<STAGES - 1>();
                    u8* const tile = q_tile + Q_PANEL * PANELS + ((is_k ? 0 : 2) + place) * KV_TILE;
                    convert_unit(tile, stages + emptied * UNIT_BYTES, unit, thread);
                    emptied = emptied == STAGES - 1 ? 0 : emptied + 1;
                    if (unit != UNITS - 1 && unit != 2 * UNITS - 1) continue;
                    fence_products();
                    signal_arrive(is_k ? &places.k_arrived[place] : &places.v_arrived[place]);
                    if (j == 0 && is_k) {
                        if (n > 0) signal_wait(&places.q_done, (n - 1) % 2);
                        fetch_queries(q_tile, q + tile_head * HEAD_DIM, stop_token - first_token, heads, thread);
                        places.position_of[n % 2][thread] = my_position;
                        if (thread == 0) places.info[n % 2] = Info{tile_head, stop_token - first_token, start, num_slices};
                        if (IO_F16) signal_arrive_behind_copies(&places.q_arrived);
                        fence_products();
                        signal_arrive(&places.q_arrived);
                    }
                }
#endif
#if KV_TYPE == 1
                if (j == 0) {
                    if (n > 0) signal_wait(&places.q_done, (n - 1) % 2);
                    fetch_queries(q_tile, q + tile_head * HEAD_DIM, stop_token - first_token, heads, thread);
                    places.position_of[n % 2][thread] = my_position;
                    if (thread == 0) places.info[n % 2] = Info{tile_head, stop_token - first_token, start, num_slices};
                    if (IO_F16) signal_arrive_behind_copies(&places.q_arrived);
                    fence_products();
                    signal_arrive(&places.q_arrived);
                }
                if (slice >= 2) signal_wait(&places.v_done[place], last_phase);
                fetch_tile(v_address + place * KV_TILE, v_cache + kv_head * HEAD_DIM, row_of, row_size, thread);
                signal_arrive_behind_copies(&places.v_arrived[place]);
#endif
            }
            number = static_cast<i32>(gridDim.x) + places.counted;
        }
        async_commit();
        async_wait<0>();  // no thread ends before its copies
        return;
    }

    more_registers<GROUP_REGISTERS>();
    const i32 my_row = 64 * group + thread / WARP_SIZE * 16 + LANE() / 4;  // and eight rows further
    const i32 my_column = LANE() % 4 * 2;
    const u32 q_address = shared_address(q_tile) + 64 * group * 128;
    if (group == 1) part_arrive(TURN, GROUPS * GROUP_THREADS);
    i32 slice = 0;  // of all tiles
#pragma unroll 1
    for (i32 n = 0;; n++) {
        signal_wait(&places.q_arrived, n % 2);
        const i32 num_slices = places.info[n % 2].num_slices;
        if (num_slices == 0) break;
        float sum[SUMS];
        float peak[2] = {-INFINITY_F, -INFINITY_F};
        float total[2] = {0, 0};
        float score[SCORES];
        u32 weights[SCORES / 2];
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] = 0;
        float shrink[2];
        signal_wait(&places.k_arrived[slice % 2], slice / 2 % 2);
        fence_products();
        part_barrier(TURN + group, GROUPS * GROUP_THREADS);
        wgmma_begin();
        begin_scores(score, q_address, k_address + slice % 2 * KV_TILE);
        part_arrive(TURN + (group ^ 1), GROUPS * GROUP_THREADS);
        wgmma_wait<0>();
        wgmma_pin(score);
        if (num_slices == 1) signal_arrive(&places.q_done);
        soften(score, peak, total, shrink, places, n, slice, 0, my_row, my_column, scale, softcap, factor, window);
#pragma unroll
        for (int i = 0; i < SCORES / 2; i++) weights[i] = h2_pack(score[2 * i], score[2 * i + 1]);
        slice++;
#pragma unroll 1
        for (i32 j = 1; j < num_slices; j++, slice++) {
            const i32 place = slice % 2;
            signal_wait(&places.k_arrived[place], slice / 2 % 2);
            fence_products();
            part_barrier(TURN + group, GROUPS * GROUP_THREADS);
            wgmma_begin();
            begin_scores(score, q_address, k_address + place * KV_TILE);
            signal_wait(&places.v_arrived[place ^ 1], (slice - 1) / 2 % 2);
            fence_products();
            begin_sums(sum, weights, v_address + (place ^ 1) * KV_TILE);
            part_arrive(TURN + (group ^ 1), GROUPS * GROUP_THREADS);
            wgmma_wait<1>();
            wgmma_pin(score);
            if (j == num_slices - 1) signal_arrive(&places.q_done);
            soften(score, peak, total, shrink, places, n, slice, j, my_row, my_column, scale, softcap, factor, window);
            wgmma_wait<0>();
            wgmma_pin(sum);
            signal_arrive(&places.v_done[place ^ 1]);
#pragma unroll
            for (int i = 0; i < SUMS; i++) sum[i] *= shrink[i / 2 % 2];
#pragma unroll
            for (int i = 0; i < SCORES / 2; i++) weights[i] = h2_pack(score[2 * i], score[2 * i + 1]);
        }
        const i32 place = (slice - 1) % 2;
        signal_wait(&places.v_arrived[place], (slice - 1) / 2 % 2);
        fence_products();
        wgmma_begin();
        begin_sums(sum, weights, v_address + place * KV_TILE);
        wgmma_wait<0>();
        wgmma_pin(sum);
        signal_arrive(&places.v_done[place]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            total[r] += shfl_xor(total[r], 1);
            total[r] += shfl_xor(total[r], 2);
            const float share = total[r] == 0 ? 0 : 1 / total[r];
            const i32 row = my_row + 8 * r;
            if (row / PACK >= places.info[n % 2].tokens) continue;
            const i64 head = places.info[n % 2].first_head + row / PACK * heads + row % PACK;
            io_t* const target = out + head * HEAD_DIM + my_column;
#pragma unroll
            for (int i = 0; i < SUMS / 4; i++) {
                store_pair(target + 8 * i, sum[4 * i + 2 * r] * share, sum[4 * i + 2 * r + 1] * share);
            }
        }
    }
    if (group == 0) part_barrier(TURN, GROUPS * GROUP_THREADS);  // for the other's last arrival
}
