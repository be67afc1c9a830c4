// product_parts: what products of packed weights have in common: packed rows on their way through shared memory, and, by
// product_out.cuh, how sums leave a kernel.
//
// Rows are copied in chunks of CHUNK weights, which begin at a multiple of 16 bytes, if need be before the chunk; a chunk
// of a row takes PITCH bytes of shared memory.
//
// Defines   QTYPE; OUTPUT
#pragma once
#include "common/product_out.cuh"
#include "quants/decode.cuh"

constexpr bool COPIED = QTYPE == 1;  // rows that are f16 already are copied as they are

constexpr int CHUNK = BLOCK_SIZE == 256 ? 256 : QTYPE == 0 ? 64 : 128;  // float32 takes much room
constexpr int CHUNK_BYTES = CHUNK / BLOCK_SIZE * BLOCK_BYTES;
// An odd number of pieces keeps rows in different banks.
constexpr int PIECES = (CHUNK_BYTES + (BLOCK_BYTES % 16 == 0 ? 0 : 15) + 15) / 16 | 1;
constexpr int PITCH = 16 * PIECES;

// Begins the copies of a chunk's `bytes` to `target`: the part of lane 0, 1, 2 or 3 of the four that do it together.
DEVICE void request_packed(u8* target, const u8* chunk, i32 bytes, int lane) {
    const u64 address = reinterpret_cast<u64>(chunk);
    const u8* const source = reinterpret_cast<const u8*>(address / 16 * 16) + 16 * lane;
    const i32 last = bytes + (BLOCK_BYTES % 16 == 0 ? 0 : static_cast<i32>(address % 16)) - 16 * lane;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece += 4) {
        if (16 * piece < last && piece + lane < PIECES) {
            async_copy16(target + 16 * (piece + lane), source + 16 * piece);
        }
    }
}

// Bytes from `target` to the chunk; of the row's address the last bits are enough.
DEVICE u32 packed_offset(u32 row, int chunk) {
    return BLOCK_BYTES % 16 == 0 ? 0 : (row + static_cast<u32>(chunk) * CHUNK_BYTES) % 16;
}

// 8 N weights of a row from k on as f16 pairs, of which `left` exist; the others are zero.
template <int N>
DEVICE void decode_some(const u8* row, i32 k, i32 left, u32 (&pairs)[N][4]) {
    if (left >= 8 * N) {
        decode_run(row, k, pairs);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        pairs[j][0] = pairs[j][1] = pairs[j][2] = pairs[j][3] = 0;
        // Blocks of 32 and more end with a run.
        if (BLOCK_SIZE % 32 != 0 && 8 * j < left) decode8_half2(row, k + 8 * j, pairs[j]);
    }
}
