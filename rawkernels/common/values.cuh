// values: N neighbouring elements of an array as floats, N 1, 4 or 8; of more than one the first is aligned to all of them,
//         at most to 16 bytes
#pragma once
#include "common/platform.cuh"

template <int N>
DEVICE void load_values(const float* source, float (&x)[N]) {
    if (N == 1) {
        x[0] = source[0];
        return;
    }
#pragma unroll
    for (int i = 0; i + 3 < N; i += 4) {
        const f32x4 four = load16<f32x4>(source + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}

template <int N>
DEVICE void load_values(const f16* source, float (&x)[N]) {
    if (N == 1) {
        x[0] = to_f32(source[0]);
        return;
    }
#pragma unroll
    for (int i = 0; i + 3 < N; i += 4) {
        const u64 four = *reinterpret_cast<const u64*>(source + i);
        x[i] = low_half((u32)four), x[i + 1] = high_half((u32)four);
        x[i + 2] = low_half((u32)(four >> 32)), x[i + 3] = high_half((u32)(four >> 32));
    }
}

template <int N>
DEVICE void store_values(float* target, const float (&x)[N]) {
    if (N == 1) {
        target[0] = x[0];
        return;
    }
#pragma unroll
    for (int i = 0; i + 3 < N; i += 4) store16(target + i, f32x4{x[i], x[i + 1], x[i + 2], x[i + 3]});
}

template <int N>
DEVICE void store_values(f16* target, const float (&x)[N]) {
    if (N == 1) {
        target[0] = to_f16_saturated(x[0]);
        return;
    }
#pragma unroll
    for (int i = 0; i + 3 < N; i += 4) {
        const u64 low = h2_pack_saturated(x[i], x[i + 1]), high = h2_pack_saturated(x[i + 2], x[i + 3]);
        *reinterpret_cast<u64*>(target + i) = low | high << 32;
    }
}
