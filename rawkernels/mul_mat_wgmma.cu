// mul_mat_wgmma: out = x @ w.T for many tokens on Hopper's products of four warps; packed weights are decoded on the way
//
// Shapes    x [T,K] f16; w [N,row_bytes] packed; out [T,N] f32 or f16, out_columns elements from row to row; K % 8 == 0
// Launch    grid (any, at most the tiles: ceil(T / TOKENS) ceil(N / ROWS)), block (THREADS): blocks take tiles in turn;
//           neighbours share w
// Shared    dynamic, see common/product_wgmma.cuh
// Sync      see common/product_wgmma.cuh
// Numerics  f16 operands; f32 sums
// Defines   QTYPE and those of common/product_wgmma.cuh
// Arch      sm_90a
// SharedLimit   sm_90a=232448
// Scratch   sm_90a=96
// Compile   QTYPE=2,3,6,7,8,10,11,12,13,14,16,17,18,19,20,21,22,23,29,30,34,35,39,40 ROWS=128 TOKENS=128 GRAIN=64 X_STAGES=4
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
    i32 out_columns;
    int tokens, num_rows;
    bool in_pairs;

    DEVICE u32 row_of_x(int t) const { return t < tokens ? t : tokens - 1; }
    DEVICE out_t* row_of_out(int t) const { return t < tokens ? out + static_cast<i64>(t) * out_columns : nullptr; }
};

KERNEL(THREADS) mul_mat_wgmma(const f16* RESTRICT x, const u8* RESTRICT w, out_t* RESTRICT out, i64 row_bytes, i32 T,
                              i32 N, i32 K, i32 out_columns) {
    GRID_DEPENDENCY();
    SHARED ProductPlaces places;
    const i32 columns = (T + TOKENS - 1) / TOKENS;
    product_run(places, (N + ROWS - 1) / ROWS * columns, row_bytes, K, [&](i32 i) {
        const i32 first_t = i % columns * TOKENS, first_n = i / columns * ROWS;
        return DenseTile{x + static_cast<i64>(first_t) * K,
                         w + first_n * row_bytes,
                         out + static_cast<i64>(first_t) * out_columns + first_n,
                         out_columns,
                         min(T - first_t, static_cast<i32>(TOKENS)),
                         min(N - first_n, static_cast<i32>(ROWS)),
                         out_columns % 2 == 0 && reinterpret_cast<u64>(out) % (2 * sizeof(out_t)) == 0};
    });
}
