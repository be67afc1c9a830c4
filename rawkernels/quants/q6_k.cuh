// Q6_K: 256 weights in 210 bytes: low nibbles @0, high pairs of bits @128, int8 scales @192, d f16 @208.
// Blocks are 2-byte aligned. w = (d sc) (q - 32).
#pragma once

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const u8* block = row + static_cast<i64>(k / 256) * 210;
    const i32 i = k % 256;
    const i32 half = i / 128;
    const i32 quarter = (i % 128) / 32;
    const i32 l = i % 32;
    const u16* low = reinterpret_cast<const u16*>(block + 64 * half + 32 * (quarter % 2) + l);
    const u16* high = reinterpret_cast<const u16*>(block + 128 + 32 * half + l);
    const i32 low_shift = 4 * (quarter / 2);
    const i32 high_shift = 2 * quarter;
    const float scale = to_f32(f16_from_bits(*reinterpret_cast<const u16*>(block + 208)));
    const float d = scale * static_cast<float>(static_cast<i8>(block[192 + i / 16]));
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const i32 lo = (low[j / 2] >> (8 * (j % 2) + low_shift)) & 15;
        const i32 hi = (high[j / 2] >> (8 * (j % 2) + high_shift)) & 3;
        w[j] = d * static_cast<float>((lo | (hi << 4)) - 32);
    }
}
