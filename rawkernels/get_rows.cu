// get_rows: out[i,k] = scale * weight[ids[i],k]
//
// Shapes    weight [rows, row_bytes] packed; ids [n] i32; out [n, row_elements] f32; row_elements % 8 == 0
// Launch    grid (n, ceil(row_elements / (8 * block))), block (128): eight elements per thread
// Numerics  exact decode; one product with scale
// Defines   QTYPE
// Compile   QTYPE=0,1,2,3,6,7,8,10,11,12,13,14,16,17,18,19,20,21,22,23,29,30,34,35,39,40
#include "common/platform.cuh"
#include "quants/decode.cuh"

KERNEL(128) get_rows(const u8* RESTRICT weight, const i32* RESTRICT ids, float* RESTRICT out, float scale,
                     i64 row_bytes, i32 row_elements) {
    GRID_DEPENDENCY();
    const i64 i = blockIdx.x;
    const i32 k = 8 * static_cast<i32>(blockIdx.y * blockDim.x + threadIdx.x);
    if (k >= row_elements) return;
    float w[8];
    decode8(weight + ids[i] * row_bytes, k, w);
    float* row = out + i * row_elements + k;
#pragma unroll
    for (int j = 0; j < 8; j += 4) store16(row + j, f32x4{scale * w[j], scale * w[j + 1], scale * w[j + 2], scale * w[j + 3]});
}
