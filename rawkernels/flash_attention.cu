// flash_attention_tile: causal attention of many queries over a sequence's pages, on matrix instructions
// flash_attention_split, flash_attention_combine: one query per sequence; its rows are split over blocks, the parts
// are put together by the second kernel
//
// Shapes    q, out [T,heads,HEAD_DIM] f32, or f16 with IO_F16; k_cache, v_cache [rows, kv_heads * HEAD_DIM] kv_t; tags [rows] u32
//           positions [T], cu_seqlens [S+1], kv_lens [S], seq_ids [S] i32; page_table [S,max_pages] i32, page_epochs u32
//           parts [S,heads,splits,HEAD_DIM + 2] f32: sums, then running maximum and total weight
// Launch    tile: grid (ceil(longest / BM), heads, S), block (4 * WARP_SIZE); blocks behind a sequence's end do nothing
//           split: grid (splits, kv_heads * ceil(GROUP / HEADS), S), block (128)
//           combine: grid (heads, S), block (128)
// Sync      tile: per slice of BN rows: (1) row addresses, barrier; (2) K and V tiles, barrier; (3) each warp works on
//           its 16 queries alone, ordered by warp barriers; (4) barrier before the next slice overwrites the tiles
// Numerics  tile: K, V, q and weights rounded to f16, sums in f32; split: all f32. A row with a foreign tag is absent:
//           its K and V are zero and its score is -infinity
// Defines   KV_TYPE, HEAD_DIM (multiple of 16), IO_F16; GROUP and HEADS (split: query heads per kv head, and per block)
// Compile   KV_TYPE=0,1,2 HEAD_DIM=64 IO_F16=0,1; KV_TYPE=1 HEAD_DIM=80,96,128,256 IO_F16=1;
//           KV_TYPE=0,1,2 HEAD_DIM=64 IO_F16=0,1 GROUP=3 HEADS=3; KV_TYPE=1 HEAD_DIM=80,96,128,256 IO_F16=1 GROUP=4 HEADS=4
#include "common/kv.cuh"

#if IO_F16
typedef f16 io_t;
DEVICE float io_load(io_t x) { return to_f32(x); }
DEVICE io_t io_store(float x) { return to_f16_saturated(x); }
#else
typedef float io_t;
DEVICE float io_load(io_t x) { return x; }
DEVICE io_t io_store(float x) { return x; }
#endif

// Where row `position` of a sequence lies, or -1 when its tag is not its page's epoch.
DEVICE i64 own_row(const u32* RESTRICT tags, const i32* RESTRICT pages, const u32* RESTRICT epochs, i32 position,
                   i32 page_size, i32* record, bool report, i32 seq_id, i32 layer) {
    const i32 page = pages[position / page_size];
    const u32 expected = epochs[position / page_size];
    const i64 row = static_cast<i64>(page) * page_size + position % page_size;
    const u32 found = tags[row];
    if (found == expected) return row;
    if (report) {
        report_fault(record, KIND_TAG, seq_id, layer, page, position % page_size, position, expected, found);
    }
    return -1;
}

DEVICE float capped(float score, float softcap) {
    return softcap > 0 ? softcap * tanhf(score / softcap) : score;
}

#ifdef GROUP

#define THREADS 128
#define WARPS (THREADS / WARP_SIZE)
#define PART (HEAD_DIM + 2)
// A key is shared by KEY_LANES lanes with eight elements each; a warp works on KEYS keys at a time.
#define KEY_LANES (HEAD_DIM <= 16 ? 2 : HEAD_DIM <= 32 ? 4 : HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32)
#define KEYS (WARP_SIZE / KEY_LANES)

