// rope_set_rows: queries, keys and values of a projection take their places: heads of q and k are normalised (where the
// model does) and rotated, q goes to an array of its own, k and v into the paged cache, with the page's epoch as tag
//
// Shapes    qkv [T, (heads + 2 kv_heads) * HEAD_DIM] f32: all heads of q, then of k, then of v; q_norm, k_norm [HEAD_DIM] f32
//           cos, sin [T,half] f32; q [T,heads,HEAD_DIM] f32 or f16; k_cache, v_cache [rows,row_size] kv_t; tags [rows] u32
//           row_ids [T] i64; positions, token_seq [T] i32; page_table [S,max_pages] i32; page_epochs alike u32
// Launch    grid (T, ceil((heads + 2 kv_heads) / WARPS)), block (128): one warp per head
// Shared    HEAD_DIM floats per warp, static
// Sync      warps work alone; warp barriers order their accesses to shared memory
// Numerics  f32; one rounding to the type of q (f16 saturates), and of the cache as common/kv.cuh says
// Defines   KV_TYPE, HEAD_DIM (a multiple of 4), Q_F16, NEOX as in rope, HEAD_NORM
// Compile   KV_TYPE=0,1,2,3,4 HEAD_DIM=64 Q_F16=1 NEOX=1 HEAD_NORM=0; KV_TYPE=1 HEAD_DIM=80,128,256 Q_F16=1 NEOX=1
//           HEAD_NORM=1; KV_TYPE=1 HEAD_DIM=64 Q_F16=0,1 NEOX=0 HEAD_NORM=0
#include "common/kv.cuh"

#define THREADS 128
#define WARPS (THREADS / WARP_SIZE)
#define ELEMENTS ((HEAD_DIM + WARP_SIZE - 1) / WARP_SIZE)

// Every head of a token finds its row; one of them reports a wrong one. -1: nothing is written.
DEVICE i64 target_row(i64 token, const i64* RESTRICT row_ids, const i32* RESTRICT positions,
                      const i32* RESTRICT token_seq, const i32* RESTRICT seq_ids, const i32* RESTRICT page_table,
                      const u32* RESTRICT page_epochs, u32* tags, i32* record, i32 max_pages, i32 page_size, i32 layer,
                      bool first_of_token) {
    const i64 row = row_ids[token];
    if (row < 0) return -1;
    const i32 position = positions[token];
    const i32 seq = token_seq[token];
    const i64 slot = static_cast<i64>(seq) * max_pages + position / page_size;
    const i32 page = page_table[slot];
    const i64 right = static_cast<i64>(page) * page_size + position % page_size;
    if (row != right) {
        if (first_of_token) {
            report_fault(record, KIND_ROW_ID, seq_ids[seq], layer, page, position % page_size, position,
                         static_cast<u32>(right & 0x7FFFFFFF), static_cast<u32>(row & 0x7FFFFFFF));
        }
        return -1;
    }
    if (first_of_token) tags[row] = page_epochs[slot];
    return row;
}

DEVICE void rotate(float* head, const float* RESTRICT cos_in, const float* RESTRICT sin_in, i64 token, i32 half) {
    for (i32 i = LANE(); i < half; i += WARP_SIZE) {
        float* const a = head + (NEOX ? i : 2 * i);
        float* const b = head + (NEOX ? i + half : 2 * i + 1);
        const float c = cos_in[token * half + i];
        const float s = sin_in[token * half + i];
        const float first = *a;
        const float second = *b;
        *a = first * c - second * s;
        *b = first * s + second * c;
    }
}

DEVICE void store_row(kv_t* row, i32 width, i32 element, const float* head) {
#pragma unroll
    for (i32 first = 0; first < HEAD_DIM; first += 4 * WARP_SIZE) {
        const i32 d = first + 4 * LANE();
        const bool wanted = d < HEAD_DIM;
        kv_store4(row, width, element + d, wanted ? load16<f32x4>(head + d) : f32x4{0, 0, 0, 0}, wanted);
    }
}

KERNEL(THREADS) rope_set_rows(const float* RESTRICT qkv, const float* RESTRICT q_norm, const float* RESTRICT k_norm,
                              const float* RESTRICT cos_in, const float* RESTRICT sin_in, void* RESTRICT q,
                              kv_t* RESTRICT k_cache, kv_t* RESTRICT v_cache, u32* RESTRICT tags,
                              const i64* RESTRICT row_ids, const i32* RESTRICT positions,
                              const i32* RESTRICT token_seq, const i32* RESTRICT seq_ids,
                              const i32* RESTRICT page_table, const u32* RESTRICT page_epochs, i32* record, float eps,
                              i32 half, i32 heads, i32 kv_heads, i32 row_size, i32 max_pages, i32 page_size,
                              i32 layer) {
    GRID_DEPENDENCY();
    SHARED float space[WARPS][HEAD_DIM];
    const i64 token = blockIdx.x;
    const i32 index = blockIdx.y * WARPS + WARP_ID();
    if (index >= heads + 2 * kv_heads) return;  // whole warps; no barrier of the block follows
    const bool is_q = index < heads;
    const bool is_k = !is_q && index < heads + kv_heads;
    float* const head = space[WARP_ID()];
    const float* const source = qkv + (token * (heads + 2 * kv_heads) + index) * HEAD_DIM;
    float values[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const i32 d = i * WARP_SIZE + LANE();
        values[i] = d < HEAD_DIM ? source[d] : 0;
    }
    i64 row = -1;
    if (!is_q) {
        row = target_row(token, row_ids, positions, token_seq, seq_ids, page_table, page_epochs, tags, record, max_pages,
                         page_size, layer, index == heads && LANE() == 0);
    }
#if HEAD_NORM
    float sum = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) sum += values[i] * values[i];
    const float factor = rsqrt_f(warp_sum(sum) / HEAD_DIM + eps);
    if (is_q || is_k) {
        const float* const norm = is_q ? q_norm : k_norm;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            const i32 d = i * WARP_SIZE + LANE();
            if (d < HEAD_DIM) values[i] *= factor * norm[d];
        }
    }
#endif
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const i32 d = i * WARP_SIZE + LANE();
        if (d < HEAD_DIM) head[d] = values[i];
    }
    WARP_BARRIER();
    if (is_q || is_k) rotate(head, cos_in, sin_in, token, half);
    WARP_BARRIER();
    if (is_q) {
        for (i32 d = 4 * LANE(); d < HEAD_DIM; d += 4 * WARP_SIZE) {
            const i64 target = (token * heads + index) * HEAD_DIM + d;
            const f32x4 x = load16<f32x4>(head + d);
#if Q_F16
            const u64 low = h2_pack_saturated(x.x, x.y);
            const u64 high = h2_pack_saturated(x.z, x.w);
            *reinterpret_cast<u64*>(static_cast<f16*>(q) + target) = low | high << 32;
#else
            store16(static_cast<float*>(q) + target, x);
#endif
        }
    } else if (row >= 0) {
        const i32 kv_head = (index - heads) % kv_heads;
        store_row((is_k ? k_cache : v_cache) + row * row_size, kv_heads * HEAD_DIM, kv_head * HEAD_DIM, head);
    }
}
