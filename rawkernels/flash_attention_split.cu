// flash_attention_split: causal attention of few queries per sequence; a sequence's rows are spread over warps and blocks,
// and the last block to finish puts the parts together
//
// Shapes    q, out [T,heads,HEAD_DIM] f32, or f16 with IO_F16; k_cache, v_cache [rows, row size] kv_t; tags [rows] u32
//           cu_seqlens [S+1], kv_lens, seq_ids [S] i32; page_table [S,max_pages] i32, page_epochs alike u32
//           parts [S * TOKENS,heads,splits,HEAD_DIM + 2] f32: sums, then highest score and total weight
//           counters [S * chunks] i32: zero before and after the launch
// Launch    grid (splits, kv_heads * ceil(group / HEADS) = chunks, S), block (WARPS * WARP_SIZE). A block has HEADS query
//           heads of one kv head and up to TOKENS tokens. Blocks of sequences with more tokens do nothing, nor do those for which
//           there would be less than least_rows rows
// Shared    dynamic: for each warp STAGES slices of K and V, and tiles of one if rows are not stored as f16, unless DIRECT;
//           behind the loop, sums of all warps
// Sync      a warp takes every n-th slice of KEYS rows; copies of the next slices run ahead of the one it works on. Warps
//           meet behind the loop. Each block of a chunk then fences its parts and counts; who counts last combines them in
//           the order of splits and resets the counter
// Numerics  sums in f32. With EXACT, rows 0-7 of a tile of 16 hold q and the weights rounded to f16, and rows 8-15 what the
//           rounding took away, so only K and V in other types than f16 are rounded to f16, and f32 rows are taken apart in
//           the same way; with DIRECT and quantised K common/kv_whole.cuh has q. Without it as in flash_attention. A row with a foreign tag is absent: its K and V are zero and its
//           score is -infinity
// Defines   KV_TYPE, HEAD_DIM (multiple of 16), IO_F16, HAS_SOFTCAP, HEADS, TOKENS, EXACT, KEYS (16 or 32), STAGES, WARPS; DIRECT, for
//           NVIDIA, rows that are not f16, HEAD_DIM a multiple of 64: lanes convert rows to what they supply to products
// SharedLimit   sm_90=232448 sm_80=166912
// Scratch   sm_80=8 sm_90=8 gfx1151=36 gfx1100=36
// Compile   KV_TYPE=0,1,2,3,4 HEAD_DIM=64 IO_F16=1 HAS_SOFTCAP=0 HEADS=3 TOKENS=1 EXACT=1 KEYS=16 STAGES=1 WARPS=4 DIRECT=0;
//           KV_TYPE=1 HEAD_DIM=80,96 IO_F16=1 HAS_SOFTCAP=0 HEADS=16 TOKENS=1 EXACT=1 KEYS=16 STAGES=1 WARPS=4 DIRECT=0;
//           KV_TYPE=1 HEAD_DIM=192,256 IO_F16=1 HAS_SOFTCAP=1 HEADS=8 TOKENS=1 EXACT=1 KEYS=16 STAGES=1 WARPS=2 DIRECT=0;
//           KV_TYPE=1 HEAD_DIM=128 IO_F16=0,1 HAS_SOFTCAP=0 HEADS=4 TOKENS=8 EXACT=0 KEYS=16 STAGES=1 WARPS=4 DIRECT=0;
//           KV_TYPE=1 HEAD_DIM=64,128 IO_F16=1 HAS_SOFTCAP=0 HEADS=4 TOKENS=1 EXACT=1 KEYS=16,32 STAGES=3 WARPS=8 DIRECT=0
//           @sm_80 @sm_90;
//           KV_TYPE=0,2,3,4 HEAD_DIM=64,128 IO_F16=1 HAS_SOFTCAP=0 HEADS=4 TOKENS=1 EXACT=1 KEYS=16 STAGES=2 WARPS=8 DIRECT=1
//           @sm_80 @sm_90;
//           KV_TYPE=3,4 HEAD_DIM=64,128 IO_F16=1 HAS_SOFTCAP=0 HEADS=4 TOKENS=1 EXACT=1 KEYS=32 STAGES=2 WARPS=8 DIRECT=1
//           @sm_80 @sm_90
#include "common/attention.cuh"
#if DIRECT
#include "common/kv_fragments.cuh"
#endif

#define WHOLE (DIRECT && EXACT && KV_TYPE >= 3)  // scores in whole numbers
#if WHOLE
#include "common/kv_whole.cuh"
#endif

