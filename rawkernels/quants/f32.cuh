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
