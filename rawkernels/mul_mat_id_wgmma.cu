// mul_mat_id_wgmma: mul_mat_id_tile on Hopper's products of four warps: a tile is of one expert's (token, slot) pairs
//
// Shapes    x [T,x_slots,K] f16, x_slots 1 or num_used; lists of group_experts with tiles of TOKENS pairs; w [num_experts,N,
//           row_bytes] packed; out [T,num_used,N] f32 or f16; GATE: up like w; K % 8 == 0
// Launch    grid (any), block (THREADS): blocks take tiles in turn; neighbours share x
// Shared    dynamic, see common/product_wgmma.cuh
// Sync      see common/product_wgmma.cuh
// Numerics  f16 operands; f32 sums, with GATE gated before they are rounded. Pairs whose expert does not exist are left as they were
// Defines   QTYPE and those of common/product_wgmma.cuh; GATE: 0 products, 1 silu(product with w) times that with up
// Arch      sm_90a
// SharedLimit   sm_90a=232448
// Scratch   sm_90a=96
// Compile   QTYPE=8,12 ROWS=128 TOKENS=192 GRAIN=32 X_STAGES=4 W_STAGES=4 CONSUMERS=2 DECODERS=2 BLOCKS=1 OUTPUT=0,1 GATE=0,1;
//           QTYPE=14 ROWS=128 TOKENS=192 GRAIN=32 X_STAGES=4 W_STAGES=4 CONSUMERS=2 DECODERS=2 BLOCKS=1 OUTPUT=1 GATE=0;
//           QTYPE=12 ROWS=128 TOKENS=32,128,160 GRAIN=32 X_STAGES=4 W_STAGES=4 CONSUMERS=2 DECODERS=2 BLOCKS=1 OUTPUT=1 GATE=0,1;
//           QTYPE=12 ROWS=256 TOKENS=64 GRAIN=32 X_STAGES=4 W_STAGES=3 CONSUMERS=2 DECODERS=4 BLOCKS=1 OUTPUT=1 GATE=0,1;
//           QTYPE=14 ROWS=192 TOKENS=64 GRAIN=32 X_STAGES=4 W_STAGES=4 CONSUMERS=3 DECODERS=3 BLOCKS=1 OUTPUT=1 GATE=0,1;
//           QTYPE=1 ROWS=128 TOKENS=64,192 GRAIN=32 X_STAGES=4 W_STAGES=4 CONSUMERS=2 DECODERS=0 BLOCKS=1 OUTPUT=1 GATE=0,1
#include "common/product_wgmma.cuh"

constexpr int OUT_ROWS = GATE ? ROWS / 2 : ROWS;

struct ExpertTile {
    const f16* x;
    const i32* pairs;
    const u8* w;
    const u8* up;
    out_t* out;
    i32 N, pairs_of_row;  // of x
    i32 depth;
    int tokens, num_rows;
    bool in_pairs;

    DEVICE u32 row_of_x(int t) const { return pairs[t < tokens ? t : tokens - 1] / pairs_of_row; }
    DEVICE out_t* row_of_out(int t) const { return t < tokens ? out + static_cast<i64>(pairs[t]) * N : nullptr; }
};

KERNEL(THREADS) mul_mat_id_wgmma(const f16* RESTRICT x, const i32* RESTRICT lists, const u8* RESTRICT w,
                                 const u8* RESTRICT up, out_t* RESTRICT out, i64 row_bytes, i32 num_pairs, i32 N,
                                 i32 K, i32 num_experts, i32 num_used, i32 x_slots) {
    GRID_DEPENDENCY();
    SHARED ProductPlaces places;
    const i32* const starts = lists;
    const i32* const pairs = starts + num_experts + 2;
    const i32* const tiles = pairs + num_pairs;
    const i32 parts = (N + OUT_ROWS - 1) / OUT_ROWS;
    product_run(places, starts[num_experts + 1] * parts, row_bytes, K, [&](i32 i) {
        const i32 expert = tiles[2 * (i / parts)], first_pair = tiles[2 * (i / parts) + 1];
        const i32 first_n = i % parts * OUT_ROWS;
        const i64 first_row = (static_cast<i64>(expert) * N + first_n) * row_bytes;
        return ExpertTile{x,
                          pairs + first_pair,
                          w + first_row,
                          up + first_row,
                          out + first_n,
                          N,
                          x_slots == 1 ? num_used : 1,
                          K,
                          min(starts[expert + 1] - first_pair, static_cast<i32>(TOKENS)),
                          min(N - first_n, static_cast<i32>(OUT_ROWS)),
                          N % 2 == 0 && reinterpret_cast<u64>(out) % (2 * sizeof(out_t)) == 0};
    });
}
