// platform_emulated: the host's C++ compiler. A thread of a block is a fibre; see pyllm/device/emulation.
#pragma once

#include "common/emulation.cuh"

Emulation* pyllm_emulation;  // set by the runtime before the kernel runs

#define KERNEL(max_threads) void
#define DEVICE inline __attribute__((always_inline))
#define RESTRICT __restrict__

#define threadIdx (pyllm_emulation->thread_index)
#define blockIdx (pyllm_emulation->block_index)
#define blockDim (pyllm_emulation->block_extent)
#define gridDim (pyllm_emulation->grid_extent)

// A section of its own: the runtime poisons it as a whole before each block. `used`, since the compiler would otherwise
// take what no code writes for zero.
#define SHARED static __attribute__((section("pyllm_shared"), aligned(16), used))
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(pyllm_emulation->dynamic_shared)

#define DEVICE_TABLE static const

#define GRID_DEPENDENCY() ((void)0)
#define BARRIER() pyllm_emulation->barrier()
#define WARP_BARRIER() ((void)pyllm_emulation->exchange(EXCHANGE_BARRIER))
#define DEVICE_FENCE() ((void)0)

// Shows `bytes` at `value` to the other lanes; returns what all of them show, and in `lanes` which of them came.
DEVICE const u8* pyllm_exchange(int kind, const void* value, int bytes, u64& lanes) {
    u8* const slots = pyllm_emulation->slots;
    __builtin_memcpy(slots + pyllm_emulation->lane * EXCHANGE_BYTES, value, bytes);
    lanes = pyllm_emulation->exchange(kind);
    return slots;
}

// A lane that has ended has no value: all bits set.
DEVICE i32 pyllm_shuffle(i32 value, int source) {
    u64 lanes;
    const u8* const slots = pyllm_exchange(EXCHANGE_SHUFFLE, &value, sizeof(value), lanes);
    if (!((lanes >> source) & 1)) return -1;
    __builtin_memcpy(&value, slots + source * EXCHANGE_BYTES, sizeof(value));
    return value;
}

DEVICE i32 warp_shfl_bits(i32 value, int lane) { return pyllm_shuffle(value, lane & (WARP_SIZE - 1)); }
DEVICE i32 warp_shfl_xor_bits(i32 value, int mask) {
    const int source = pyllm_emulation->lane ^ mask;
    return pyllm_shuffle(value, source < WARP_SIZE ? source : pyllm_emulation->lane);
}
DEVICE i32 warp_shfl_down_bits(i32 value, int delta) {
    const int source = pyllm_emulation->lane + delta;
    return pyllm_shuffle(value, source < WARP_SIZE ? source : pyllm_emulation->lane);
}

DEVICE u64 warp_ballot(bool pred) {
    u64 lanes, votes = 0;
    const u8* const slots = pyllm_exchange(EXCHANGE_BALLOT, &pred, sizeof(pred), lanes);
    for (int lane = 0; lane < WARP_SIZE; lane++) {
        if ((lanes >> lane) & 1 && slots[lane * EXCHANGE_BYTES]) votes |= (u64)1 << lane;
    }
    return votes;
}

// Plain accesses: no other thread runs between the load and the store.
template <typename T>
DEVICE T pyllm_replace(T* address, T value) {
    const T old = *address;
    *address = value;
    return old;
}

DEVICE int popcount(u64 bits) { return __builtin_popcountll(bits); }

DEVICE i32 atomic_add(i32* address, i32 value) { return pyllm_replace(address, (i32)((u32)*address + (u32)value)); }
DEVICE float atomic_add(float* address, float value) { return pyllm_replace(address, *address + value); }
DEVICE i32 atomic_max(i32* address, i32 value) { return pyllm_replace(address, *address > value ? *address : value); }

DEVICE i32 dot4(i32 a, i32 b, i32 acc) {
    for (int byte = 0; byte < 4; byte++) acc += (i32)(i8)(a >> 8 * byte) * (i32)(i8)(b >> 8 * byte);
    return acc;
}

