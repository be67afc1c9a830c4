// flash_attention: causal attention of many queries over their sequence's pages, on matrix instructions
//
// Shapes    q, out [T,heads,HEAD_DIM] f32, or f16 with IO_F16; k_cache, v_cache [rows, row size] kv_t; tags [rows] u32
//           positions [T], cu_seqlens [S+1], seq_ids [S] i32; page_table [S,max_pages] i32, page_epochs alike u32
// Launch    grid (heads / PACK, ceil(longest / TOKENS), S), block (WARPS * WARP_SIZE). A block has TOKENS queries of PACK
//           heads that share a kv head: row r of its tile is head r % PACK of token r / PACK. Blocks behind a sequence's
//           end, and those of sequences with fewer than min_tokens tokens, do nothing
// Shared    dynamic: K and V of two slices of SLICE keys; the tile of queries, with Q_SHARED behind them, else where they
//           will lie
// Sync      slice j: its copies are waited for; barrier, behind which all see them and nobody reads slice j - 1; copies of
//           slice j + 1 begin, in place of j - 1. The rows of slice j + 2 are looked up meanwhile, and are in row_of and
//           absent behind the next barrier
// Numerics  q, K, V and the weights rounded to f16, sums in f32. A row with a foreign tag is absent: its K and V are zero
//           and its score is -infinity
// Defines   KV_TYPE, HEAD_DIM (multiple of 16), IO_F16, HAS_SOFTCAP, PACK, SLICE, WARPS, ROW_TILES: tiles of 16 rows of a
//           warp, Q_SHARED: queries are read from shared memory for each slice instead of being kept in registers
// SharedLimit   sm_90=232448 sm_80=166912
// Scratch   sm_80=8 sm_90=8
// Compile   KV_TYPE=0,1,2,3,4 HEAD_DIM=64 IO_F16=1 HAS_SOFTCAP=0 PACK=3 SLICE=32 WARPS=4 ROW_TILES=1 Q_SHARED=0;
//           KV_TYPE=1 HEAD_DIM=80,96,128 IO_F16=0,1 HAS_SOFTCAP=0 PACK=4 SLICE=32 WARPS=4 ROW_TILES=1 Q_SHARED=1;
//           KV_TYPE=1 HEAD_DIM=192,256 IO_F16=1 HAS_SOFTCAP=0 PACK=4 SLICE=16 WARPS=2 ROW_TILES=1 Q_SHARED=1;
//           KV_TYPE=1 HEAD_DIM=64,128 IO_F16=1 HAS_SOFTCAP=0,1 PACK=4 SLICE=64 WARPS=4 ROW_TILES=2 Q_SHARED=1 @sm_80 @sm_90;
//           KV_TYPE=3,4 HEAD_DIM=128 IO_F16=1 HAS_SOFTCAP=0 PACK=4 SLICE=32 WARPS=4 ROW_TILES=2 Q_SHARED=1 @sm_80 @sm_90;
//           KV_TYPE=1 HEAD_DIM=256 IO_F16=1 HAS_SOFTCAP=0 PACK=4 SLICE=32 WARPS=8 ROW_TILES=1 Q_SHARED=1 @sm_80 @sm_90
#include "common/attention.cuh"

#define THREADS (WARPS * WARP_SIZE)
#define WARP_ROWS (16 * ROW_TILES)
#define ROWS (WARP_ROWS * WARPS)
#define TOKENS (ROWS / PACK)
#define LD (HEAD_DIM + 8)  // elements per row of a tile
#define KEY_TILES (SLICE / 16)
#define DIM_TILES (HEAD_DIM / 16)
#define PIECES (HEAD_DIM / KV_PIECE)
#define MASK_WORDS ((SLICE + 31) / 32)

// Whose rows are looked up by this thread: the first SLICE threads take one each. Whole warps come here together.
#define LOOKS_UP (WARP_ID() * WARP_SIZE < SLICE)

DEVICE void note_rows(i32* row_of, u32* absent, const Row& row, bool own) {
    const i32 i = threadIdx.x;
    if (i < SLICE) row_of[i] = own ? row.index : -1;
    const u64 missing = ballot(i < SLICE && !own);
    if (LANE() == 0) {
        absent[WARP_ID() * (WARP_SIZE / 32)] = static_cast<u32>(missing);
        if (WARP_SIZE == 64 && MASK_WORDS > 1) absent[1] = static_cast<u32>(missing >> 32);
    }
}