KERNEL(THREADS) flash_attention_split(const io_t* RESTRICT q, const kv_t* RESTRICT k_cache,
                                      const kv_t* RESTRICT v_cache, const u32* RESTRICT tags,
                                      const i32* RESTRICT positions, const i32* RESTRICT cu_seqlens,
                                      const i32* RESTRICT seq_ids, const i32* RESTRICT page_table,
                                      const u32* RESTRICT page_epochs, i32* record, float* RESTRICT parts,
                                      float scale, float softcap, i32 window, i32 kv_heads, i32 max_pages,
                                      i32 page_size, i32 layer) {
    SHARED float merged[WARPS][HEADS][PART];
    const i32 splits = gridDim.x;
    const i32 chunks = gridDim.y / kv_heads;
    const i32 kv_head = blockIdx.y / chunks;
    const i32 first_head = kv_head * GROUP + blockIdx.y % chunks * HEADS;
    const i32 seq = blockIdx.z;
    const i32 lane = LANE() % KEY_LANES;
    const bool active = 8 * lane < HEAD_DIM;
    const i32 token = cu_seqlens[seq];
    const bool empty = cu_seqlens[seq + 1] == token;  // also in a block that copy_inputs has emptied
    const i32 position = empty ? -1 : positions[token];
    const i32 start = window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
    const i32 per_split = (position + 1 - start + splits - 1) / splits;
    const i32 first = start + blockIdx.x * per_split;
    const i32 stop = first + per_split < position + 1 ? first + per_split : position + 1;
    const i64 width = static_cast<i64>(kv_heads) * HEAD_DIM;

    float query[HEADS][8];
    float sum[HEADS][8];
    float peak[HEADS];
    float total[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        peak[h] = -INFINITY_F;
        total[h] = 0;
        const bool exists = !empty && active && first_head + h < (kv_head + 1) * GROUP;
        const i64 heads = static_cast<i64>(kv_heads) * GROUP;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum[h][j] = 0;
            query[h][j] = exists ? io_load(q[(token * heads + first_head + h) * HEAD_DIM + 8 * lane + j]) * scale : 0;
        }
    }
    const i32 step = WARPS * KEYS;
    for (i32 base = first; base < stop; base += step) {
        const i32 key = base + WARP_ID() * KEYS + LANE() / KEY_LANES;
        i64 row = -1;
        if (key < stop) {
            const bool report = kv_head == 0 && blockIdx.y % chunks == 0 && lane == 0;
            row = own_row(tags, page_table + static_cast<i64>(seq) * max_pages,
                          page_epochs + static_cast<i64>(seq) * max_pages, key, page_size, record, report,
                          seq_ids[seq], layer);
        }
        float keys[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        float values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (row >= 0 && active) {
            kv_load8(k_cache + row * width + kv_head * HEAD_DIM + 8 * lane, keys);
            kv_load8(v_cache + row * width + kv_head * HEAD_DIM + 8 * lane, values);
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float score = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) score += query[h][j] * keys[j];
#pragma unroll
            for (int mask = KEY_LANES / 2; mask > 0; mask /= 2) score += shfl_xor(score, mask);
            if (row >= 0) {
                score = capped(score, softcap);
                const float higher = score > peak[h] ? score : peak[h];
                const float shrink = expf(peak[h] - higher);  // 0 for the first key: exp(-infinity)
                const float weight = expf(score - higher);
                total[h] = total[h] * shrink + weight;
#pragma unroll
                for (int j = 0; j < 8; j++) sum[h][j] = sum[h][j] * shrink + weight * values[j];
                peak[h] = higher;
            }
        }
    }
    // Lane groups of a warp, in a butterfly: all see the same result.
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int mask = KEY_LANES; mask < WARP_SIZE; mask *= 2) {
            const float other_peak = shfl_xor(peak[h], mask);
            const float other_total = shfl_xor(total[h], mask);
            const float higher = other_peak > peak[h] ? other_peak : peak[h];
            const float mine = peak[h] == -INFINITY_F ? 0 : expf(peak[h] - higher);
            const float theirs = other_peak == -INFINITY_F ? 0 : expf(other_peak - higher);
            total[h] = total[h] * mine + other_total * theirs;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float other = shfl_xor(sum[h][j], mask);
                sum[h][j] = sum[h][j] * mine + other * theirs;
            }
            peak[h] = higher;
        }
        if (LANE() < KEY_LANES && active) {
#pragma unroll
            for (int j = 0; j < 8; j++) merged[WARP_ID()][h][8 * lane + j] = sum[h][j];
        }
        if (LANE() == 0) {
            merged[WARP_ID()][h][HEAD_DIM] = peak[h];
            merged[WARP_ID()][h][HEAD_DIM + 1] = total[h];
        }
    }
    BARRIER();
    for (i32 i = threadIdx.x; i < HEADS * PART; i += THREADS) {
        const i32 h = i / PART;
        const i32 element = i % PART;
        if (first_head + h >= (kv_head + 1) * GROUP) continue;
        float highest = -INFINITY_F;
        for (i32 w = 0; w < WARPS; w++) {
            highest = merged[w][h][HEAD_DIM] > highest ? merged[w][h][HEAD_DIM] : highest;
        }
        float result = 0;
        for (i32 w = 0; w < WARPS; w++) {
            const float other = merged[w][h][HEAD_DIM];
            result += other == -INFINITY_F ? 0 : expf(other - highest) * merged[w][h][element];
        }
        const i64 part = (static_cast<i64>(seq) * kv_heads * GROUP + first_head + h) * splits + blockIdx.x;
        parts[part * PART + element] = element == HEAD_DIM ? highest : result;
    }
}