#define THREADS (WARPS * WARP_SIZE)
#define TILE_USED (EXACT ? 8 : 16)  // rows of a tile that are different queries
#define ROWS (HEADS * TOKENS)
#define TILES ((ROWS + TILE_USED - 1) / TILE_USED)
#define ALL_ROWS (TILES * TILE_USED)
#define LD (HEAD_DIM + 8)  // elements per row of a tile
#define KEY_TILES (KEYS / 16)
#define DIM_TILES (HEAD_DIM / 16)
#define PIECES (HEAD_DIM / KV_PIECE)
#define TERMS (KV_TYPE == 0 && EXACT ? 2 : 1)  // f16 numbers whose sum is an element of K or V
#define TILE_SIZE (KEYS * LD)
#define TILES_SIZE (2 * TERMS * TILE_SIZE)  // K, V, then what their rounding left
// What is copied of a row of K or V: the head's elements or codes, then the 16-byte pieces in which its scales lie.
#define CODE_BYTES (HEAD_DIM * 16 / KV_PIECE * (KV_TYPE == 0 ? 2 : 1))
#define SCALE_BYTES (KV_QUANTISED ? HEAD_DIM / KV_BLOCK * 2 : 0)
#define SCALE_PIECES (!KV_QUANTISED ? 0 : SCALE_BYTES <= 16 && 16 % SCALE_BYTES == 0 ? 1 : 2)
#define RAW_ROW (CODE_BYTES + 16 * SCALE_PIECES)
#define RAW_PIECES (RAW_ROW / 16)
// A slice in flight: tiles of f16 if that is how rows are stored, else as they are stored.
#define STAGE_BYTES (KV_TYPE == 1 ? 2 * TILES_SIZE : 2 * KEYS * RAW_ROW)
#define WARP_BYTES (STAGES * STAGE_BYTES + (KV_TYPE == 1 || DIRECT ? 0 : 2 * TILES_SIZE))
#define KEPT (DIRECT && !WHOLE && TILES * DIM_TILES <= 8)  // queries are kept in registers
#define PART (HEAD_DIM + 2)
#define SMALL 32768

// Weights so far may be 2^SLACK at most before all of them are scaled down to a new highest score.
#define SLACK 8

// With EXACT, both rows that a lane of NVIDIA's tiles has elements of are of one query: the first has its numbers, the other
// what rounding took away from them.
constexpr bool TWINS = EXACT && TILE_ROWS == 2;
constexpr int SLOTS = TWINS ? 1 : TILE_ROWS;
DEVICE constexpr int slot_of(int i) { return TWINS ? 0 : tile_c_slot(i); }
DEVICE constexpr bool is_twin(int i) { return TWINS && tile_c_slot(i) == 1; }

// A head's codes in the cache, and how far behind them the piece lies in which its scales begin.
struct Head {
    const u8 *k, *v;
    i32 row_bytes, scale_piece, scale_bytes;  // from there to the end of its scales

    DEVICE Head(const kv_t* k_cache, const kv_t* v_cache, i32 width, i32 row_size, i32 kv_head) {
        const i32 first = kv_head * CODE_BYTES;
        k = reinterpret_cast<const u8*>(k_cache) + first;
        v = reinterpret_cast<const u8*>(v_cache) + first;
        row_bytes = row_size * static_cast<i32>(sizeof(kv_t));
        scale_piece = scale_bytes = 0;
#if KV_QUANTISED
        const i32 scales = kv_code_bytes(width) + kv_head * SCALE_BYTES;
        scale_piece = scales / 16 * 16 - first;
        scale_bytes = scales % 16 + SCALE_BYTES;
#endif
        (void)width;
    }
};

// Goes through the positions of a warp's slices without divisions.
struct Walk {
    i32 position, slot, offset;  // the page's number in its sequence, and the row in the page

    DEVICE Walk(i32 first, i32 page_size) : position(first), slot(first / page_size), offset(first % page_size) {}

    DEVICE void advance(i32 rows, i32 whole_pages, i32 rest, i32 page_size) {
        position += rows;
        slot += whole_pages;
        offset += rest;
        if (offset >= page_size) offset -= page_size, slot++;
    }

    DEVICE Row row(const i32* RESTRICT pages, const u32* RESTRICT epochs, i32 stop, i32 page_size) const {
        return position < stop ? Row{pages[slot] * page_size + offset, epochs[slot]} : Row{-1, 0};
    }
};

