// copy_inputs: slot -> input block, serial check, step counter, cleared fault record.
//
// Shapes    slot, block [num_words] u64; step_counter [1] i64; record [record_words] i32
//           head_word, tail_word, status_word: where the serials and the status lie, in u64 words
//           left_word .. left_stop-1: words that are left out, since the ubatch reads them in the slot
//           rows_word, num_rows: the row ids, i64; tokens_word, places_word: as many token ids, and places of kept
//           tokens, i32; kept [num_kept] i32
// Launch    grid (1), block (1024): one block, so that its barriers order everything
// Sync      all threads copy, then a barrier; thread 0 judges, a barrier; on a mismatch all threads empty the block, else
//           they put kept tokens in the place of ids below 0
// Numerics  integers only
#include "common/platform.cuh"

#define KIND_SERIAL 1

KERNEL(1024) copy_inputs(const u64* RESTRICT slot, u64* RESTRICT block, i64* RESTRICT step_counter,
                         const i32* RESTRICT kept, i32* RESTRICT record, i32 num_words, i32 record_words,
                         i32 head_word, i32 tail_word, i32 status_word, i32 rows_word, i32 tokens_word,
                         i32 places_word, i32 num_rows, i32 num_kept, i32 enforce, i32 left_word, i32 left_stop) {
    GRID_DEPENDENCY();
    SHARED i32 wrong;
    const i32 thread = threadIdx.x;
    for (i32 i = thread; i < num_words; i += blockDim.x) {
        if (i < left_word || i >= left_stop) block[i] = slot[i];
    }
    for (i32 i = thread; i < record_words; i += blockDim.x) record[i] = 0;
    BARRIER();
    if (thread == 0) {
        // Judged from the copy, not from the slot: the copy is what the other ops will read.
        const i64 head = static_cast<i64>(block[head_word]);
        const i64 tail = static_cast<i64>(block[tail_word]);
        const i64 expected = step_counter[0] + 1;
        step_counter[0] = expected;
        wrong = head != expected || tail != expected;
        if (wrong) {
            const i64 found = head != expected ? head : tail;
            i32* entry = record + 8;
            record[0] = 1;
            entry[0] = KIND_SERIAL;
            for (i32 i = 1; i < 6; i++) entry[i] = -1;
            entry[6] = static_cast<i32>(expected & 0x7FFFFFFF);
            entry[7] = static_cast<i32>(found & 0x7FFFFFFF);
        }
    }
    BARRIER();
    if (wrong && enforce) {
        // Nothing is written anywhere: neither a K/V row, nor a token for a later step of a sequence that is not in here.
        for (i32 i = thread; i < num_words; i += blockDim.x) {
            const bool is_row = i >= rows_word && i < rows_word + num_rows;
            const bool is_place = i >= places_word && i < places_word + (num_rows + 1) / 2;
            block[i] = is_row || is_place ? ~static_cast<u64>(0) : 0;
        }
        BARRIER();
        if (thread == 0) reinterpret_cast<i32*>(block + status_word)[0] = 1;
    } else {
        i32* const tokens = reinterpret_cast<i32*>(block + tokens_word);
        for (i32 i = thread; i < num_rows; i += blockDim.x) {
            if (tokens[i] < 0) tokens[i] = kept[min(-1 - tokens[i], num_kept - 1)];
        }
    }
}