// Begins the copies of K and V of one slice, or makes them where rows have to be converted.
DEVICE void fetch_slice(f16* k_tile, f16* v_tile, const kv_t* RESTRICT k_cache, const kv_t* RESTRICT v_cache,
                        const i32* row_of, i32 width, i32 row_size, i32 first) {
#pragma unroll 2
    for (i32 i = threadIdx.x; i < SLICE * PIECES; i += THREADS) {
        const i32 key = i / PIECES;
        const i32 d = i % PIECES * KV_PIECE;
        const i32 row = row_of[key];
        f16* const k_target = k_tile + key * LD + d;
        f16* const v_target = v_tile + key * LD + d;
        const i64 offset = static_cast<i64>(row) * row_size;
#if KV_TYPE == 1
        if (row >= 0) {
            async_copy16(k_target, k_cache + offset + first + d);
            async_copy16(v_target, v_cache + offset + first + d);
        } else {
            store16(k_target, u32x4{0, 0, 0, 0});
            store16(v_target, u32x4{0, 0, 0, 0});
        }
#else
        const bool own = row >= 0;
        u32 pairs[KV_PIECE / 2];
        if (own) kv_load_piece(k_cache + offset, width, first + d, pairs);
#pragma unroll
        for (int j = 0; j < KV_PIECE / 2; j += 4) {
            store16(k_target + 2 * j, own ? u32x4{pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]} : u32x4{0, 0, 0, 0});
        }
        if (own) kv_load_piece(v_cache + offset, width, first + d, pairs);
#pragma unroll
        for (int j = 0; j < KV_PIECE / 2; j += 4) {
            store16(v_target + 2 * j, own ? u32x4{pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]} : u32x4{0, 0, 0, 0});
        }
#endif
    }
    async_commit();
}

KERNEL(THREADS) flash_attention(const io_t* RESTRICT q, const kv_t* RESTRICT k_cache, const kv_t* RESTRICT v_cache,
                                const u32* RESTRICT tags, const i32* RESTRICT positions,
                                const i32* RESTRICT cu_seqlens, const i32* RESTRICT seq_ids,
                                const i32* RESTRICT page_table, const u32* RESTRICT page_epochs, i32* record,
                                io_t* RESTRICT out, float scale, float softcap, float factor, i32 window, i32 kv_heads,
                                i32 k_row_size, i32 max_pages, i32 page_size, i32 layer, i32 min_tokens) {
    GRID_DEPENDENCY();
    DYNAMIC_SHARED(f16, tiles);  // K and V of even slices, K and V of odd slices
    SHARED i32 row_of[2][SLICE];
    SHARED u32 absent[3][MASK_WORDS];
    SHARED i32 position_of[ROWS];  // of each row's query; -1 behind the last
    const i32 seq = blockIdx.z;
    const i32 seq_start = cu_seqlens[seq];
    const i32 seq_stop = cu_seqlens[seq + 1];
    // The last queries, which see the most rows, first.
    const i32 first_token = seq_start + (gridDim.y - 1 - blockIdx.y) * TOKENS;
    if (first_token >= seq_stop || seq_stop - seq_start < min_tokens) return;  // the whole block
    const i32 heads = gridDim.x * PACK;
    const i32 first_head = blockIdx.x * PACK;
    const i32 kv_head = first_head / (heads / kv_heads);
    const i32 width = kv_heads * HEAD_DIM;
    const i32 stop_token = first_token + TOKENS < seq_stop ? first_token + TOKENS : seq_stop;
    const i32* const pages = page_table + static_cast<i64>(seq) * max_pages;
    const u32* const epochs = page_epochs + static_cast<i64>(seq) * max_pages;
    const i32 warp_row = WARP_ID() * WARP_ROWS;

    const i32 block_first = positions[first_token];
    const i32 stop = positions[stop_token - 1] + 1;
    const i32 start = window > 0 && block_first - window + 1 > 0 ? block_first - window + 1 : 0;
    const i32 num_slices = (stop - start + SLICE - 1) / SLICE;
    // Each stale row is reported once: by the first heads and the last block of queries that sees it.
    const i32 next_start = first_head ? 0 : stop_token == seq_stop ? 0x7FFFFFFF : window > 0 ? stop - window + 1 : 0;

    // The queries.
    f16* const q_tile = Q_SHARED ? tiles + 4 * SLICE * LD : tiles;
    for (i32 i = threadIdx.x; i < ROWS * HEAD_DIM / 8; i += THREADS) {
        const i32 row = i / (HEAD_DIM / 8);
        const i32 d = i % (HEAD_DIM / 8) * 8;
        const i32 token = first_token + row / PACK;
        float values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (token < stop_token) io_load8(q + (static_cast<i64>(token) * heads + first_head + row % PACK) * HEAD_DIM + d, values);
        store16(q_tile + row * LD + d, pack8(values));
    }
    for (i32 row = threadIdx.x; row < ROWS; row += THREADS) {
        const i32 token = first_token + row / PACK;
        position_of[row] = token < stop_token ? positions[token] : -1;
    }
    for (i32 slice = 0; slice < 2; slice++) {
        if (LOOKS_UP) {
            const i32 position = start + slice * SLICE + static_cast<i32>(threadIdx.x);
            const Row row = find_row(pages, epochs, static_cast<i32>(threadIdx.x) < SLICE ? position : stop, stop, page_size);
            const u32 found = row.index >= 0 ? tags[row.index] : 0;
            const bool own = row.index >= 0 && found == row.expected;
            if (row.index >= 0 && !own && position < next_start) {
                report_tag(record, seq_ids[seq], layer, row, position, page_size, found);
            }
            note_rows(row_of[slice], absent[slice], row, own);
        }
    }
    BARRIER();
#if !Q_SHARED
    FragA query[ROW_TILES][DIM_TILES];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int d = 0; d < DIM_TILES; d++) tile_load_a(query[m][d], q_tile + (warp_row + 16 * m) * LD + 16 * d, LD);
    }
    BARRIER();
