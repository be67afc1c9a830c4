// platform: one vocabulary for CUDA, HIP and the host compiler. Every kernel includes this file first.
//
// The loader defines WARP_SIZE (32 or 64) and one of PYLLM_CUDA, PYLLM_HIP, PYLLM_EMULATED. Vendor #ifdefs and inline
// assembly live in common/ only.
//
// Provided per platform (platform_cuda.cuh, platform_hip.cuh, platform_emulated.cuh):
//   KERNEL(max_threads) name(...)    a kernel; max_threads per block at most
//                                    KERNEL_MIN_BLOCKS, defined before the include: so many blocks shall fit on a
//                                    multiprocessor, which bounds the registers of each on NVIDIA
//   DEVICE                           a device function, always inlined
//   RESTRICT                         pointers that do not alias
//   SHARED type name[n];             static shared memory, 16-byte aligned, for use inside kernels
//   DYNAMIC_SHARED(type, name);      the launch's shared_bytes, 16-byte aligned, as `type* name`
//   DEVICE_TABLE type name[n] = {...};   constant data, at file scope
//   GRID_DEPENDENCY();               first in a kernel, for all threads: the next kernel of the stream may start its blocks,
//                                    which wait at this place for the whole of this one. Weights can be read before it,
//                                    nothing that a kernel writes (programmatic dependent launch on NVIDIA)
//   BARRIER()                        all threads of the block; every thread must come here
//   WARP_BARRIER()                   all lanes of the warp; orders their shared-memory accesses
//   DEVICE_FENCE()                   writes before it are visible to the device before writes after it
//   warp_shfl_bits(v, lane), warp_shfl_xor_bits(v, mask), warp_shfl_down_bits(v, delta), warp_ballot(pred)
//   popcount(bits)                   of 64 bits, how many are set
//   warp_max_u32, warp_min_u32       over all lanes, the same in each
//   atomic_add, atomic_max           on global or shared memory; return the old value
//   dot4(a, b, acc)                  acc + sum of the four products of signed bytes
//   f16_bits_to_f32, f32_to_f16_bits
//   h2_add, h2_sub, h2_mul, h2_fma   on two f16 in a u32, each rounded once to nearest even; subnormal numbers count
//   h2_pack(low, high)               two floats as such a pair, rounded to nearest even
//   h2_pack_saturated(low, high)     the same; too large becomes the largest f16
//   and_or(x, mask, bits)            (x & mask) | bits
//   h2_low, h2_high                  one half of a pair, twice
//   byte_perm(a, b, selector)        byte j is byte (selector >> 4 j & 7) of the eight bytes a, b; selector is a constant
//   bytes_at(a, b, selector)         the same for any selector whose four lowest nibbles are below eight, whatever the others
//   bytes_of_signs(word)             each byte 0xFF where its uppermost bit is set, else 0
//   bytes_of_table(index, table)     byte j is byte index_j of 16 table bytes; each byte of index is 0 to 15
//   nibbles_of_table(word, table, low, high)   the same for the low nibbles of the four bytes of a word, and for the high ones
//   fast_exp, fast_exp2              a few ulp; exp(-inf) is 0
//   rsqrt_f                          1 / sqrt
//   mul_rn, add_rn, sub_rn           rounded on their own, never fused with a neighbour
//   load16<T>(p), store16(p, v)      one 128-bit access; p must be 16-byte aligned
//   async_copy16(shared, global)     16 bytes, both aligned, from global to shared memory; done at the latest when
//   async_copy16_where(shared, global, wanted)   the same, or nothing
//   async_commit(), async_wait<N>()  the thread has waited: commit ends a group of its copies, wait returns when all of its
//                                    groups but the last N have arrived. Other threads see them behind a barrier
//   threadIdx, blockIdx, blockDim, gridDim, and from C: fmaf fabsf fminf fmaxf sqrtf floorf rintf expf exp2f logf
//   log2f tanhf cosf sinf powf erff, min, max
//
// Warp exchanges (shuffles, ballots, warp sums, tiles) must be reached by all lanes of a warp together.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

// Storage only: arithmetic is in float, so that no platform rounds where another does not.
struct f16 {
    u16 bits;
};

struct alignas(16) f32x4 {
    float x, y, z, w;
};

struct alignas(16) u32x4 {
    u32 x, y, z, w;
};

#if defined(PYLLM_CUDA)
#include "common/platform_cuda.cuh"
#elif defined(PYLLM_HIP)
#include "common/platform_hip.cuh"
#elif defined(PYLLM_EMULATED)
#include "common/platform_emulated.cuh"
#else
#error "the loader defines PYLLM_CUDA, PYLLM_HIP or PYLLM_EMULATED"
#endif

