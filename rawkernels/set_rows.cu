// set_rows: scatter K and V rows into the paged cache, with the page's epoch as tag beside each
//
// Shapes    k [T,k_width], v [T,v_width] f32 or f16; k_cache [rows,k_row_size], v_cache [rows,v_row_size] kv_t
//           tags [rows] u32
//           row_ids [T] i64; positions, token_seq [T] i32; page_table [S,max_pages] i32; page_epochs alike u32
//           widths are multiples of 4, those of quantised rows of KV_BLOCK
// Launch    grid (T), block (256): one block per token, four elements per thread, eight if rows are quantised
// Numerics  one rounding to the storage type, to nearest even; quantised types as common/kv.cuh says
// Defines   KV_TYPE, INPUT_F16: 1 when k and v are f16
// Compile   KV_TYPE=0,1,2,3,4 INPUT_F16=0,1
#include "common/kv.cuh"

#if INPUT_F16
typedef f16 input_t;
#else
typedef float input_t;
#endif

DEVICE f32x4 load_four(const input_t* x) {
#if INPUT_F16
    const u64 loaded = *reinterpret_cast<const u64*>(x);
    const u32 low = static_cast<u32>(loaded);
    const u32 high = static_cast<u32>(loaded >> 32);
    return f32x4{low_half(low), high_half(low), low_half(high), high_half(high)};
#else
    return load16<f32x4>(x);
#endif
}

#define EACH (KV_QUANTISED ? 8 : 4)  // elements of a thread

struct Piece {
    i32 element, width;
    bool is_k, wanted;
    f32x4 values[EACH / 4];
};

// What lies at a place of the row of K and that of V, one behind the other.
DEVICE Piece load_piece(const input_t* RESTRICT k, const input_t* RESTRICT v, i32 k_width, i32 v_width, i32 place) {
    Piece piece;
    piece.is_k = place < k_width;
    piece.wanted = place < k_width + v_width;
    piece.element = piece.is_k ? place : place - k_width;
    piece.width = piece.is_k ? k_width : v_width;
#pragma unroll
    for (int i = 0; i < EACH / 4; i++) {
        piece.values[i] = f32x4{0, 0, 0, 0};
        if (piece.wanted) piece.values[i] = load_four((piece.is_k ? k : v) + piece.element + 4 * i);
    }
    return piece;
}

DEVICE void store_piece(const Piece& piece, kv_t* RESTRICT k_row, kv_t* RESTRICT v_row) {
    kv_t* const row = piece.is_k ? k_row : v_row;
#if KV_QUANTISED
    kv_store8(row, piece.width, piece.element, piece.values[0], piece.values[1], piece.wanted);
#else
    kv_store4(row, piece.width, piece.element, piece.values[0], piece.wanted);
#endif
}

KERNEL(256) set_rows(const input_t* RESTRICT k, const input_t* RESTRICT v, kv_t* RESTRICT k_cache,
                     kv_t* RESTRICT v_cache, u32* RESTRICT tags, const i64* RESTRICT row_ids,
                     const i32* RESTRICT positions, const i32* RESTRICT token_seq, const i32* RESTRICT seq_ids,
                     const i32* RESTRICT page_table, const u32* RESTRICT page_epochs, i32* record, i32 k_width,
                     i32 v_width, i32 k_row_size, i32 v_row_size, i32 max_pages, i32 page_size, i32 layer) {
    GRID_DEPENDENCY();
    const i64 token = blockIdx.x;
    const input_t* const k_source = k + token * k_width;
    const input_t* const v_source = v + token * v_width;
    // Loaded before it is known where they go, since that takes three loads one after the other.
    Piece piece = load_piece(k_source, v_source, k_width, v_width, EACH * static_cast<i32>(threadIdx.x));
    const i64 row = row_ids[token];
    if (row < 0) return;
    const i32 position = positions[token];
    const i32 seq = token_seq[token];
    const i64 slot = static_cast<i64>(seq) * max_pages + position / page_size;
    const i32 page = page_table[slot];
    const u32 epoch = page_epochs[slot];
    const i64 right = static_cast<i64>(page) * page_size + position % page_size;
    if (row != right) {
        if (threadIdx.x == 0) {
            report_fault(record, KIND_ROW_ID, seq_ids[seq], layer, page, position % page_size, position,
                         static_cast<u32>(right & 0x7FFFFFFF), static_cast<u32>(row & 0x7FFFFFFF));
        }
        return;
    }
    if (threadIdx.x == 0) tags[row] = epoch;
    kv_t* const k_row = k_cache + row * k_row_size;
    kv_t* const v_row = v_cache + row * v_row_size;
    // Whole warps: lanes of a block of a quantised type exchange what they have.
    const i32 warp_first = EACH * WARP_SIZE * WARP_ID();
    for (i32 first = warp_first; first < k_width + v_width; first += EACH * 256) {
        if (first != warp_first) {
            piece = load_piece(k_source, v_source, k_width, v_width, first + EACH * LANE());
        }
        store_piece(piece, k_row, v_row);
    }
}