#endif
    fetch_slice(tiles, tiles + SLICE * LD, k_cache, v_cache, row_of[0], width, k_row_size, kv_head * HEAD_DIM);

    // The softmax of TILE_ROWS rows of each tile, shared by the lanes that have elements of them; totals are each lane's.
    FragC sum[ROW_TILES][DIM_TILES];
    float peak[ROW_TILES][TILE_ROWS];
    float total[ROW_TILES][TILE_ROWS];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int d = 0; d < DIM_TILES; d++) tile_zero(sum[m][d]);
#pragma unroll
        for (int slot = 0; slot < TILE_ROWS; slot++) peak[m][slot] = -INFINITY_F, total[m][slot] = 0;
    }
    // Positions rise along a sequence: what the warp's first and last query see says what all of them see.
    const i32 warp_token = first_token + warp_row / PACK;
    const i32 warp_last_token = first_token + (warp_row + WARP_ROWS - 1) / PACK;
    const bool busy = warp_token < stop_token;
    const i32 warp_first = busy ? positions[warp_token] : 0;
    const i32 warp_last = busy ? positions[warp_last_token < stop_token ? warp_last_token : stop_token - 1] : 0;

    for (i32 j = 0; j < num_slices; j++) {
        const i32 base = start + j * SLICE;
        f16* const k_tile = tiles + j % 2 * 2 * SLICE * LD;
        f16* const v_tile = k_tile + SLICE * LD;
        async_wait<0>();
        BARRIER();
        if (j + 1 < num_slices) {
            f16* const next = tiles + (j + 1) % 2 * 2 * SLICE * LD;
            fetch_slice(next, next + SLICE * LD, k_cache, v_cache, row_of[(j + 1) % 2], width, k_row_size, kv_head * HEAD_DIM);
        }
        Row row{-1, 0};
        const i32 row_position = base + 2 * SLICE + static_cast<i32>(threadIdx.x);
        if (LOOKS_UP && static_cast<i32>(threadIdx.x) < SLICE) row = find_row(pages, epochs, row_position, stop, page_size);

        u32 missing[MASK_WORDS];
        bool all_there = true;
#pragma unroll
        for (int w = 0; w < MASK_WORDS; w++) {
            missing[w] = absent[j % 3][w];
            all_there = all_there && missing[w] == 0;
        }
        const bool seen = busy && base <= warp_last && (window <= 0 || warp_first - (base + SLICE - 1) < window);
        FragC score[ROW_TILES][KEY_TILES];
        if (seen) {
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) tile_zero(score[m][n]);
            }
