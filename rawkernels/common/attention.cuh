// What the attention kernels share: queries and outputs in their storage type, the softmax's numbers.
//
// Defines   KV_TYPE, HEAD_DIM, IO_F16: 1 when q and out are f16, HAS_SOFTCAP: 0 leaves the soft cap out
#pragma once
#include "common/attention_rows.cuh"
#include "common/tile.cuh"

#if IO_F16
typedef f16 io_t;
DEVICE float io_load(io_t x) { return to_f32(x); }
DEVICE io_t io_store(float x) { return to_f16_saturated(x); }
#else
typedef float io_t;
DEVICE float io_load(io_t x) { return x; }
DEVICE io_t io_store(float x) { return x; }
#endif

// Eight consecutive elements; the address is a multiple of 16 bytes.
DEVICE void io_load8(const io_t* x, float (&values)[8]) {
#if IO_F16
    const u32x4 loaded = load16<u32x4>(x);
    const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        values[2 * j] = f16_bits_to_f32(static_cast<u16>(words[j] & 0xFFFF));
        values[2 * j + 1] = f16_bits_to_f32(static_cast<u16>(words[j] >> 16));
    }
#else
    const f32x4 a = load16<f32x4>(x);
    const f32x4 b = load16<f32x4>(x + 4);
    values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
    values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
#endif
}

DEVICE u32x4 pack8(const float (&values)[8]) {
    return u32x4{h2_pack(values[0], values[1]), h2_pack(values[2], values[3]), h2_pack(values[4], values[5]),
                 h2_pack(values[6], values[7])};
}

// Scores stay as the product left them; `factor` turns them into exponents of two. With a soft cap they are capped here,
// and the factor is log2(e).
DEVICE float score_of(float product, float scale, float softcap) {
#if HAS_SOFTCAP
    return softcap * tanhf(product * scale / softcap);
#else
    (void)scale, (void)softcap;
    return product;
#endif
}

// exp2(score * factor - anchor); factor is positive, so a score of -infinity gives 0.
DEVICE float weight_of(float score, float factor, float anchor) { return fast_exp2(fmaf(score, factor, -anchor)); }

// The anchor of a row's weights, its highest score; 0 while it has seen nothing.
DEVICE float anchor_of(float peak, float factor) { return peak == -INFINITY_F ? 0.0f : peak * factor; }
