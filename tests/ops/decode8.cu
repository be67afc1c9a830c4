// What tests/ops/test_decode8.py launches: the decoders of rawkernels/quants as they are.
#include "common/platform.cuh"
#include "quants/decode.cuh"

KERNEL(32) decode_f32(const u8* RESTRICT w, float* RESTRICT out, i64 row_bytes, i32 K) {
    const i32 k = 8 * static_cast<i32>(blockIdx.x * blockDim.x + threadIdx.x);
    if (k >= K) return;
    float values[8];
    decode8(w + blockIdx.y * row_bytes, k, values);
    for (int j = 0; j < 8; j++) out[static_cast<i64>(blockIdx.y) * K + k + j] = values[j];
}

#if GROUPS == 0
KERNEL(32) decode_half2(const u8* RESTRICT w, u32* RESTRICT out, i64 row_bytes, i32 K) {
    const i32 k = 8 * static_cast<i32>(blockIdx.x * blockDim.x + threadIdx.x);
    if (k >= K) return;
    u32 pairs[4];
    decode8_half2(w + blockIdx.y * row_bytes, k, pairs);
    for (int j = 0; j < 4; j++) out[(static_cast<i64>(blockIdx.y) * K + k) / 2 + j] = pairs[j];
}
#else
KERNEL(32) decode_runs(const u8* RESTRICT w, u32* RESTRICT out, i64 row_bytes, i32 K) {
    const i32 k = 8 * GROUPS * static_cast<i32>(blockIdx.x * blockDim.x + threadIdx.x);
    if (k >= K) return;
    u32 pairs[GROUPS][4];
    decode_run(w + blockIdx.y * row_bytes, k, pairs);
    for (int j = 0; j < 4 * GROUPS; j++) out[(static_cast<i64>(blockIdx.y) * K + k) / 2 + j] = pairs[j / 4][j % 4];
}
#endif
