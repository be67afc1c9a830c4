// product_out: how sums leave the kernels of products
//
// Defines   OUTPUT: 0 float32, 1 float16 (saturated), 2 added to float32, 3 float32
#pragma once
#include "common/platform.cuh"

#if OUTPUT == 1
typedef f16 out_t;
#else
typedef float out_t;
#endif

struct alignas(8) f32x2 {
    float x, y;
};

DEVICE void product_put(float* target, float value) { *target = OUTPUT == 2 ? *target + value : value; }
DEVICE void product_put(f16* target, float value) { *target = to_f16_saturated(value); }

// Two elements side by side, aligned as one.
DEVICE f32x2 product_pair(const float* source) { return *reinterpret_cast<const f32x2*>(source); }
DEVICE f32x2 product_pair(const f16*) { return {0, 0}; }
DEVICE void product_set_pair(float* target, float first, float second) {
    *reinterpret_cast<f32x2*>(target) = f32x2{first, second};
}
DEVICE void product_set_pair(f16* target, float first, float second) {
    *reinterpret_cast<u32*>(target) = h2_pack_saturated(first, second);
}

template <typename T>
DEVICE void product_put_pair(T* target, float first, float second) {
    const f32x2 before = OUTPUT == 2 ? product_pair(target) : f32x2{0, 0};
    product_set_pair(target, before.x + first, before.y + second);
}
