// set_rows: scatter K and V rows into the paged cache, with the page's epoch as tag beside each
//
// Shapes    k [T,k_width], v [T,v_width] f32 or f16; k_cache [rows,k_row_size], v_cache [rows,v_row_size] kv_t
//           tags [rows] u32
//           row_ids [T] i64; positions, token_seq [T] i32; page_table [S,max_pages] i32; page_epochs alike u32
//           widths are multiples of 4
// Launch    grid (T), block (256): one block per token, four elements per thread
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

// The whole block writes one row.
DEVICE void write_row(const input_t* RESTRICT source, kv_t* RESTRICT row, i32 width) {
    for (i32 first = 4 * WARP_SIZE * WARP_ID(); first < width; first += 4 * blockDim.x) {
        const i32 element = first + 4 * LANE();
        const bool wanted = element < width;
        kv_store4(row, width, element, wanted ? load_four(source + element) : f32x4{0, 0, 0, 0}, wanted);
    }
}

KERNEL(256) set_rows(const input_t* RESTRICT k, const input_t* RESTRICT v, kv_t* RESTRICT k_cache,
                     kv_t* RESTRICT v_cache, u32* RESTRICT tags, const i64* RESTRICT row_ids,
                     const i32* RESTRICT positions, const i32* RESTRICT token_seq, const i32* RESTRICT seq_ids,
                     const i32* RESTRICT page_table, const u32* RESTRICT page_epochs, i32* record, i32 k_width,
                     i32 v_width, i32 k_row_size, i32 v_row_size, i32 max_pages, i32 page_size, i32 layer) {
    GRID_DEPENDENCY();
    const i64 token = blockIdx.x;
    const i64 row = row_ids[token];
    if (row < 0) return;
    const i32 position = positions[token];
    const i32 seq = token_seq[token];
    const i64 slot = static_cast<i64>(seq) * max_pages + position / page_size;
    const i32 page = page_table[slot];
    const i64 right = static_cast<i64>(page) * page_size + position % page_size;
    if (row != right) {
        if (threadIdx.x == 0) {
            report_fault(record, KIND_ROW_ID, seq_ids[seq], layer, page, position % page_size, position,
                         static_cast<u32>(right & 0x7FFFFFFF), static_cast<u32>(row & 0x7FFFFFFF));
        }
        return;
    }
    write_row(k + token * k_width, k_cache + row * k_row_size, k_width);
    write_row(v + token * v_width, v_cache + row * v_row_size, v_width);
    if (threadIdx.x == 0) tags[row] = page_epochs[slot];
}
