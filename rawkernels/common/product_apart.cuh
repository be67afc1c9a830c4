// product_apart: products of one token as whole numbers, common/product_s8.cuh, for formats whose scales are for few weights:
// columns of a product are not tokens, but lanes: column 2 p + h has byte half h of x where lane `part` p of four has weights,
// and is 0 elsewhere. So a lane gets the sums of its own weights, whose scales it has.
#pragma once
#include "common/product_s8.cuh"

#if APART
#include "quants/apart.cuh"

// A lane's part of the activations of a block: of column g of each product.
struct ApartColumn {
    const u8* bytes;
    const float* scale;
    bool active;
    u32 x[8][2];  // 0 in lanes that are not active
};

DEVICE void load_block(ApartColumn& column, i32 block) {
    if (column.active) {
#pragma unroll
        for (int slab = 0; slab < 8; slab++) {
            const u64 x = *reinterpret_cast<const u64*>(column.bytes + (block * 8 + slab) * 64);
            column.x[slab][0] = static_cast<u32>(x), column.x[slab][1] = static_cast<u32>(x >> 32);
        }
    }
}

// The products of 256 k of rows g and g + 8 with the weights of a lane.
DEVICE void multiply_block(float (&sum)[2], const u8* const (&packed)[2], ApartColumn& column, i32 block, const u8* table) {
    const i32 part = LANE() % 4;
    load_block(column, block);
    const ApartBlock blocks[2] = {apart_block(packed[0], table), apart_block(packed[1], table)};
    i32 high[2] = {}, low[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const ApartRun runs[2] = {apart_run(blocks[0], part + 4 * half), apart_run(blocks[1], part + 4 * half)};
#pragma unroll
        for (int j = 0; j < APART_SCALES; j++) {
            i32 c[4] = {0, 0, 0, 0};
#pragma unroll
            for (int e = 0; e < 4 / APART_SCALES; e++) {
                const int eight = j * 2 + e;
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 codes[2];
                    apart_codes(runs[i], eight, codes);
                    a[i] = codes[0], a[2 + i] = codes[1];
                }
                mma_m16n8k32_s8(c, a, column.x[half * 4 + eight]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const i32 scale = apart_scale(runs[i], j);
                high[i] += scale * c[2 * i];
                low[i] += scale * c[2 * i + 1];
            }
        }
    }
    const float factor = column.scale[block];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float whole = fmaf(256.0f, static_cast<float>(high[i]), static_cast<float>(low[i]));
        sum[i] = fmaf(factor, mul_rn(apart_d(packed[i]), whole), sum[i]);
    }
}
#endif