// Begins the copies of one slice. Rows that are not wanted keep what was there.
DEVICE void fetch_slice(u8* stage, const Head& head, i32 my_row) {
    constexpr i32 code_pieces = CODE_BYTES / 16;
#pragma unroll
    for (i32 i = LANE(); i < (KEYS * code_pieces + WARP_SIZE - 1) / WARP_SIZE * WARP_SIZE; i += WARP_SIZE) {
        const i32 key = i / code_pieces;
        const i32 piece = i % code_pieces;
        const i32 row = shfl(my_row, key);
        const bool wanted = i < KEYS * code_pieces && row >= 0;
        const i64 offset = static_cast<i64>(row) * head.row_bytes + 16 * piece;
#if KV_TYPE == 1
        u8* const k_target = stage + 2 * (key * LD + 8 * piece);
        u8* const v_target = k_target + 2 * TILE_SIZE;
#elif WHOLE
        u8* const k_target = stage + key_slot(key) * RAW_ROW + 16 * piece;
        u8* const v_target = stage + (KEYS + key) * RAW_ROW + 16 * piece;
#else
#if DIRECT
        u8* const k_target = stage + key * RAW_ROW + 16 * stored_piece(key, piece);
#else
        u8* const k_target = stage + key * RAW_ROW + 16 * piece;
#endif
        u8* const v_target = k_target + KEYS * RAW_ROW;
#endif
        async_copy16_where(k_target, head.k + offset, wanted);
        async_copy16_where(v_target, head.v + offset, wanted);
    }
#if KV_QUANTISED
#pragma unroll
    for (i32 i = LANE(); i < (2 * KEYS * SCALE_PIECES + WARP_SIZE - 1) / WARP_SIZE * WARP_SIZE; i += WARP_SIZE) {
        const i32 key = i / SCALE_PIECES % KEYS;
        const i32 piece = i % SCALE_PIECES;
        const bool is_v = i >= KEYS * SCALE_PIECES;
        const i32 row = shfl(my_row, key);
        const bool wanted = i < 2 * KEYS * SCALE_PIECES && row >= 0 && 16 * piece < head.scale_bytes;
        const i64 offset = static_cast<i64>(row) * head.row_bytes + head.scale_piece + 16 * piece;
#if WHOLE
        const i32 place = is_v ? KEYS + key : key_slot(key);
#else
        const i32 place = is_v ? KEYS + key : key;
#endif
        async_copy16_where(stage + place * RAW_ROW + CODE_BYTES + 16 * piece, (is_v ? head.v : head.k) + offset, wanted);
    }
#endif
    async_commit();
}

#if KV_TYPE == 1
// The rows whose bits are set become zeros.
DEVICE void clear_rows(f16* tiles, u32 missing) {
    for (i32 i = LANE(); i < 2 * KEYS * (HEAD_DIM / 8); i += WARP_SIZE) {
        const i32 row = i / (HEAD_DIM / 8);
        if (missing >> row % KEYS & 1) store16(tiles + row * LD + i % (HEAD_DIM / 8) * 8, u32x4{0, 0, 0, 0});
    }
}
#elif DIRECT
// The rows of V whose bits are set become zeros. Those of K may be anything: their scores are not used.
DEVICE void clear_rows(u8* stage, u32 missing) {
    for (i32 i = LANE(); i < KEYS * RAW_PIECES; i += WARP_SIZE) {
        if (missing >> i / RAW_PIECES & 1) store16(stage + KEYS * RAW_ROW + 16 * i, u32x4{0, 0, 0, 0});
    }
}
#else
// A slice as tiles of f16; the rows whose bits are set as zeros.
DEVICE void unpack_slice(f16* tiles, const u8* stage, u32 missing, i32 width, i32 first) {
    for (i32 i = LANE(); i < 2 * KEYS * PIECES; i += WARP_SIZE) {
        const i32 row = i / PIECES;  // of K, then of V
        const i32 d = i % PIECES * KV_PIECE;
        const u8* const source = stage + row * RAW_ROW;
        const u8* const codes = source + i % PIECES * (CODE_BYTES / PIECES);
        f16* const target = tiles + row * LD + d;
        const bool own = !(missing >> row % KEYS & 1);
        u16 scale = 0;
#if KV_QUANTISED
        const i32 scales = (kv_code_bytes(width) + first / KV_BLOCK * 2) % 16;
        scale = *reinterpret_cast<const u16*>(source + CODE_BYTES + scales + d / KV_BLOCK * 2);
#endif
        u32 pairs[KV_PIECE / 2];
        kv_unpack_piece(codes, scale, pairs);
#pragma unroll
        for (int j = 0; j < KV_PIECE / 2; j += 4) {
            store16(target + 2 * j, own ? u32x4{pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]} : u32x4{0, 0, 0, 0});
        }
#if KV_TYPE == 0 && EXACT
        kv_unpack_rest(codes, pairs);
        store16(target + 2 * TILE_SIZE, own ? u32x4{pairs[0], pairs[1], pairs[2], pairs[3]} : u32x4{0, 0, 0, 0});
#endif
    }
}
#endif

