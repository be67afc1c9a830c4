// softcap: out[i] = cap * tanh(x[i] / cap); out may be x
//
// Shapes    [n] f32, both from multiples of 16 bytes on
// Launch    grid (ceil(n / 1024)), block (256): four elements per thread
#include "common/platform.cuh"

DEVICE float capped(float x, float cap) { return cap * tanhf(x / cap); }

KERNEL(256) softcap(const float* x, float* out, float cap, i64 n) {
    GRID_DEPENDENCY();
    const i64 i = 4 * (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (i + 4 <= n) {
        const f32x4 y = load16<f32x4>(x + i);
        store16(out + i, f32x4{capped(y.x, cap), capped(y.y, cap), capped(y.z, cap), capped(y.w, cap)});
    } else {
        for (i64 j = i; j < n; j++) out[j] = capped(x[j], cap);
    }
}