DEVICE float pyllm_float(u32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

DEVICE u32 pyllm_float_bits(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}

// By bits, since not every host compiler has a 2-byte float. Scaling by 2^112 moves the exponent from a bias of 15 to one
// of 127, for subnormal numbers too; infinity and NaN come out as 2^16 and more and get the exponent of all ones.
DEVICE float f16_bits_to_f32(u16 bits) {
    const u32 sign = (u32)(bits & 0x8000u) << 16;
    const float scaled = pyllm_float((u32)(bits & 0x7FFFu) << 13) * pyllm_float(0x77800000u);
    const u32 magnitude = pyllm_float_bits(scaled) | ((bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u);
    return pyllm_float(sign | magnitude);
}

DEVICE u16 f32_to_f16_bits(float value) {
    const u32 bits = pyllm_float_bits(value);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const u32 sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7F800000u) return (u16)(sign | 0x7E00u);   // NaN
    if (magnitude >= 0x47800000u) return (u16)(sign | 0x7C00u);  // 2^16 and more
    if (magnitude < 0x38800000u) {                               // subnormal: the sum's last bit is worth 2^-24
        return (u16)(sign | (pyllm_float_bits(pyllm_float(magnitude) + 0.5f) & 0x7FFu));
    }
    const u32 rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return (u16)(sign | ((rounded - 0x38000000u) >> 13));
}

// A double holds sums of f16 products exactly. On its way through float it is rounded to odd, so that only the last
// rounding counts.
DEVICE u16 pyllm_f16_bits(double value) {
    const float rounded = (float)value;
    if ((double)rounded == value || value != value) return f32_to_f16_bits(rounded);
    u32 bits = pyllm_float_bits(rounded);
    if (__builtin_fabs((double)rounded) > __builtin_fabs(value)) bits--;
    return f32_to_f16_bits(pyllm_float(bits | 1u));
}

DEVICE double pyllm_half(u32 pair, int index) { return (double)f16_bits_to_f32((u16)(pair >> 16 * index)); }
DEVICE u32 pyllm_pair(double low, double high) { return pyllm_f16_bits(low) | (u32)pyllm_f16_bits(high) << 16; }

DEVICE u32 h2_fma(u32 a, u32 b, u32 c) {
    return pyllm_pair(pyllm_half(a, 0) * pyllm_half(b, 0) + pyllm_half(c, 0),
                      pyllm_half(a, 1) * pyllm_half(b, 1) + pyllm_half(c, 1));
}
DEVICE u32 h2_add(u32 a, u32 b) {
    return pyllm_pair(pyllm_half(a, 0) + pyllm_half(b, 0), pyllm_half(a, 1) + pyllm_half(b, 1));
}
DEVICE u32 h2_sub(u32 a, u32 b) {
    return pyllm_pair(pyllm_half(a, 0) - pyllm_half(b, 0), pyllm_half(a, 1) - pyllm_half(b, 1));
}
DEVICE u32 h2_mul(u32 a, u32 b) {
    return pyllm_pair(pyllm_half(a, 0) * pyllm_half(b, 0), pyllm_half(a, 1) * pyllm_half(b, 1));
}
DEVICE u32 h2_pack(float low, float high) { return f32_to_f16_bits(low) | (u32)f32_to_f16_bits(high) << 16; }

DEVICE u32 h2_low(u32 pair) { return (pair & 0xFFFFu) * 0x10001u; }
DEVICE u32 h2_high(u32 pair) { return (pair >> 16) * 0x10001u; }

DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 chosen = 0;
    for (int j = 0; j < 4; j++) chosen |= (u32)(bytes >> 8 * (selector >> 4 * j & 7) & 255) << 8 * j;
    return chosen;
}

DEVICE u32 bytes_of_table(u32 index, const u32 (&table)[4]) {
    u32 bytes = 0;
    for (int j = 0; j < 4; j++) {
        const u32 i = index >> 8 * j & 15;
        bytes |= (table[i / 4] >> 8 * (i % 4) & 255) << 8 * j;
    }
    return bytes;
}

