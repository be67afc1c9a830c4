// l2_norm: x *= rsqrt(sum x^2 + eps) for each of the first num_heads heads of a row
//
// Shapes    x [T,row_size] f32, head h in columns h * head_dim to (h + 1) * head_dim - 1
// Launch    grid (ceil(T * num_heads / warps)), block (256): one warp per head
// Numerics  f32
#include "common/platform.cuh"

KERNEL(256) l2_norm(float* x, float eps, i32 count, i32 num_heads, i32 head_dim, i32 row_size) {
    GRID_DEPENDENCY();
    const i32 item = blockIdx.x * (256 / WARP_SIZE) + WARP_ID();
    if (item >= count) return;  // whole warps
    float* const head = x + static_cast<i64>(item / num_heads) * row_size + (item % num_heads) * head_dim;
    float sum = 0;
    for (i32 i = LANE(); i < head_dim; i += WARP_SIZE) sum += head[i] * head[i];
    const float factor = rsqrt_f(warp_sum(sum) + eps);
    for (i32 i = LANE(); i < head_dim; i += WARP_SIZE) head[i] *= factor;
}
