// mul_mat_wgmma: out = x @ w.T for many tokens on Hopper's products of four warps; packed weights are decoded on the way
//
// Shapes    x [T,K] f16; w0, w1, w2 [n0|n1|n2,row_bytes] packed: up to three matrices; out0, out1, out2 the first products of
//           each, f32 or f16, out_columns elements from row to row; K % 8 == 0. With several shares of k, K is a multiple of
//           256, and out0 etc. are the first of share 0, [shares, T, out_columns]
// Launch    grid (any, at most the tiles: shares ceil(T / TOKENS) (ceil(n0 / ROWS) + ..)), block (THREADS): blocks take tiles in
//           turn; neighbours share w
// Shared    dynamic, see common/product_wgmma.cuh
// Sync      see common/product_wgmma.cuh
// Numerics  f16 operands; f32 sums
// Defines   QTYPE and those of common/product_wgmma.cuh
// Arch      sm_90a
// SharedLimit   sm_90a=232448
// Scratch   sm_90a=96
// Compile   QTYPE=0,2,3,6,7,8,10,11,12,13,14,16,17,18,19,20,21,22,23,29,30,34,35,39,40 ROWS=128 TOKENS=128 GRAIN=64 X_STAGES=4
//           W_STAGES=4 CONSUMERS=2 DECODERS=2 BLOCKS=1 OUTPUT=0;
//           QTYPE=1 ROWS=128 TOKENS=256,128,64 GRAIN=64 X_STAGES=4 W_STAGES=4 CONSUMERS=2 DECODERS=0 BLOCKS=1 OUTPUT=0;
//           QTYPE=8,12 ROWS=128 TOKENS=256 GRAIN=64 X_STAGES=4 W_STAGES=3 CONSUMERS=2 DECODERS=2 BLOCKS=1 OUTPUT=0,1,2;
//           QTYPE=14 ROWS=128 TOKENS=256 GRAIN=64 X_STAGES=3 W_STAGES=3 CONSUMERS=2 DECODERS=2 BLOCKS=1 OUTPUT=0;
//           QTYPE=12 ROWS=128 TOKENS=64 GRAIN=64 X_STAGES=4 W_STAGES=4 CONSUMERS=2 DECODERS=2 BLOCKS=1 OUTPUT=1;
//           QTYPE=12 ROWS=64 TOKENS=128 GRAIN=64 X_STAGES=3 W_STAGES=3 CONSUMERS=1 DECODERS=1 BLOCKS=2 OUTPUT=2;
//           QTYPE=14 ROWS=64 TOKENS=64 GRAIN=64 X_STAGES=4 W_STAGES=4 CONSUMERS=1 DECODERS=1 BLOCKS=2 OUTPUT=1;
//           QTYPE=1 ROWS=64 TOKENS=64,128 GRAIN=64 X_STAGES=4 W_STAGES=4 CONSUMERS=1 DECODERS=0 BLOCKS=2 OUTPUT=2
#include "common/product_wgmma.cuh"

struct DenseTile {
    const f16* x;
    const u8* w;
    out_t* out;
    i32 out_columns, depth;
    int tokens, num_rows;
    bool in_pairs;

    DEVICE u32 row_of_x(int t) const { return t < tokens ? t : tokens - 1; }
    DEVICE out_t* row_of_out(int t) const { return t < tokens ? out + static_cast<i64>(t) * out_columns : nullptr; }
};

// Whole chunks of 256, but for the end.
DEVICE i32 share_begin(i32 share, i32 shares, i32 K) { return share == shares ? K : K / 256 * share / shares * 256; }

KERNEL(THREADS) mul_mat_wgmma(const f16* RESTRICT x, const u8* RESTRICT w0, const u8* RESTRICT w1, const u8* RESTRICT w2,
                              out_t* RESTRICT out0, out_t* RESTRICT out1, out_t* RESTRICT out2, i64 row_bytes, i32 T,
                              i32 n0, i32 n1, i32 n2, i32 K, i32 out_columns, i32 shares) {
    GRID_DEPENDENCY();
    SHARED ProductPlaces places;
    const i32 columns = (T + TOKENS - 1) / TOKENS;
    const i32 parts0 = (n0 + ROWS - 1) / ROWS, parts1 = (n1 + ROWS - 1) / ROWS, parts2 = (n2 + ROWS - 1) / ROWS;
    const i32 parts = parts0 + parts1 + parts2;
    product_run(places, parts * columns * shares, row_bytes, K, [&](i32 i) {
        const i32 first_t = i % columns * TOKENS, share = i / columns / parts;
        const i32 first_k = share_begin(share, shares, K), end = share_begin(share + 1, shares, K);
        i32 part = i / columns % parts;
        const u8* w = w0;
        out_t* out = out0;
        i32 n = n0;
        if (part >= parts0) {
            part -= parts0, w = w1, out = out1, n = n1;
            if (part >= parts1) part -= parts1, w = w2, out = out2, n = n2;
        }
        const i32 first_n = part * ROWS;
        return DenseTile{x + static_cast<i64>(first_t) * K + first_k,
                         w + first_n * row_bytes + first_k / BLOCK_SIZE * BLOCK_BYTES,
                         out + (static_cast<i64>(share) * T + first_t) * out_columns + first_n,
                         out_columns,
                         end - first_k,
                         min(T - first_t, static_cast<i32>(TOKENS)),
                         min(n - first_n, static_cast<i32>(ROWS)),
                         out_columns % 2 == 0 && reinterpret_cast<u64>(out) % (2 * sizeof(out_t)) == 0};
    });
}
