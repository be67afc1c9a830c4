// F32: plain float32. Rows are 16-byte aligned.
#pragma once

constexpr u32 BLOCK_SIZE = 1, BLOCK_BYTES = 4;

DEVICE void decode8(const u8* RESTRICT row, i32 k, float* w) {
    const float* x = reinterpret_cast<const float*>(row) + k;
    const f32x4 a = load16<f32x4>(x);
    const f32x4 b = load16<f32x4>(x + 4);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
}

#define DECODE8_HALF2
DEVICE void decode8_half2(const u8* RESTRICT row, i32 k, u32 (&w)[4]) {
    float values[8];
    decode8(row, k, values);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_pack_saturated(values[2 * j], values[2 * j + 1]);
}
