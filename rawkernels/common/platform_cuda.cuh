// platform_cuda: NVRTC and nvcc. Needs no CUDA header, so a driver and NVRTC are enough to compile.
#pragma once

#if defined(KERNEL_MIN_BLOCKS)
#define KERNEL(max_threads) extern "C" __global__ void __launch_bounds__(max_threads, KERNEL_MIN_BLOCKS)
#else
#define KERNEL(max_threads) extern "C" __global__ void __launch_bounds__(max_threads)
#endif
#define DEVICE __device__ __forceinline__
#define RESTRICT __restrict__

#define SHARED __shared__ __align__(16)
#define DYNAMIC_SHARED(type, name)                                \
    extern __shared__ __align__(16) u8 pyllm_dynamic_shared[];    \
    type* const name = reinterpret_cast<type*>(pyllm_dynamic_shared)

#define DEVICE_TABLE __device__ const

#if __CUDA_ARCH__ >= 900
#define GRID_DEPENDENCY()                                          \
    do {                                                           \
        asm volatile("griddepcontrol.launch_dependents;");         \
        asm volatile("griddepcontrol.wait;" : : : "memory");       \
    } while (0)
#else
#define GRID_DEPENDENCY() ((void)0)
#endif

#define BARRIER() __syncthreads()
#define WARP_BARRIER() __syncwarp()
#define DEVICE_FENCE() __threadfence()

DEVICE i32 warp_shfl_bits(i32 value, int lane) { return __shfl_sync(0xFFFFFFFFu, value, lane); }
DEVICE i32 warp_shfl_xor_bits(i32 value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }
DEVICE i32 warp_shfl_down_bits(i32 value, int delta) { return __shfl_down_sync(0xFFFFFFFFu, value, delta); }
DEVICE u64 warp_ballot(bool pred) { return __ballot_sync(0xFFFFFFFFu, pred); }

DEVICE u32 warp_max_u32(u32 value) { return __reduce_max_sync(0xFFFFFFFFu, value); }
DEVICE u32 warp_min_u32(u32 value) { return __reduce_min_sync(0xFFFFFFFFu, value); }

DEVICE int popcount(u64 bits) { return __popcll(bits); }

DEVICE i32 atomic_add(i32* address, i32 value) { return atomicAdd(address, value); }
DEVICE float atomic_add(float* address, float value) { return atomicAdd(address, value); }
DEVICE i32 atomic_max(i32* address, i32 value) { return atomicMax(address, value); }

DEVICE i32 dot4(i32 a, i32 b, i32 acc) { return __dp4a(a, b, acc); }

DEVICE float f16_bits_to_f32(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE u16 f32_to_f16_bits(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE u32 h2_add(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

DEVICE u32 h2_sub(u32 a, u32 b) {
    u32 difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

DEVICE u32 h2_mul(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

DEVICE u32 h2_fma(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

DEVICE u32 h2_pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// PTX ISA, "cvt": with satfinite infinity becomes the largest number too, and a NaN stays one.
DEVICE u32 h2_pack_saturated(float low, float high) {
    u32 pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// In one instruction: the compiler makes two of it when mask and bits are constants.
DEVICE u32 and_or(u32 x, u32 mask, u32 bits) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
    return result;
}

// As halves, which instructions on two f16 can name without a permutation of bytes before.
DEVICE u32 h2_low(u32 pair) {
    u32 both;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(both) : "r"(pair));
    return both;
}

DEVICE u32 h2_high(u32 pair) {
    u32 both;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(both) : "r"(pair));
    return both;
}

DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

DEVICE u32 bytes_of_table(u32 index, const u32 (&table)[4]) {
    // Four indices as the four nibbles of a selector, which chooses among eight bytes; then the half of the table.
    const u32 packed = __byte_perm(index | index >> 4, 0, 0x4420);
    const u32 low = __byte_perm(table[0], table[1], packed & 0x7777);
    const u32 high = __byte_perm(table[2], table[3], packed & 0x7777);
    return __byte_perm(low, high, 0x3210 | (packed & 0x8888) >> 1);
}

// Without masking the selector, which __byte_perm would do.
DEVICE u32 bytes_at(u32 a, u32 b, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

DEVICE u32 bytes_of_signs(u32 word) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %1, 0xBA98;" : "=r"(bytes) : "r"(word));
    return bytes;
}

DEVICE void nibbles_of_table(u32 word, const u32 (&table)[4], u32& low, u32& high) {
    // Each half of the word is a selector for four nibbles, low and high ones in turn.
    const u32 places = word & 0x77777777u;
    const u32 halves = (word >> 1 & 0x44444444u) | 0x32103210u;
    u32 found[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 lower = bytes_at(table[0], table[1], places >> 16 * i);
        const u32 upper = bytes_at(table[2], table[3], places >> 16 * i);
        found[i] = bytes_at(lower, upper, halves >> 16 * i);
    }
    low = __byte_perm(found[0], found[1], 0x6420);
    high = __byte_perm(found[0], found[1], 0x7531);
}

DEVICE float fast_exp(float x) { return __expf(x); }

DEVICE float fast_exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

DEVICE float rsqrt_f(float x) { return rsqrtf(x); }

DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }

// Past the first cache: what is copied is used from shared memory.
DEVICE void async_copy16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global)
                 : "memory");
}

DEVICE void async_copy16_where(void* shared, const void* global, bool wanted) {
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n"
                 "@wanted cp.async.cg.shared.global [%0], [%1], 16;}"
                 :
                 : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"((int)wanted)
                 : "memory");
}

DEVICE void async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }

template <int N>
DEVICE void async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

// Through the built-in vector type, which the compiler moves in one instruction.
template <typename T = u32x4>
DEVICE T load16(const void* address) {
    static_assert(sizeof(T) == 16, "load16 loads 16 bytes");
    union {
        uint4 raw;
        T value;
    } both;
    both.raw = *reinterpret_cast<const uint4*>(address);
    return both.value;
}

template <typename T>
DEVICE void store16(void* address, T value) {
    static_assert(sizeof(T) == 16, "store16 stores 16 bytes");
    union {
        T value;
        uint4 raw;
    } both;
    both.value = value;
    *reinterpret_cast<uint4*>(address) = both.raw;
}
