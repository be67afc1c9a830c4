// gated_add: out[t] += x[t] / (1 + exp(-h[t] . w))
//
// Shapes    h [T,size] f32, f16 with H_F16; w [size] f32; x [T,columns] f32, f16 with X_F16; out [T,columns] f32
//           VEC divides size and columns
// Launch    grid (T), block (256): one block per token
// Shared    one float per warp, static
// Sync      warps write partial sums; barrier; every thread adds them up in the same order
// Numerics  f32
// Defines   H_F16, X_F16; VEC: 1 or 8
// Scratch   sm_90=8
// Compile   H_F16=0,1 X_F16=0,1 VEC=1,8
#include "common/values.cuh"

#if H_F16
typedef f16 h_t;
#else
typedef float h_t;
#endif
#if X_F16
typedef f16 x_t;
#else
typedef float x_t;
#endif

KERNEL(256) gated_add(const h_t* RESTRICT h, const float* RESTRICT w, const x_t* RESTRICT x, float* RESTRICT out,
                      i32 size, i32 columns) {
    GRID_DEPENDENCY();
    SHARED float partial[256 / WARP_SIZE];
    const i64 t = blockIdx.x;
    const i32 first = threadIdx.x * VEC;
    float added[VEC] = {}, total[VEC] = {};
    if (first < columns) {  // on their way while the gate is computed
        load_values(x + t * columns + first, added);
        load_values(out + t * columns + first, total);
    }
    float sum = 0;
    for (i32 i = first; i < size; i += 256 * VEC) {
        float a[VEC], b[VEC];
        load_values(h + t * size + i, a);
        load_values(w + i, b);
#pragma unroll
        for (int v = 0; v < VEC; v++) sum += a[v] * b[v];
    }
    sum = warp_sum(sum);
    if (LANE() == 0) partial[WARP_ID()] = sum;
    BARRIER();
    float logit = 0;
#pragma unroll
    for (int i = 0; i < 256 / WARP_SIZE; i++) logit += partial[i];
    const float share = 1 / (1 + expf(-logit));
    for (i32 i = first; i < columns; i += 256 * VEC) {
        if (i > first) {
            load_values(x + t * columns + i, added);
            load_values(out + t * columns + i, total);
        }
#pragma unroll
        for (int v = 0; v < VEC; v++) total[v] += share * added[v];
        store_values(out + t * columns + i, total);
    }
}
