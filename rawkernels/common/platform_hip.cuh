// platform_hip: hiprtc of ROCm 6.4 and 7, and clang with `-x hip`.
//
// No `_sync` forms: their mask has another type in each release. Widths are given as WARP_SIZE, since `warpSize` is not a
// constant on ROCm 7.
#pragma once

#define KERNEL(max_threads) extern "C" __global__ void __launch_bounds__(max_threads)
#define DEVICE __device__ inline __attribute__((always_inline))
#define RESTRICT __restrict__

#define SHARED __shared__ __attribute__((aligned(16)))
#define DYNAMIC_SHARED(type, name)                                              \
    extern __shared__ __attribute__((aligned(16))) u8 pyllm_dynamic_shared[];   \
    type* const name = reinterpret_cast<type*>(pyllm_dynamic_shared)

#define DEVICE_TABLE __device__ const

#define GRID_DEPENDENCY() ((void)0)
#define BARRIER() __syncthreads()
// Lanes run in step; what is needed is that the compiler keeps the order of shared-memory accesses.
#define WARP_BARRIER()                                          \
    do {                                                        \
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");  \
        __builtin_amdgcn_wave_barrier();                        \
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");  \
    } while (0)
#define DEVICE_FENCE() __threadfence()

DEVICE i32 warp_shfl_bits(i32 value, int lane) { return __shfl(value, lane, WARP_SIZE); }
DEVICE i32 warp_shfl_xor_bits(i32 value, int mask) { return __shfl_xor(value, mask, WARP_SIZE); }
DEVICE i32 warp_shfl_down_bits(i32 value, int delta) { return __shfl_down(value, delta, WARP_SIZE); }
DEVICE u64 warp_ballot(bool pred) { return __ballot(pred); }

DEVICE int popcount(u64 bits) { return __builtin_popcountll(bits); }

DEVICE i32 atomic_add(i32* address, i32 value) { return atomicAdd(address, value); }
DEVICE float atomic_add(float* address, float value) { return atomicAdd(address, value); }
DEVICE i32 atomic_max(i32* address, i32 value) { return atomicMax(address, value); }

DEVICE i32 dot4(i32 a, i32 b, i32 acc) {
#if defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_sudot4(true, a, true, b, acc, false);
#else
    return __builtin_amdgcn_sdot4(a, b, acc, false);
#endif
}

DEVICE float f16_bits_to_f32(u16 bits) { return (float)__builtin_bit_cast(_Float16, bits); }
DEVICE u16 f32_to_f16_bits(float value) { return __builtin_bit_cast(u16, (_Float16)value); }

typedef _Float16 pyllm_half2 __attribute__((ext_vector_type(2)));
DEVICE pyllm_half2 pyllm_halves(u32 pair) { return __builtin_bit_cast(pyllm_half2, pair); }
DEVICE u32 pyllm_pair(pyllm_half2 halves) { return __builtin_bit_cast(u32, halves); }

DEVICE u32 h2_add(u32 a, u32 b) {
#pragma clang fp contract(off)
    return pyllm_pair(pyllm_halves(a) + pyllm_halves(b));
}
DEVICE u32 h2_sub(u32 a, u32 b) {
#pragma clang fp contract(off)
    return pyllm_pair(pyllm_halves(a) - pyllm_halves(b));
}
DEVICE u32 h2_mul(u32 a, u32 b) {
#pragma clang fp contract(off)
    return pyllm_pair(pyllm_halves(a) * pyllm_halves(b));
}
DEVICE u32 h2_fma(u32 a, u32 b, u32 c) {
    return pyllm_pair(__builtin_elementwise_fma(pyllm_halves(a), pyllm_halves(b), pyllm_halves(c)));
}
DEVICE u32 h2_pack(float low, float high) { return pyllm_pair(pyllm_half2{(_Float16)low, (_Float16)high}); }

// The instruction takes a selector of bytes and counts the bytes of its second factor first.
DEVICE u32 h2_low(u32 pair) { return (pair & 0xFFFFu) * 0x10001u; }
DEVICE u32 h2_high(u32 pair) { return (pair >> 16) * 0x10001u; }

DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) {
    const u32 bytes = (selector & 7) | (selector & 0x70) << 4 | (selector & 0x700) << 8 | (selector & 0x7000) << 12;
    return __builtin_amdgcn_perm(b, a, bytes);
}

DEVICE u32 bytes_of_table(u32 index, const u32 (&table)[4]) {
    const u32 low = __builtin_amdgcn_perm(table[1], table[0], index & 0x07070707u);
    const u32 high = __builtin_amdgcn_perm(table[3], table[2], index & 0x07070707u);
    return __builtin_amdgcn_perm(high, low, 0x03020100u | (index & 0x08080808u) >> 1);
}

DEVICE float fast_exp(float x) { return __builtin_amdgcn_exp2f(x * 1.4426950408889634f); }
DEVICE float fast_exp2(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE float rsqrt_f(float x) { return rsqrtf(x); }

DEVICE float mul_rn(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
}
DEVICE float add_rn(float a, float b) {
#pragma clang fp contract(off)
    return a + b;
}
DEVICE float sub_rn(float a, float b) {
#pragma clang fp contract(off)
    return a - b;
}

typedef u32 pyllm_raw16 __attribute__((ext_vector_type(4)));

template <typename T = u32x4>
DEVICE T load16(const void* address) {
    static_assert(sizeof(T) == 16, "load16 loads 16 bytes");
    return __builtin_bit_cast(T, *reinterpret_cast<const pyllm_raw16*>(address));
}

template <typename T>
DEVICE void store16(void* address, T value) {
    static_assert(sizeof(T) == 16, "store16 stores 16 bytes");
    *reinterpret_cast<pyllm_raw16*>(address) = __builtin_bit_cast(pyllm_raw16, value);
}

// No copies that bypass the registers: at once.
DEVICE void async_copy16(void* shared, const void* global) { store16(shared, load16<u32x4>(global)); }
DEVICE void async_commit() {}

template <int N>
DEVICE void async_wait() {}