#if DIRECT
// Queries in the order in which key_pairs has the elements of a key.
DEVICE void load_query(FragA& query, const f16* q_tile, int d) {
    const f16* const row = q_tile + LANE() / 4 * LD;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const f16* const pair = row + key_dim(2 * d + j);
        query.r[2 * j] = *reinterpret_cast<const u32*>(pair);
        query.r[2 * j + 1] = *reinterpret_cast<const u32*>(pair + 8 * LD);
    }
}
#endif

// Scores of rows that a query does not see, or that are missing, become -infinity.
DEVICE void hide(FragC (&score)[KEY_TILES], u32 missing, i32 first_row, i32 first_position, i32 base, i32 window) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
        for (int i = 0; i < TILE_C_ELEMENTS; i++) {
            if (is_twin(i)) continue;
            const i32 column = 16 * n + tile_c_col(i);
            bool visible = !(missing >> column & 1);
            if (TOKENS > 1) {
                const i32 distance = first_position + (first_row + tile_row_of(tile_c_slot(i))) / HEADS - (base + column);
                visible = visible && distance >= 0 && (window <= 0 || distance < window);
            }
            if (!visible) score[n].x[i] = -INFINITY_F;
        }
    }
}

// The head's element that element i of a row's sum d is.
DEVICE i32 dim_of(int d, int i) {
#if DIRECT
    return value_dim(tile_c_col(i) % 8, 2 * d + tile_c_col(i) / 8);
#else
    return 16 * d + tile_c_col(i);
#endif
}

KERNEL(THREADS) flash_attention_split(const io_t* RESTRICT q, const kv_t* RESTRICT k_cache,
                                      const kv_t* RESTRICT v_cache, const u32* RESTRICT tags,
                                      const i32* RESTRICT cu_seqlens, const i32* RESTRICT kv_lens,
                                      const i32* RESTRICT seq_ids, const i32* RESTRICT page_table,
                                      const u32* RESTRICT page_epochs, i32* record, float* parts, i32* counters,
                                      io_t* RESTRICT out, float scale, float softcap, float factor, i32 window,
                                      i32 kv_heads, i32 group, i32 row_size, i32 max_pages, i32 page_size, i32 layer,
                                      i32 least_rows) {
    GRID_DEPENDENCY();
    DYNAMIC_SHARED(u8, dynamic);
    SHARED f16 q_tile[TILES * 16 * LD];
    SHARED float peak_of[WARPS][ALL_ROWS];
    SHARED float total_of[WARPS][ALL_ROWS];
    SHARED i32 is_last;
    const i32 seq = blockIdx.z;
    const i32 lane = LANE();
    const i32 warp = WARP_ID();
    const i32 block = blockIdx.x;
    const i32* const pages = page_table + static_cast<i64>(seq) * max_pages;
    const u32* const epochs = page_epochs + static_cast<i64>(seq) * max_pages;
    // Where the lane's first row will lie, unless a window says otherwise: read before it is known whether there is such a
    // row, since nothing can be copied until all of this has come.
    const i32 guess = (block * WARPS + warp) * KEYS + lane;
    const i32 guess_slot = guess / page_size < max_pages ? guess / page_size : max_pages - 1;
    const i32 guess_page = pages[guess_slot];
    const u32 guess_epoch = epochs[guess_slot];
    const i32 first_token = cu_seqlens[seq];
    const i32 num_tokens = cu_seqlens[seq + 1] - first_token;
    const i32 stop = kv_lens[seq];
    if (num_tokens < 1 || num_tokens > TOKENS) return;  // the whole block; also when copy_inputs has emptied the block
    const i32 chunks = gridDim.y / kv_heads;
    const i32 kv_head = blockIdx.y / chunks;
    const i32 chunk = blockIdx.y % chunks;
    const i32 first_head = kv_head * group + chunk * HEADS;
    const i32 num_heads = (chunk + 1) * HEADS < group ? HEADS : group - chunk * HEADS;
    const i64 heads = static_cast<i64>(kv_heads) * group;
    const i32 width = kv_heads * HEAD_DIM;

    const i32 first_position = stop - num_tokens;
    const i32 start = window > 0 && first_position - window + 1 > 0 ? first_position - window + 1 : 0;
    // Putting parts together takes as long as a block needs for SMALL elements of K.
    const i32 num_rows = stop - start;
    const i32 wanted = num_rows <= SMALL / HEAD_DIM ? 1 : (num_rows + least_rows - 1) / least_rows;
    const i32 num_blocks = wanted < static_cast<i32>(gridDim.x) ? wanted : gridDim.x;
    if (block >= num_blocks) return;
    const i32 stride = num_blocks * WARPS * KEYS;
    const i32 stride_pages = stride / page_size;
    const i32 stride_rest = stride % page_size;
    const Head head_rows(k_cache, v_cache, width, row_size, kv_head);
    Walk walk(start + guess, page_size);
    const i32 my_stop = lane < KEYS ? stop : 0;
    u8* const my_stages = dynamic + warp * WARP_BYTES;

    // Slices in flight: index 0 is worked on next. Their tags are looked at when they are worked on.
    Row rows[STAGES];
    u32 found[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s == 0 && start == 0) {
            rows[0] = guess < my_stop ? Row{guess_page * page_size + guess % page_size, guess_epoch} : Row{-1, 0};
        } else {
            rows[s] = walk.row(pages, epochs, my_stop, page_size);
        }
        walk.advance(stride, stride_pages, stride_rest, page_size);
    }
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        found[s] = rows[s].index >= 0 ? tags[rows[s].index] : 0;
        fetch_slice(my_stages + s * STAGE_BYTES, head_rows, rows[s].index);
    }
    Row next = walk.row(pages, epochs, my_stop, page_size);

    // Queries: row r of all rows is head r % HEADS of token r / HEADS.