#define PYLLM_MATH(name) \
    DEVICE float name##f(float x) { return __builtin_##name##f(x); }
PYLLM_MATH(fabs)
PYLLM_MATH(sqrt)
PYLLM_MATH(floor)
PYLLM_MATH(rint)
PYLLM_MATH(exp)
PYLLM_MATH(exp2)
PYLLM_MATH(log)
PYLLM_MATH(log2)
PYLLM_MATH(tanh)
PYLLM_MATH(cos)
PYLLM_MATH(sin)
PYLLM_MATH(erf)
#undef PYLLM_MATH
DEVICE float fminf(float x, float y) { return __builtin_fminf(x, y); }
DEVICE float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
DEVICE float powf(float x, float y) { return __builtin_powf(x, y); }
DEVICE float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }

DEVICE float fast_exp(float x) { return expf(x); }
DEVICE float fast_exp2(float x) { return exp2f(x); }
DEVICE float rsqrt_f(float x) { return 1.0f / sqrtf(x); }

DEVICE float mul_rn(float a, float b) { return a * b; }  // compiled with -ffp-contract=off
DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float sub_rn(float a, float b) { return a - b; }

template <typename T>
DEVICE T min(T x, T y) { return y < x ? y : x; }
template <typename T>
DEVICE T max(T x, T y) { return x < y ? y : x; }

template <typename T = u32x4>
DEVICE T load16(const void* address) {
    static_assert(sizeof(T) == 16, "load16 loads 16 bytes");
    if ((u64)address % 16) pyllm_emulation->fail(FAULT_MISALIGNED);
    T value;
    __builtin_memcpy(&value, address, 16);
    return value;
}

template <typename T>
DEVICE void store16(void* address, T value) {
    static_assert(sizeof(T) == 16, "store16 stores 16 bytes");
    if ((u64)address % 16) pyllm_emulation->fail(FAULT_MISALIGNED);
    __builtin_memcpy(address, &value, 16);
}

// As late as allowed: a thread's copies happen when it waits for them, and what they will overwrite is a NaN until then.
struct pyllm_copy {
    void* shared;
    const void* global;
    int group;
};

constexpr int PYLLM_MOST_COPIES = 127;  // under way, of one thread
static pyllm_copy pyllm_copies[1024][PYLLM_MOST_COPIES];
static int pyllm_last_group[1024];  // only differences count

// A thread's last copy: -1 when there is none, which is what a block finds in shared memory. In a function, so that only
// kernels that copy so have this array.
static DEVICE i8& pyllm_last_copy(int thread) {
    SHARED i8 last[1024];
    return last[thread];
}

DEVICE void async_copy16(void* shared, const void* global) {
    const int thread = (int)threadIdx.x;
    if ((u64)shared % 16 || (u64)global % 16) pyllm_emulation->fail(FAULT_MISALIGNED);
    if (pyllm_last_copy(thread) + 1 == PYLLM_MOST_COPIES) pyllm_emulation->fail(FAULT_RESOURCES);
    pyllm_copies[thread][++pyllm_last_copy(thread)] = pyllm_copy{shared, global, pyllm_last_group[thread] + 1};
    __builtin_memset(shared, 0xFF, 16);
}

DEVICE void async_commit() { pyllm_last_group[threadIdx.x]++; }

template <int N>
DEVICE void async_wait() {
    const int thread = (int)threadIdx.x;
    pyllm_copy* const copies = pyllm_copies[thread];
    int kept = 0;
    for (int i = 0; i <= pyllm_last_copy(thread); i++) {
        if (copies[i].group <= pyllm_last_group[thread] - N) {
            __builtin_memcpy(copies[i].shared, copies[i].global, 16);
        } else {
            copies[kept++] = copies[i];
        }
    }
    pyllm_last_copy(thread) = (i8)(kept - 1);
}
