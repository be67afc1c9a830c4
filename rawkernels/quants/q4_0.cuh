// Q4_0: 32 weights in 18 bytes: d f16 @0, nibbles @2. w = d (n - 8). Blocks are 2-byte aligned.
#pragma once

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const u16* block = reinterpret_cast<const u16*>(row + static_cast<i64>(k / 32) * 18);
    const float d = to_f32(f16_from_bits(block[0]));
    const i32 i = k % 32;
    const i32 shift = 4 * (i / 16);  // the second half of a block lies in the high nibbles
    const u16* nibbles = block + 1 + (i % 16) / 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const i32 pair = nibbles[j] >> shift;
        w[2 * j] = d * static_cast<float>((pair & 15) - 8);
        w[2 * j + 1] = d * static_cast<float>(((pair >> 8) & 15) - 8);
    }
}