#if WHOLE
    static_assert(TILES * WHOLE_BYTES <= sizeof(q_tile), "tiles in bytes take no more than those of f16");
    u8* const whole_tiles = reinterpret_cast<u8*>(q_tile);
    for (i32 row = warp; row < ALL_ROWS; row += WARPS) {
        const bool exists = row < HEADS && row < num_heads;
        const io_t* const source = q + (exists ? (first_token * heads + first_head + row) * HEAD_DIM : 0);
        float x[WHOLE_BLOCKS];
#pragma unroll
        for (int b = 0; b < WHOLE_BLOCKS; b++) x[b] = exists ? io_load(source[b * KV_BLOCK + lane]) : 0.0f;
        note_query(whole_tiles + row / 8 * WHOLE_BYTES, row % 8, x);
    }
#else
    for (i32 i = threadIdx.x; i < ALL_ROWS * (HEAD_DIM / 8); i += THREADS) {
        const i32 row = i / (HEAD_DIM / 8);
        const i32 d = i % (HEAD_DIM / 8) * 8;
        float values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (row / HEADS < num_tokens && row % HEADS < num_heads) {
            io_load8(q + ((first_token + row / HEADS) * heads + first_head + row % HEADS) * HEAD_DIM + d, values);
        }
        f16* const target = q_tile + (row / TILE_USED * 16 + row % TILE_USED) * LD + d;
#pragma unroll
        for (int j = 0; j < 8; j++) target[j] = to_f16_saturated(values[j]);
#if EXACT
#pragma unroll
        for (int j = 0; j < 8; j++) target[8 * LD + j] = to_f16_saturated(values[j] - to_f32(to_f16_saturated(values[j])));
#endif
    }
#endif
    FragC sum[TILES][DIM_TILES];
    // Of each query the score that weights are relative to, which may be 2^SLACK below the highest, its exponent, and the total
    // of the weights of the lane's own columns.
    float peak[TILES][SLOTS];
    float anchor[TILES][SLOTS];
    float total[TILES][SLOTS];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int d = 0; d < DIM_TILES; d++) tile_zero(sum[m][d]);
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) peak[m][slot] = -INFINITY_F, anchor[m][slot] = total[m][slot] = 0;
    }
    BARRIER();
#if DIRECT
    // Bytes from a row to its head's scales.
    i32 scales = CODE_BYTES;
#if KV_QUANTISED
    scales += (kv_code_bytes(width) + kv_head * (HEAD_DIM / KV_BLOCK * 2)) % 16;
