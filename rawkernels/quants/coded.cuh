// decode8, decode8_half2 and decode_run of a format that has defined
//
//   BLOCK_SIZE, BLOCK_BYTES; SCALE_RUN               consecutive weights with one scale
//   scale_of(block, i)                               scale of weight i of a block
//   codes_of<N>(block, i, codes)                     codes of weights i to i + 8 N - 1, which are of one run of 32
//   values_of(codes, scale, w), halves_of(codes, scale, w)   eight weights as float or as f16 pairs
//
// Included at the end of the format's own file.
#pragma once

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const u8* const block = row + static_cast<u64>(static_cast<u32>(k) / BLOCK_SIZE) * BLOCK_BYTES;
    const u32 i = static_cast<u32>(k) % BLOCK_SIZE;
    u32 codes[1][2];
    codes_of(block, i, codes);
    values_of(codes[0], scale_of(block, i), w);
}

#define DECODE_RUN
template <int N>
DEVICE void decode_run(const u8* RESTRICT row, i32 k, u32 (&w)[N][4]) {
    static_assert(N <= 4, "runs are of 32 weights at most");
    const u8* const block = row + static_cast<u64>(static_cast<u32>(k) / BLOCK_SIZE) * BLOCK_BYTES;
    const u32 i = static_cast<u32>(k) % BLOCK_SIZE;
    u32 codes[N][2];
    codes_of(block, i, codes);
    auto scale = scale_of(block, i);
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j && 8 * j % SCALE_RUN == 0) scale = scale_of(block, i + 8 * j);
        halves_of(codes[j], scale, w[j]);
    }
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    u32 all[1][4];
    decode_run(row, k, all);
    w[0] = all[0][0], w[1] = all[0][1], w[2] = all[0][2], w[3] = all[0][3];
}