static_assert(WARP_SIZE == 32 || WARP_SIZE == 64, "WARP_SIZE is 32 or 64");
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(f16) == 2, "fixed-width types");

// The same bits as another type of the same size.
template <typename To, typename From>
DEVICE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
    union {
        From from;
        To to;
    } both;
    both.from = from;
    return both.to;
}

DEVICE u32 f32_bits(float value) { return bits_as<u32>(value); }
DEVICE float f32_from_bits(u32 bits) { return bits_as<float>(bits); }

#define INFINITY_F f32_from_bits(0x7F800000u)
#define NAN_F f32_from_bits(0x7FC00000u)

DEVICE f16 f16_from_bits(u16 bits) { return f16{bits}; }
DEVICE u16 f16_to_bits(f16 value) { return value.bits; }
DEVICE float to_f32(f16 value) { return f16_bits_to_f32(value.bits); }
DEVICE f16 to_f16(float value) { return f16{f32_to_f16_bits(value)}; }  // to nearest even; too large: infinity

// Comparisons and not fminf, which would make a number of a NaN.
DEVICE float f16_range(float value) { return value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value; }

// The same for activations: too large becomes the largest float16, since one infinity would spoil a whole row of sums.
DEVICE f16 to_f16_saturated(float value) { return to_f16(f16_range(value)); }

// The two f16 of a pair as floats.
DEVICE float low_half(u32 pair) { return f16_bits_to_f32((u16)(pair & 0xFFFF)); }
DEVICE float high_half(u32 pair) { return f16_bits_to_f32((u16)(pair >> 16)); }

#if !defined(PYLLM_CUDA)  // which has instructions for these
DEVICE u32 and_or(u32 x, u32 mask, u32 bits) { return (x & mask) | bits; }

DEVICE void async_copy16_where(void* shared, const void* global, bool wanted) {
    if (wanted) async_copy16(shared, global);
}
#endif

#if !defined(PYLLM_CUDA)  // which has an instruction for it
DEVICE u32 h2_pack_saturated(float low, float high) { return h2_pack(f16_range(low), f16_range(high)); }
#endif

DEVICE u32 h2_splat(u16 bits) { return bits * 0x10001u; }  // the same f16 twice

DEVICE float bf16_to_f32(u16 bits) { return f32_from_bits((u32)bits << 16); }

// To nearest even; every NaN becomes 0x7FC0.
DEVICE u16 f32_to_bf16(float value) {
    const u32 bits = f32_bits(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
    return (u16)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Lane and warp of the calling thread, in blocks of one dimension.
#define LANE() ((int)(threadIdx.x % WARP_SIZE))
#define WARP_ID() ((int)(threadIdx.x / WARP_SIZE))

// Value of another lane; T has 4 bytes. shfl takes the lane modulo WARP_SIZE; shfl_down keeps the own value where the
// source would lie past the last lane.
template <typename T>
DEVICE T shfl(T value, int lane) {
    return bits_as<T>(warp_shfl_bits(bits_as<i32>(value), lane));
}

template <typename T>
DEVICE T shfl_xor(T value, int mask) {
    return bits_as<T>(warp_shfl_xor_bits(bits_as<i32>(value), mask));
}

template <typename T>
DEVICE T shfl_down(T value, int delta) {
    return bits_as<T>(warp_shfl_down_bits(bits_as<i32>(value), delta));
}

// One bit per lane whose pred is true; bits of missing lanes are 0. A macro: CUDA's headers own a function of that name.
#define ballot(pred) warp_ballot(pred)

// Butterflies: every lane gets the same bits, since each step adds the same pair on both sides.
DEVICE float warp_sum(float value) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

#if !defined(PYLLM_CUDA)  // which has instructions for these
DEVICE u32 bytes_at(u32 a, u32 b, u32 selector) { return byte_perm(a, b, selector & 0xFFFFu); }

DEVICE u32 bytes_of_signs(u32 word) { return (word >> 7 & 0x01010101u) * 255; }

DEVICE void nibbles_of_table(u32 word, const u32 (&table)[4], u32& low, u32& high) {
    low = bytes_of_table(word & 0x0F0F0F0Fu, table);
    high = bytes_of_table(word >> 4 & 0x0F0F0F0Fu, table);
}

DEVICE u32 warp_max_u32(u32 value) {
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) value = max(value, shfl_xor(value, mask));
    return value;
}

DEVICE u32 warp_min_u32(u32 value) {
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) value = min(value, shfl_xor(value, mask));
    return value;
}
#endif

DEVICE float warp_max(float value) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) value = fmaxf(value, shfl_xor(value, mask));
    return value;
}