#endif
#if WHOLE
    WholeQuery query[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) query[m].load(whole_tiles + m * WHOLE_BYTES);
#elif KEPT
    FragA query[TILES][DIM_TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int d = 0; d < DIM_TILES; d++) load_query(query[m][d], q_tile + 16 * m * LD, d);
    }
#endif
#endif

    const i32 warp_start = start + guess - lane;
    i32 slot_now = 0;
    for (i32 base = warp_start; base < stop; base += stride) {
        const i32 slot_ahead = slot_now == 0 ? STAGES - 1 : slot_now - 1;
        rows[STAGES - 1] = next;
        found[STAGES - 1] = next.index >= 0 ? tags[next.index] : 0;
        fetch_slice(my_stages + slot_ahead * STAGE_BYTES, head_rows, next.index);
        walk.advance(stride, stride_pages, stride_rest, page_size);
        next = walk.row(pages, epochs, my_stop, page_size);
        async_wait<STAGES - 1>();
        u8* const stage = my_stages + slot_now * STAGE_BYTES;
        const bool own = rows[0].index >= 0 && found[0] == rows[0].expected;
        if (rows[0].index >= 0 && !own && blockIdx.y == 0) {
            report_tag(record, seq_ids[seq], layer, rows[0], base + lane, page_size, found[0]);
        }
        const u32 missing = static_cast<u32>(ballot(lane < KEYS && !own));
        WARP_BARRIER();
#if KV_TYPE == 1
        f16* const tiles = reinterpret_cast<f16*>(stage);
        if (missing) {
            clear_rows(tiles, missing);
            WARP_BARRIER();
        }
#elif DIRECT
        if (missing) {
            clear_rows(stage, missing);
            WARP_BARRIER();
        }
#else
        f16* const tiles = reinterpret_cast<f16*>(my_stages + STAGES * STAGE_BYTES);
        unpack_slice(tiles, stage, missing, width, kv_head * HEAD_DIM);
        WARP_BARRIER();
#endif
        FragC score[TILES][KEY_TILES];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) tile_zero(score[m][n]);
        }
#if WHOLE
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            FragC of_keys[TILES];
            whole_scores<TILES>(of_keys, query, stage + 16 * n * RAW_ROW, RAW_ROW, scales);
#pragma unroll
            for (int m = 0; m < TILES; m++) score[m][n] = of_keys[m];
        }
#elif DIRECT
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            const i32 key = 16 * n + lane / 4;
            const u8* const row = stage + key * RAW_ROW;
            u32 pairs[2][KEY_PAIRS];
            u32 rest[2][KEY_PAIRS];
            key_pairs(row, row + scales, key, pairs[0], rest[0]);
            key_pairs(row + 8 * RAW_ROW, row + 8 * RAW_ROW + scales, key + 8, pairs[1], rest[1]);
#pragma unroll
            for (int d = 0; d < DIM_TILES; d++) {
#pragma unroll
                for (int m = 0; m < TILES; m++) {
#if KEPT
                    const FragA& rows_of_q = query[m][d];
#else
                    FragA rows_of_q;
                    load_query(rows_of_q, q_tile + 16 * m * LD, d);
#endif
                    const FragB keys{pairs[0][2 * d], pairs[0][2 * d + 1], pairs[1][2 * d], pairs[1][2 * d + 1]};
                    tile_mma(score[m][n], rows_of_q, keys);
#if KV_TYPE == 0 && EXACT
                    const FragB rests{rest[0][2 * d], rest[0][2 * d + 1], rest[1][2 * d], rest[1][2 * d + 1]};
                    tile_mma(score[m][n], rows_of_q, rests);
#endif
                }
            }
        }
#else
#pragma unroll
        for (int d = 0; d < DIM_TILES; d++) {
            FragA query[TILES];
#pragma unroll
            for (int m = 0; m < TILES; m++) tile_load_a(query[m], q_tile + 16 * m * LD + 16 * d, LD);
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
                for (int term = 0; term < TERMS; term++) {
                    FragB keys;
                    tile_load_b(keys, tiles + 2 * term * TILE_SIZE + 16 * n * LD + 16 * d, LD);
#pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        tile_mma(score[m][n], query[m], keys);
                        tile_settle(score[m][n]);
                    }
                }
            }
        }
