// token_tables: the tables of a ubatch's sequences for each of its tokens, which becomes a sequence of one
//
// Shapes    positions, token_seq [T], cu_seqlens [S+1], seq_ids [S] i32; page_table [S,max_pages] i32, page_epochs alike u32
//           token_pages [T,max_pages] i32, token_epochs alike u32; starts [T+1], kv_lens, ids [T] i32
// Launch    grid (T), block (128)
#include "common/platform.cuh"

KERNEL(128) token_tables(const i32* RESTRICT positions, const i32* RESTRICT token_seq, const i32* RESTRICT cu_seqlens,
                         const i32* RESTRICT seq_ids, const i32* RESTRICT page_table, const u32* RESTRICT page_epochs,
                         i32* RESTRICT token_pages, u32* RESTRICT token_epochs, i32* RESTRICT starts,
                         i32* RESTRICT kv_lens, i32* RESTRICT ids, i32 num_seqs, i32 max_pages) {
    GRID_DEPENDENCY();
    const i32 token = blockIdx.x;
    const i32 seq = token_seq[token];
    const i64 from = static_cast<i64>(seq) * max_pages;
    const i64 to = static_cast<i64>(token) * max_pages;
    for (i32 i = threadIdx.x; i < max_pages; i += 128) {
        token_pages[to + i] = page_table[from + i];
        token_epochs[to + i] = page_epochs[from + i];
    }
    if (threadIdx.x == 0) {
        const i32 number = cu_seqlens[num_seqs];  // 0 when copy_inputs has emptied the block
        starts[token] = min(token, number);
        if (token + 1 == static_cast<i32>(gridDim.x)) starts[token + 1] = min(token + 1, number);
        kv_lens[token] = positions[token] + 1;
        ids[token] = seq_ids[seq];
    }
}
