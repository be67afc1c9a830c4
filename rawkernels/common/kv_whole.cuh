// kv_whole: scores of quantised keys in whole numbers, on products of signed bytes (tile_s8.cuh), for rows in shared memory.
//
// A query is taken as 16-bit whole numbers with one step, which is less than 2^-14 of its largest element, each as two signed
// bytes: rows 0-7 of a tile hold the high bytes, rows 8-15 the low ones. A block's codes are bytes as they are stored, so its
// sum is exact; behind it come the block's scale and the query's step. The codes of q4_0 are 8 more than they stand for, and
// what that adds to a block is known beforehand.
//
//   note_query(bytes, row, values...)   one warp writes a query down
//   WholeQuery                          what a lane keeps of a tile of them
//   whole_scores(...)                   scores of 16 keys, as tile_mma leaves them in rows 0-7
//
// Defines   KV_TYPE (3 or 4), HEAD_DIM: a multiple of 64
#pragma once
#include "common/kv.cuh"
#include "common/tile_s8.cuh"

#define WHOLE_BLOCKS (HEAD_DIM / KV_BLOCK)
#define WHOLE_MOST 32512.0f  // 127 * 256: the high byte of what is next to it stays below 128
#define WHOLE_BYTES (16 * HEAD_DIM + 8 * 4 * (WHOLE_BLOCKS + 1))  // of a tile of eight queries: rows, offsets, steps

// Where a key of 16 lies, so that the lanes of half a warp read different banks.
DEVICE i32 key_slot(i32 key) { return KV_TYPE == 3 ? key / 8 * 8 + key % 4 * 2 + key / 4 % 2 : key; }

// Query `row` of a tile of eight; lane i has elements i, i + 32, ... A query in which a value is not finite becomes NaN.
DEVICE void note_query(u8* tile, i32 row, const float (&x)[WHOLE_BLOCKS]) {
    float largest = 0;
#pragma unroll
    for (int b = 0; b < WHOLE_BLOCKS; b++) {
        if (!(fabsf(x[b]) <= largest)) largest = fabsf(x[b]) < INFINITY_F ? fabsf(x[b]) : INFINITY_F;
    }
    largest = warp_max(largest);
    const bool usable = largest >= KV_SMALLEST && largest < INFINITY_F;
    const float inverse = usable ? WHOLE_MOST / largest : 0.0f;
    i32* const offsets = reinterpret_cast<i32*>(tile + 16 * HEAD_DIM) + row * WHOLE_BLOCKS;
#pragma unroll
    for (int b = 0; b < WHOLE_BLOCKS; b++) {
        const i32 number = usable ? static_cast<i32>(rintf(x[b] * inverse)) : 0;
        const i32 low = ((number + 128) & 255) - 128;
        tile[row * HEAD_DIM + b * KV_BLOCK + LANE()] = static_cast<u8>(number - low >> 8);
        tile[(row + 8) * HEAD_DIM + b * KV_BLOCK + LANE()] = static_cast<u8>(low);
        const float sum = warp_sum(static_cast<float>(number));  // exact: less than 2^24
        if (LANE() == 0) offsets[b] = KV_TYPE == 4 ? -8 * static_cast<i32>(sum) : 0;
    }
    float* const steps = reinterpret_cast<float*>(tile + 16 * HEAD_DIM + 8 * 4 * WHOLE_BLOCKS);
    if (LANE() == 0) steps[row] = usable ? largest / WHOLE_MOST : largest < INFINITY_F ? 0.0f : NAN_F;
}

struct WholeQuery {
    u32 rows[WHOLE_BLOCKS][4];
    i32 offset[WHOLE_BLOCKS];
    float step;

    DEVICE void load(const u8* tile) {
        const i32 g = LANE() / 4;
        const i32 t = LANE() % 4;
#pragma unroll
        for (int b = 0; b < WHOLE_BLOCKS; b++) {
            // q8_0: a lane's bytes are neighbours; q4_0: low halves of bytes are elements 0-15, high ones 16-31.
            const u8* const first = tile + g * HEAD_DIM + b * KV_BLOCK + (KV_TYPE == 3 ? 8 : 4) * t;
            const i32 second = KV_TYPE == 3 ? 4 : 16;
            rows[b][0] = *reinterpret_cast<const u32*>(first);
            rows[b][1] = *reinterpret_cast<const u32*>(first + 8 * HEAD_DIM);
            rows[b][2] = *reinterpret_cast<const u32*>(first + second);
            rows[b][3] = *reinterpret_cast<const u32*>(first + 8 * HEAD_DIM + second);
            offset[b] = reinterpret_cast<const i32*>(tile + 16 * HEAD_DIM)[g * WHOLE_BLOCKS + b];
        }
        step = reinterpret_cast<const float*>(tile + 16 * HEAD_DIM + 8 * 4 * WHOLE_BLOCKS)[g];
    }
};

// The scales of a key's blocks.
DEVICE void load_scales(const u8* source, float (&scales)[WHOLE_BLOCKS]) {
#pragma unroll
    for (int b = 0; b < WHOLE_BLOCKS; b += 2) {
        const u32 pair = *reinterpret_cast<const u32*>(source + 2 * b);
        scales[b] = low_half(pair);
        scales[b + 1] = high_half(pair);
    }
}

// `keys`: the first of 16 rows of codes, each `row_bytes` behind the other; `scales`: bytes from a row to its scales.
template <int TILES>
DEVICE void whole_scores(FragC (&score)[TILES], const WholeQuery (&query)[TILES], const u8* keys, i32 row_bytes,
                         i32 scales) {
    const i32 g = LANE() / 4;
    const i32 t = LANE() % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u8* const row = keys + key_slot(g + 8 * half) * row_bytes + (KV_TYPE == 3 ? 8 : 4) * t;
        float scale[2][WHOLE_BLOCKS];
#pragma unroll
        for (int e = 0; e < 2; e++) load_scales(keys + key_slot(2 * t + e + 8 * half) * row_bytes + scales, scale[e]);
#pragma unroll
        for (int b = 0; b < WHOLE_BLOCKS; b++) {
#if KV_TYPE == 3
            const u64 loaded = *reinterpret_cast<const u64*>(row + KV_BLOCK * b);
            const u32 codes[2] = {static_cast<u32>(loaded), static_cast<u32>(loaded >> 32)};
#else
            const u32 loaded = *reinterpret_cast<const u32*>(row + KV_BLOCK / 2 * b);
            const u32 codes[2] = {loaded & 0x0F0F0F0Fu, loaded >> 4 & 0x0F0F0F0Fu};
#endif
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                i32 sum[4] = {0, 0, 0, 0};
                if (KV_TYPE == 4) sum[2] = sum[3] = query[m].offset[b];
                mma_m16n8k32_s8(sum, query[m].rows[b], codes);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& into = score[m].x[4 * half + e];
                    const float whole = static_cast<float>(256 * sum[e] + sum[e + 2]);
                    into = b == 0 ? whole * scale[e][b] : fmaf(whole, scale[e][b], into);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int e = 0; e < 2; e++) score[m].x[4 * half + e] *= query[m].step;
        }
    }
}
