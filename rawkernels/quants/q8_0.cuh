// Q8_0: 32 weights in 34 bytes: d f16 @0, int8 @2. w = d q. Blocks are 2-byte aligned.
#pragma once

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const u16* block = reinterpret_cast<const u16*>(row + static_cast<i64>(k / 32) * 34);
    const float d = to_f32(f16_from_bits(block[0]));
    const u16* codes = block + 1 + (k % 32) / 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[2 * j] = d * static_cast<float>(static_cast<i8>(codes[j] & 255));
        w[2 * j + 1] = d * static_cast<float>(static_cast<i8>(codes[j] >> 8));
    }
}
