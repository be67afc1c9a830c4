// Q4_1: 32 weights in 20 bytes: d f16 @0, m f16 @2, nibbles @4. w = d n + m. Blocks are 4-byte aligned.
#pragma once

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const u32* block = reinterpret_cast<const u32*>(row + static_cast<i64>(k / 32) * 20);
    const u32 scales = block[0];
    const float d = to_f32(f16_from_bits(static_cast<u16>(scales & 0xFFFF)));
    const float m = to_f32(f16_from_bits(static_cast<u16>(scales >> 16)));
    const i32 i = k % 32;
    const i32 shift = 4 * (i / 16);
    const u32* nibbles = block + 1 + (i % 16) / 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const u32 n = (nibbles[j / 4] >> (8 * (j % 4) + shift)) & 15;
        w[j] = add_rn(mul_rn(d, static_cast<float>(n)), m);
    }
}
