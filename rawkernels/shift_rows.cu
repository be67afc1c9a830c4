// shift_rows: copy K/V rows whose tag is source_epoch to another page under target_epoch, keys turned by the angles of a
// difference of positions; others become absent
//
// Shapes    k [rows,k_size] kv_t, v [rows,v_words] u16, tags [rows] u32; cos, sin [half] f32
// Launch    grid (num_rows, 1 + ceil(heads / WARPS)), block (128): the first block of a row copies V and writes the tag, in
//           the others a warp turns a head of K
// Shared    HEAD_DIM floats per warp, static
// Sync      warps work alone; warp barriers order their accesses to shared memory. A row's tag is read by all blocks of the
//           row, the target's tag is another word
// Numerics  f32, each product and sum rounded, so that all devices agree; one rounding to the cache's type
// Defines   KV_TYPE; HEAD_DIM (a multiple of 4, of 32 for quantised rows); NEOX as in rope
// Compile   KV_TYPE=0,1,2,3,4 HEAD_DIM=64 NEOX=1; KV_TYPE=1 HEAD_DIM=80,128,256 NEOX=0
#include "common/kv.cuh"
#include "common/rows.cuh"

#define THREADS 128
#define WARPS (THREADS / WARP_SIZE)

// The pairs of a head; elements behind them stay.
DEVICE void turn(float* head, const float* RESTRICT cos_in, const float* RESTRICT sin_in, i32 half) {
    for (i32 i = LANE(); i < half; i += WARP_SIZE) {
        float* const a = head + (NEOX ? i : 2 * i);
        float* const b = head + (NEOX ? i + half : 2 * i + 1);
        const float first = *a;
        const float second = *b;
        *a = sub_rn(mul_rn(first, cos_in[i]), mul_rn(second, sin_in[i]));
        *b = add_rn(mul_rn(first, sin_in[i]), mul_rn(second, cos_in[i]));
    }
}

KERNEL(THREADS) shift_rows(kv_t* RESTRICT k, u16* RESTRICT v, u32* RESTRICT tags, const float* RESTRICT cos_in,
                           const float* RESTRICT sin_in, i64 source_row, i64 target_row, u32 source_epoch,
                           u32 target_epoch, i32 half, i32 heads, i32 k_size, i32 v_words) {
    GRID_DEPENDENCY();
    SHARED float space[WARPS][HEAD_DIM];
    const i64 source = source_row + blockIdx.x;
    const i64 target = target_row + blockIdx.x;
    const bool own = tags[source] == source_epoch;
    if (blockIdx.y == 0) {
        if (own) copy_row(v + source * v_words, v + target * v_words, v_words);
        if (threadIdx.x == 0) tags[target] = own ? target_epoch : 0;
        return;
    }
    const i32 index = (blockIdx.y - 1) * WARPS + WARP_ID();
    if (!own || index >= heads) return;  // whole warps; no barrier of the block follows
    float* const head = space[WARP_ID()];
    const i32 width = heads * HEAD_DIM;
    for (i32 d = 4 * LANE(); d < HEAD_DIM; d += 4 * WARP_SIZE) {
        store16(head + d, kv_load4(k + source * k_size, width, index * HEAD_DIM + d));
    }
    WARP_BARRIER();
    turn(head, cos_in, sin_in, half);
    WARP_BARRIER();
#pragma unroll
    for (i32 first = 0; first < HEAD_DIM; first += 4 * WARP_SIZE) {
        const i32 d = first + 4 * LANE();
        const bool wanted = d < HEAD_DIM;
        const f32x4 values = wanted ? load16<f32x4>(head + d) : f32x4{0, 0, 0, 0};
        kv_store4(k + target * k_size, width, index * HEAD_DIM + d, values, wanted);
    }
}
