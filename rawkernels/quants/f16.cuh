// F16: plain float16. Rows are 16-byte aligned.
#pragma once

constexpr u32 BLOCK_SIZE = 1, BLOCK_BYTES = 2;

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const u32x4 words = load16<u32x4>(reinterpret_cast<const u16*>(row) + k);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[2 * j] = to_f32(f16_from_bits(static_cast<u16>(pairs[j] & 0xFFFF)));
        w[2 * j + 1] = to_f32(f16_from_bits(static_cast<u16>(pairs[j] >> 16)));
    }
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    const u32x4 words = load16<u32x4>(reinterpret_cast<const u16*>(row) + k);
    w[0] = words.x, w[1] = words.y, w[2] = words.z, w[3] = words.w;
}