KERNEL(THREADS) flash_attention_combine(const float* RESTRICT parts, const i32* RESTRICT cu_seqlens,
                                        io_t* RESTRICT out, i32 splits) {
    const i32 head = blockIdx.x;
    const i32 seq = blockIdx.y;
    const i32 heads = gridDim.x;
    const i32 token = cu_seqlens[seq];
    if (cu_seqlens[seq + 1] == token) return;
    const float* mine = parts + (static_cast<i64>(seq) * heads + head) * splits * PART;
    float highest = -INFINITY_F;
    for (i32 s = 0; s < splits; s++) {
        const float other = mine[static_cast<i64>(s) * PART + HEAD_DIM];
        highest = other > highest ? other : highest;
    }
    for (i32 i = threadIdx.x; i < HEAD_DIM; i += THREADS) {
        float sum = 0;
        float total = 0;
        for (i32 s = 0; s < splits; s++) {
            const float* part = mine + static_cast<i64>(s) * PART;
            const float share = part[HEAD_DIM] == -INFINITY_F ? 0 : expf(part[HEAD_DIM] - highest);
            sum += share * part[i];
            total += share * part[HEAD_DIM + 1];
        }
        out[(static_cast<i64>(token) * heads + head) * HEAD_DIM + i] = io_store(total > 0 ? sum / total : 0);
    }
}

#else

#include "common/tile.cuh"

#define WARPS 4
#define THREADS (WARPS * WARP_SIZE)
#define BM (16 * WARPS)
#define BN 32
#define K_LD (HEAD_DIM + 8)  // elements per row of the K tile
#define V_LD (BN + 8)        // elements per row of the transposed V tile
#define S_LD (BN + 4)        // floats per row of a warp's scores; as f16 twice that
#define LANES_PER_ROW (WARP_SIZE / 16)
#define COLUMNS (BN / LANES_PER_ROW)

struct alignas(16) f16x8 {
    f16 x[8];
};

