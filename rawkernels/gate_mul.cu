// silu_mul: out[i] = gate[i] * sigmoid(gate[i]) * up[i]
// gelu_mul: out[i] = gelu(gate[i]) * up[i] with gelu(g) = 0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3)))
//
// Shapes    gate, up [n] f32, or both f16; out [n] f32 or f16, may be gate or up where the types agree
// Launch    grid (ceil(n / 2048)), block (256): eight elements per thread
// Numerics  f32; f16 saturates
// Defines   GATE 1 silu, 2 gelu; IN_F16, OUT_F16
// Compile   GATE=1,2 IN_F16=0,1 OUT_F16=0,1
#include "common/gates.cuh"

DEVICE float value_of(float x) { return x; }
DEVICE float value_of(f16 x) { return to_f32(x); }
DEVICE void put(float& target, float x) { target = x; }
DEVICE void put(f16& target, float x) { target = to_f16_saturated(x); }

#if IN_F16
typedef f16 in_t;
#else
typedef float in_t;
#endif

#if OUT_F16
typedef f16 out_t;
#else
typedef float out_t;
#endif

// Eight elements in pieces of 16 bytes.
template <typename T>
struct alignas(16) Piece {
    T x[16 / sizeof(T)];
};

template <typename T>
DEVICE void load8(const T* source, T (&x)[8]) {
    constexpr int size = 16 / sizeof(T);
#pragma unroll
    for (int j = 0; j < 8; j += size) {
        const Piece<T> piece = load16<Piece<T>>(source + j);
#pragma unroll
        for (int i = 0; i < size; i++) x[j + i] = piece.x[i];
    }
}

template <typename T>
DEVICE void store8(T* target, const T (&x)[8]) {
    constexpr int size = 16 / sizeof(T);
#pragma unroll
    for (int j = 0; j < 8; j += size) {
        Piece<T> piece;
#pragma unroll
        for (int i = 0; i < size; i++) piece.x[i] = x[j + i];
        store16(target + j, piece);
    }
}

KERNEL(256) gate_mul(const in_t* gate, const in_t* up, out_t* out, i64 n) {
    GRID_DEPENDENCY();
    const i64 first = 8 * (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x);
    if (first >= n) return;
    if (first + 8 <= n) {
        in_t g[8], u[8];
        out_t products[8];
        load8(gate + first, g);
        load8(up + first, u);
#pragma unroll
        for (int j = 0; j < 8; j++) put(products[j], gated(value_of(g[j]), value_of(u[j])));
        store8(out + first, products);
    } else {
        for (i64 i = first; i < n; i++) put(out[i], gated(value_of(gate[i]), value_of(up[i])));
    }
}