#endif
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            float highest[SLOTS];
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) highest[slot] = -INFINITY_F;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                if (EXACT && !WHOLE) tile_add_halves(score[m][n]);
#pragma unroll
                for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                    if (!is_twin(i)) score[m][n].x[i] = score_of(score[m][n].x[i], scale, softcap);
                }
            }
            if (TOKENS > 1 || missing) {
                hide(score[m], missing, 16 * m, first_position, base, window);
            }
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
                for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                    if (!is_twin(i)) highest[slot_of(i)] = fmaxf(highest[slot_of(i)], score[m][n].x[i]);
                }
            }
            bool higher = false;
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                highest[slot] = fmaxf(peak[m][slot], tile_row_max(highest[slot]));
                higher = higher || highest[slot] * factor > peak[m][slot] * factor + SLACK;
            }
            if (TILE_ROWS == 1 || ballot(higher)) {  // AMD's compiler takes more registers for two ways than it has
                float shrink[SLOTS];
#pragma unroll
                for (int slot = 0; slot < SLOTS; slot++) {
                    anchor[m][slot] = anchor_of(highest[slot], factor);
                    shrink[slot] = weight_of(peak[m][slot], factor, anchor[m][slot]);
                    peak[m][slot] = highest[slot];
                    total[m][slot] *= shrink[slot];
                }
#pragma unroll
                for (int d = 0; d < DIM_TILES; d++) {
#pragma unroll
                    for (int i = 0; i < TILE_C_ELEMENTS; i++) sum[m][d].x[i] *= shrink[slot_of(i)];
                }
            }
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
                for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                    if (is_twin(i)) continue;
                    const float weight = weight_of(score[m][n].x[i], factor, anchor[m][slot_of(i)]);
                    total[m][slot_of(i)] += weight;
                    const float rest = weight - to_f32(to_f16(weight));
                    const bool is_rest = EXACT && !TWINS && tile_row_of(tile_c_slot(i)) >= 8;
                    score[m][n].x[i] = is_rest ? rest : weight;
                    if (TWINS) score[m][n].x[i + 2] = rest;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            FragA weights[TILES];
#pragma unroll
            for (int m = 0; m < TILES; m++) tile_c_to_a(weights[m], score[m][n]);
#if DIRECT
            const i32 key = 16 * n + lane % 4 * 2;
            const u8* const row = stage + (KEYS + key) * RAW_ROW;
            ValueRun runs[4];
#pragma unroll
            for (int unit = 0; unit < VALUE_UNITS; unit++) {
                u32 pairs[2][8];
                u32 rest[2][8];
                if (unit % RUN_UNITS == 0) {
#pragma unroll
                    for (int r = 0; r < 4; r++) runs[r].load(row + (r % 2 + r / 2 * 8) * RAW_ROW, key + r % 2 + r / 2 * 8, unit);
                }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const u8* const first = row + 8 * r * RAW_ROW + scales;
                    value_pairs(runs[2 * r], runs[2 * r + 1], first, first + RAW_ROW, unit, pairs[r], rest[r]);
                }
#pragma unroll
                for (int e = 0; e < 8; e += 2) {
#pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        FragC& into = sum[m][4 * unit + e / 2];
                        tile_mma(into, weights[m], FragB{pairs[0][e], pairs[1][e], pairs[0][e + 1], pairs[1][e + 1]});
#if KV_TYPE == 0 && EXACT
                        tile_mma(into, weights[m], FragB{rest[0][e], rest[1][e], rest[0][e + 1], rest[1][e + 1]});
#endif
                    }
                }
            }
#else
#pragma unroll
            for (int d = 0; d < DIM_TILES; d++) {
#pragma unroll
                for (int term = 0; term < TERMS; term++) {
                    FragB values;
                    tile_load_b_rows(values, tiles + (2 * term + 1) * TILE_SIZE + 16 * n * LD + 16 * d, LD);
#pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        tile_mma(sum[m][d], weights[m], values);
                        tile_settle(sum[m][d]);
                    }
                }
            }
#endif
        }
        WARP_BARRIER();  // before the next copies come into the slice
        slot_now = slot_now == STAGES - 1 ? 0 : slot_now + 1;
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            rows[s] = rows[s + 1];
            found[s] = found[s + 1];
        }
    }

    // All warps' sums, brought to the highest score that any of them saw.
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            const float whole = tile_row_sum(total[m][slot]);
            if (tile_row_of(slot) < TILE_USED) {
                peak_of[warp][TILE_USED * m + tile_row_of(slot)] = peak[m][slot];
                total_of[warp][TILE_USED * m + tile_row_of(slot)] = whole;
            }
        }