#pragma unroll
            for (int d = 0; d < DIM_TILES; d++) {
#if Q_SHARED
                FragA rows[ROW_TILES];
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) tile_load_a(rows[m], q_tile + (warp_row + 16 * m) * LD + 16 * d, LD);
#endif
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
                    FragB keys;
                    tile_load_b(keys, k_tile + 16 * n * LD + 16 * d, LD);
#pragma unroll
                    for (int m = 0; m < ROW_TILES; m++) {
#if Q_SHARED
                        tile_mma(score[m][n], rows[m], keys);
#else
                        tile_mma(score[m][n], query[m][d], keys);
#endif
                    }
                }
            }
        }
        const u32 found = row.index >= 0 ? tags[row.index] : 0;
        if (seen) {
            const bool all_visible = all_there && base + SLICE - 1 <= warp_first && (window <= 0 || warp_last - base < window);
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                float highest[TILE_ROWS];
#pragma unroll
                for (int slot = 0; slot < TILE_ROWS; slot++) highest[slot] = peak[m][slot];
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
                    for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                        score[m][n].x[i] = score_of(score[m][n].x[i], scale, softcap);
                        if (!all_visible) {
                            const i32 column = 16 * n + tile_c_col(i);
                            const i32 distance = position_of[warp_row + 16 * m + tile_c_row(i)] - (base + column);
                            const bool visible = distance >= 0 && (window <= 0 || distance < window) &&
                                                 !(missing[16 * n / 32] >> column % 32 & 1);
                            if (!visible) score[m][n].x[i] = -INFINITY_F;
                        }
                        highest[tile_c_slot(i)] = fmaxf(highest[tile_c_slot(i)], score[m][n].x[i]);
                    }
                }
                float anchor[TILE_ROWS];
                float shrink[TILE_ROWS];
                bool same = true;
#pragma unroll
                for (int slot = 0; slot < TILE_ROWS; slot++) {
                    highest[slot] = tile_row_max(highest[slot]);
                    anchor[slot] = anchor_of(highest[slot], factor);
                    shrink[slot] = weight_of(peak[m][slot], factor, anchor[slot]);
                    same = same && peak[m][slot] == highest[slot];
                    peak[m][slot] = highest[slot];
                    total[m][slot] *= shrink[slot];
                }
                if (ballot(!same)) {
#pragma unroll
                    for (int d = 0; d < DIM_TILES; d++) {
#pragma unroll
                        for (int i = 0; i < TILE_C_ELEMENTS; i++) sum[m][d].x[i] *= shrink[tile_c_slot(i)];
                    }
                }
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
#pragma unroll
                    for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                        const float weight = weight_of(score[m][n].x[i], factor, anchor[tile_c_slot(i)]);
                        total[m][tile_c_slot(i)] += weight;
                        score[m][n].x[i] = weight;
                    }
                }
            }
        }
        if (LOOKS_UP) {
            const bool own = row.index >= 0 && found == row.expected;
            if (row.index >= 0 && !own && row_position < next_start) {
                report_tag(record, seq_ids[seq], layer, row, row_position, page_size, found);
            }
            note_rows(row_of[j % 2], absent[(j + 2) % 3], row, own);
        }
        if (seen) {
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                FragA weights[ROW_TILES];
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) tile_c_to_a(weights[m], score[m][n]);
#pragma unroll
                for (int d = 0; d < DIM_TILES; d++) {
                    FragB values;
                    tile_load_b_rows(values, v_tile + 16 * n * LD + 16 * d, LD);
#pragma unroll
                    for (int m = 0; m < ROW_TILES; m++) {
                        tile_mma(sum[m][d], weights[m], values);
                        tile_settle(sum[m][d]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        float share[TILE_ROWS];
#pragma unroll
        for (int slot = 0; slot < TILE_ROWS; slot++) {
            const float whole = tile_row_sum(total[m][slot]);
            share[slot] = whole == 0 ? 0 : 1 / whole;
        }
#pragma unroll
        for (int i = 0; i < TILE_C_ELEMENTS; i++) {
            const i32 row = warp_row + 16 * m + tile_c_row(i);
            const i32 token = first_token + row / PACK;
            if (row >= TOKENS * PACK || token >= stop_token) continue;
            io_t* const target = out + (static_cast<i64>(token) * heads + first_head + row % PACK) * HEAD_DIM;
#pragma unroll
            for (int d = 0; d < DIM_TILES; d++) {
                target[16 * d + tile_c_col(i)] = io_store(sum[m][d].x[i] * share[tile_c_slot(i)]);
            }
        }
    }
}
