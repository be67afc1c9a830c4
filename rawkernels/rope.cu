// rope_table: cos[t,i] = magnitude * cos(positions[t] * inv_freq[i]), sin alike
// rope: rotates pairs of x in place by the table's angles
//
// Shapes    positions [T] i32; inv_freq [half] f32; cos, sin [T,half] f32; x [T, heads, head_dim] f32
// Launch    rope_table: grid (T), block (128); rope: grid (T, ceil(heads * half / 256)), block (256)
// Numerics  angles and products in f32; cosf and sinf in full precision, since angles grow to thousands of radians; what
//           reduces the largest keeps a table in local memory
// Defines   NEOX: pairs are (i, i + half), else (2i, 2i + 1)
// Compile   NEOX=0,1
// Scratch   sm_90=32
#include "common/platform.cuh"

KERNEL(128) rope_table(const i32* RESTRICT positions, const float* RESTRICT inv_freq, float* RESTRICT cos_out,
                       float* RESTRICT sin_out, float magnitude, i32 half) {
    GRID_DEPENDENCY();
    const float position = static_cast<float>(positions[blockIdx.x]);
    const i64 row = static_cast<i64>(blockIdx.x) * half;
    for (i32 i = threadIdx.x; i < half; i += blockDim.x) {
        const float angle = position * inv_freq[i];
        cos_out[row + i] = magnitude * cosf(angle);
        sin_out[row + i] = magnitude * sinf(angle);
    }
}

KERNEL(256) rope(float* RESTRICT x, const float* RESTRICT cos_in, const float* RESTRICT sin_in, i32 heads,
                 i32 head_dim, i32 half) {
    GRID_DEPENDENCY();
    const i32 index = blockIdx.y * blockDim.x + threadIdx.x;
    if (index >= heads * half) return;
    const i32 head = index / half;
    const i32 pair = index % half;
    const i64 token = blockIdx.x;
    float* values = x + (token * heads + head) * head_dim;
#if NEOX
    float* a = values + pair;
    float* b = values + pair + half;
#else
    float* a = values + 2 * pair;
    float* b = values + 2 * pair + 1;
#endif
    const float c = cos_in[token * half + pair];
    const float s = sin_in[token * half + pair];
    const float first = *a;
    const float second = *b;
    *a = first * c - second * s;
    *b = first * s + second * c;
}