#pragma unroll
        for (int d = 0; d < DIM_TILES; d++) {
            if (EXACT) tile_add_halves(sum[m][d]);
        }
    }
    async_wait<0>();
    BARRIER();
    float* const merged = reinterpret_cast<float*>(dynamic);  // [WARPS][ALL_ROWS][HEAD_DIM]
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int i = 0; i < TILE_C_ELEMENTS; i++) {
            if (tile_c_row(i) >= TILE_USED) continue;
            const i32 row = TILE_USED * m + tile_c_row(i);
            float highest = -INFINITY_F;
#pragma unroll
            for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, peak_of[w][row]);
            const float share = weight_of(peak[m][slot_of(i)], factor, anchor_of(highest, factor));
#pragma unroll
            for (int d = 0; d < DIM_TILES; d++) {
                merged[(warp * ALL_ROWS + row) * HEAD_DIM + dim_of(d, i)] = sum[m][d].x[i] * share;
            }
        }
    }
    BARRIER();
    const i32 splits = gridDim.x;
    for (i32 i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const i32 row = i / HEAD_DIM;
        const i32 d = i % HEAD_DIM;
        const i32 t = row / HEADS;
        const i32 head = row % HEADS;
        if (t >= num_tokens || head >= num_heads) continue;
        float highest = -INFINITY_F;
        float value = 0;
        float whole = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, peak_of[w][row]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            value += merged[(w * ALL_ROWS + row) * HEAD_DIM + d];
            whole += total_of[w][row] * weight_of(peak_of[w][row], factor, anchor_of(highest, factor));
        }
        if (num_blocks == 1) {
            out[((first_token + t) * heads + first_head + head) * HEAD_DIM + d] = io_store(whole == 0 ? 0 : value / whole);
        } else {
            float* const part = parts + (((static_cast<i64>(seq) * TOKENS + t) * heads + first_head + head) * splits + block) * PART;
            part[d] = value;
            if (d == 0) part[HEAD_DIM] = highest, part[HEAD_DIM + 1] = whole;
        }
    }
    if (num_blocks == 1) return;  // the whole block

    DEVICE_FENCE();
    BARRIER();
    i32* const counter = counters + static_cast<i64>(seq) * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) is_last = atomic_add(counter, 1) == num_blocks - 1;
    BARRIER();
    if (!is_last) return;  // the whole block
    DEVICE_FENCE();
    if (threadIdx.x == 0) *counter = 0;
    float* const shares = merged;                     // [ROWS][num_blocks]
    float* const totals = merged + ROWS * num_blocks;  // [ROWS]
    const volatile float* const theirs = parts;        // written by other blocks while this one ran
    for (i32 row = warp; row < ROWS; row += WARPS) {
        const i32 t = row / HEADS;
        const i32 head = row % HEADS;
        const bool exists = t < num_tokens && head < num_heads;
        const i64 part = ((static_cast<i64>(seq) * TOKENS + t) * heads + first_head + head) * splits * PART + HEAD_DIM;
        float highest = -INFINITY_F;
        for (i32 s = lane; exists && s < num_blocks; s += WARP_SIZE) {
            shares[row * num_blocks + s] = theirs[part + s * PART];
            highest = fmaxf(highest, shares[row * num_blocks + s]);
        }
        highest = warp_max(highest);
        float whole = 0;
        for (i32 s = lane; exists && s < num_blocks; s += WARP_SIZE) {
            const float share = weight_of(shares[row * num_blocks + s], factor, anchor_of(highest, factor));
            whole += share * theirs[part + s * PART + 1];
            shares[row * num_blocks + s] = share;
        }
        whole = warp_sum(whole);
        if (lane == 0) totals[row] = whole;
    }
    BARRIER();
    for (i32 i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const i32 row = i / HEAD_DIM;
        const i32 d = i % HEAD_DIM;
        const i32 t = row / HEADS;
        const i32 head = row % HEADS;
        if (t >= num_tokens || head >= num_heads) continue;
        const i64 part = ((static_cast<i64>(seq) * TOKENS + t) * heads + first_head + head) * splits * PART + d;
        float value = 0;
#pragma unroll 8
        for (i32 s = 0; s < num_blocks; s++) value += shares[row * num_blocks + s] * theirs[part + s * PART];
        const float whole = totals[row];
        out[((first_token + t) * heads + first_head + head) * HEAD_DIM + d] = io_store(whole == 0 ? 0 : value / whole);
    }
}
