// decode_rows: out[n,k] = w[n,k] as f16, for products by the vendor's library
//
// Shapes    w [N,row_bytes] packed; out [N,K] f16; K % 8 == 0
// Launch    grid (ceil(K / 1024), N), block (128): eight elements per thread
// Numerics  exact decode, one rounding to nearest even, saturated at 65504
// Defines   QTYPE
// Compile   QTYPE=0,1,2,3,6,7,8,10,11,12,13,14,16,17,18,19,20,21,22,23,29,30,34,35,39,40
#include "common/platform.cuh"
#include "quants/decode.cuh"

struct alignas(16) f16x8 {
    f16 x[8];
};

KERNEL(128) decode_rows(const u8* RESTRICT w, f16* RESTRICT out, i64 row_bytes, i32 K) {
    GRID_DEPENDENCY();
    const i64 n = blockIdx.y;
    const i32 k = 8 * static_cast<i32>(blockIdx.x * blockDim.x + threadIdx.x);
    if (k >= K) return;
    float values[8];
    decode8(w + n * row_bytes, k, values);
    f16x8 packed;
#pragma unroll
    for (int j = 0; j < 8; j++) packed.x[j] = to_f16_saturated(values[j]);
    store16(out + n * K + k, packed);
}