KERNEL(THREADS) flash_attention_tile(const io_t* RESTRICT q, const kv_t* RESTRICT k_cache,
                                     const kv_t* RESTRICT v_cache, const u32* RESTRICT tags,
                                     const i32* RESTRICT positions, const i32* RESTRICT cu_seqlens,
                                     const i32* RESTRICT seq_ids, const i32* RESTRICT page_table,
                                     const u32* RESTRICT page_epochs, i32* record, io_t* RESTRICT out, float scale,
                                     float softcap, i32 window, i32 kv_heads, i32 max_pages, i32 page_size,
                                     i32 layer) {
    SHARED f16x8 k_tile[BN * K_LD / 8];
    SHARED f16x8 v_tile[HEAD_DIM * V_LD / 8];
    SHARED f16x8 score_space[WARPS * 16 * S_LD * 2 / 8];
    SHARED float row_factor[WARPS][16];
    SHARED i64 row_of[BN];
    const i32 seq = blockIdx.z;
    const i32 head = blockIdx.y;
    const i32 heads = gridDim.y;
    const i32 kv_head = head / (heads / kv_heads);
    const i32 seq_start = cu_seqlens[seq];
    const i32 seq_stop = cu_seqlens[seq + 1];
    const i32 first_token = seq_start + blockIdx.x * BM;
    if (first_token >= seq_stop) return;  // the whole block
    const i32 warp = WARP_ID();
    const i32 lane = LANE();
    const i64 width = static_cast<i64>(kv_heads) * HEAD_DIM;
    float* scores = reinterpret_cast<float*>(score_space) + warp * 16 * S_LD;
    f16* weights = reinterpret_cast<f16*>(scores);  // the weights take the place of the scores, row by row

    // This warp's queries, as fragments: scaled here, so that scores come out right.
    FragA query[HEAD_DIM / 16];
    const i32 warp_token = first_token + 16 * warp;
    {
        f16* staging = reinterpret_cast<f16*>(k_tile);
        for (i32 pass = 0; pass < WARPS; pass++) {
            BARRIER();
            if (warp == pass) {
                for (i32 i = lane; i < 16 * HEAD_DIM; i += WARP_SIZE) {
                    const i32 token = warp_token + i / HEAD_DIM;
                    const float value =
                        token < seq_stop ? io_load(q[(static_cast<i64>(token) * heads + head) * HEAD_DIM + i % HEAD_DIM]) : 0;
                    staging[i / HEAD_DIM * K_LD + i % HEAD_DIM] = to_f16(value);
                }
                WARP_BARRIER();
#pragma unroll
                for (int d = 0; d < HEAD_DIM / 16; d++) tile_load_a(query[d], staging + 16 * d, K_LD);
            }
        }
        BARRIER();
    }
    FragC sum[HEAD_DIM / 16];
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) tile_zero(sum[d]);
    // Softmax state of one query row per LANES_PER_ROW lanes; all of them hold the same numbers.
    const i32 my_row = lane / LANES_PER_ROW;
    const i32 my_token = warp_token + my_row;
    const i32 my_position = my_token < seq_stop ? positions[my_token] : -1;
    float peak = -INFINITY_F;
    float total = 0;

    const i32 last_token = first_token + BM < seq_stop ? first_token + BM - 1 : seq_stop - 1;
    const i32 block_first = positions[first_token];
    const i32 block_last = positions[last_token];
    const i32 start = window > 0 && block_first - window + 1 > 0 ? block_first - window + 1 : 0;
    // Each stale row is reported once: by head 0 and the last block of queries that sees it.
    const bool is_last = last_token == seq_stop - 1;
    const i32 next_start = is_last ? 0x7FFFFFFF : window > 0 ? block_last + 1 - window + 1 : 0;

    for (i32 base = start; base <= block_last; base += BN) {
        for (i32 i = threadIdx.x; i < BN; i += THREADS) {
            const i32 position = base + i;
            i64 row = -1;
            if (position <= block_last) {
                const bool report = head == 0 && position < next_start;
                row = own_row(tags, page_table + static_cast<i64>(seq) * max_pages,
                              page_epochs + static_cast<i64>(seq) * max_pages, position, page_size, record, report,
                              seq_ids[seq], layer);
            }
            row_of[i] = row;
        }
        BARRIER();
        for (i32 i = threadIdx.x; i < BN * HEAD_DIM / 8; i += THREADS) {
            const i32 key = i / (HEAD_DIM / 8);
            const i32 d = i % (HEAD_DIM / 8) * 8;
            const i64 row = row_of[key];
            float keys[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            float values[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (row >= 0) {
                kv_load8(k_cache + row * width + kv_head * HEAD_DIM + d, keys);
                kv_load8(v_cache + row * width + kv_head * HEAD_DIM + d, values);
            }
            f16x8 packed;
#pragma unroll
            for (int j = 0; j < 8; j++) packed.x[j] = to_f16(keys[j]);
            k_tile[(key * K_LD + d) / 8] = packed;
            f16* transposed = reinterpret_cast<f16*>(v_tile);
#pragma unroll
            for (int j = 0; j < 8; j++) transposed[(d + j) * V_LD + key] = to_f16(values[j]);
        }
        BARRIER();
#pragma unroll
        for (int n = 0; n < BN / 16; n++) {
            FragC score;
            tile_zero(score);
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 16; d++) {
                FragB keys;
                tile_load_b(keys, reinterpret_cast<const f16*>(k_tile) + 16 * n * K_LD + 16 * d, K_LD);
                tile_mma(score, query[d], keys);
            }
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i++) {
                scores[tile_c_row(i) * S_LD + 16 * n + tile_c_col(i)] = score.x[i];
            }
        }
        WARP_BARRIER();
        float mine[COLUMNS];
        float highest = peak;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const i32 column = c * LANES_PER_ROW + lane % LANES_PER_ROW;
            const i32 position = base + column;
            const bool visible = position <= my_position && row_of[column] >= 0 &&
                                 (window <= 0 || my_position - position < window);
            const float score = scores[my_row * S_LD + column] * scale;
            mine[c] = visible ? capped(score, softcap) : -INFINITY_F;
            highest = mine[c] > highest ? mine[c] : highest;
        }
