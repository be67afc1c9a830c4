// BF16: the upper half of a float32. Rows are 16-byte aligned.
#pragma once

constexpr u32 BLOCK_SIZE = 1, BLOCK_BYTES = 2;

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const u32x4 words = load16<u32x4>(reinterpret_cast<const u16*>(row) + k);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[2 * j] = bf16_to_f32(static_cast<u16>(pairs[j] & 0xFFFF));
        w[2 * j + 1] = bf16_to_f32(static_cast<u16>(pairs[j] >> 16));
    }
}