#pragma unroll
        for (int mask = LANES_PER_ROW / 2; mask > 0; mask /= 2) {
            const float other = shfl_xor(highest, mask);
            highest = other > highest ? other : highest;
        }
        const float anchor = highest == -INFINITY_F ? 0 : highest;  // nothing visible yet: all weights are 0
        const float shrink = expf(peak - anchor);
        float slice = 0;
        WARP_BARRIER();  // all scores of a row are in registers before its weights overwrite them
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const i32 column = c * LANES_PER_ROW + lane % LANES_PER_ROW;
            const float weight = expf(mine[c] - anchor);
            weights[my_row * 2 * S_LD + column] = to_f16(weight);
            slice += weight;
        }
#pragma unroll
        for (int mask = LANES_PER_ROW / 2; mask > 0; mask /= 2) slice += shfl_xor(slice, mask);
        total = total * shrink + slice;
        peak = highest;
        if (lane % LANES_PER_ROW == 0) row_factor[warp][my_row] = shrink;
        WARP_BARRIER();
        FragA p[BN / 16];
#pragma unroll
        for (int n = 0; n < BN / 16; n++) tile_load_a(p[n], weights + 16 * n, 2 * S_LD);
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; d++) {
#pragma unroll
            for (int i = 0; i < TILE_C_ELEMENTS; i++) sum[d].x[i] *= row_factor[warp][tile_c_row(i)];
#pragma unroll
            for (int n = 0; n < BN / 16; n++) {
                FragB values;
                tile_load_b(values, reinterpret_cast<const f16*>(v_tile) + 16 * d * V_LD + 16 * n, V_LD);
                tile_mma(sum[d], p[n], values);
            }
        }
        BARRIER();
    }
    if (lane % LANES_PER_ROW == 0) row_factor[warp][my_row] = total > 0 ? 1 / total : 0;
    WARP_BARRIER();
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
#pragma unroll
        for (int i = 0; i < TILE_C_ELEMENTS; i++) {
            const i32 token = warp_token + tile_c_row(i);
            if (token < seq_stop) {
                const i64 target = (static_cast<i64>(token) * heads + head) * HEAD_DIM + 16 * d + tile_c_col(i);
                out[target] = io_store(sum[d].x[i] * row_factor[warp][tile_c_row(i)]);
            }
        }
    }
}

#endif
