// K/V rows in their storage type.
//
// Defines   KV_TYPE: 0 float32, 1 float16, 2 bfloat16 (as u16), 3 q8_0, 4 q4_0 (as bytes)
//
// A row holds the elements of all kv heads. Quantised rows are cut into blocks of 32 elements and hold all codes, then the
// blocks' scales as float16, then nothing up to a multiple of 16 bytes: so codes can be loaded 16 bytes at a time.
//   q8_0   code byte i: element i as a signed byte
//   q4_0   code byte 16 b + i: elements 32 b + i (low four bits) and 32 b + 16 + i, each plus 8
// Rows begin at multiples of 16 bytes. Functions take a row's first byte, its number of elements, and an element.
#pragma once
#include "common/faults.cuh"

#define KV_BLOCK 32       // elements of a block of a quantised type
#define KV_SMALLEST 1e-30f  // scales below count as 0, on every device alike

#if KV_TYPE == 0
typedef float kv_t;
#define KV_PIECE 8
#elif KV_TYPE == 1
typedef u16 kv_t;
#define KV_PIECE 8
#elif KV_TYPE == 2
typedef u16 kv_t;
#define KV_PIECE 8
#elif KV_TYPE == 3
typedef u8 kv_t;
#define KV_PIECE 16
#elif KV_TYPE == 4
typedef u8 kv_t;
#define KV_PIECE 32
#else
#error "KV_TYPE names a row type that has no kernel"
#endif

#define KV_QUANTISED (KV_TYPE >= 3)

#if KV_QUANTISED

// Bytes of codes in a row.
DEVICE i32 kv_code_bytes(i32 width) { return KV_TYPE == 3 ? width : width / 2; }

DEVICE u16 kv_scale(const kv_t* RESTRICT row, i32 width, i32 element) {
    return *reinterpret_cast<const u16*>(row + kv_code_bytes(width) + element / KV_BLOCK * 2);
}

#else

#if KV_TYPE == 0
DEVICE kv_t kv_store(float x) { return x; }
#elif KV_TYPE == 1
DEVICE kv_t kv_store(float x) { return f16_to_bits(to_f16(x)); }
#else
DEVICE kv_t kv_store(float x) { return f32_to_bf16(x); }
#endif

#endif

// KV_PIECE consecutive elements, whose codes begin at a multiple of 16 bytes, as pairs of f16. A type that f16 does not hold
// is rounded to it once; too large becomes the largest f16.
DEVICE void kv_unpack_piece(const void* codes, u16 scale_bits, u32 (&pairs)[KV_PIECE / 2]) {
    (void)scale_bits;
    const u32x4 loaded = load16<u32x4>(codes);
    const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#if KV_TYPE == 0
    const u32x4 more = load16<u32x4>(static_cast<const u32x4*>(codes) + 1);
    const u32 all[8] = {loaded.x, loaded.y, loaded.z, loaded.w, more.x, more.y, more.z, more.w};
    (void)words;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pairs[j] = to_f16_saturated(f32_from_bits(all[2 * j])).bits |
                   (u32)to_f16_saturated(f32_from_bits(all[2 * j + 1])).bits << 16;
    }
#elif KV_TYPE == 1
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = words[j];
#elif KV_TYPE == 2
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pairs[j] = to_f16_saturated(f32_from_bits(words[j] << 16)).bits |
                   (u32)to_f16_saturated(f32_from_bits(words[j] & 0xFFFF0000u)).bits << 16;
    }
#elif KV_TYPE == 3
    // A byte with its sign bit turned is the code plus 128; behind the high byte 0x64 it is the f16 1024 + 128 + code.
    const u32 scale = h2_splat(scale_bits);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 codes4 = words[j] ^ 0x80808080u;
        pairs[2 * j] = h2_mul(h2_sub(byte_perm(codes4, 0x64646464u, 0x4140), 0x64806480u), scale);
        pairs[2 * j + 1] = h2_mul(h2_sub(byte_perm(codes4, 0x64646464u, 0x4342), 0x64806480u), scale);
    }
#else
    // Likewise: 1024 + 8 + code. Low four bits are elements 0-15, high ones 16-31.
    const u32 scale = h2_splat(scale_bits);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const u32 codes4 = (j < 4 ? words[j % 4] : words[j % 4] >> 4) & 0x0F0F0F0Fu;
        pairs[2 * j] = h2_mul(h2_sub(byte_perm(codes4, 0x64646464u, 0x4140), 0x64086408u), scale);
        pairs[2 * j + 1] = h2_mul(h2_sub(byte_perm(codes4, 0x64646464u, 0x4342), 0x64086408u), scale);
    }
#endif
}

// The same of a row, from an element that is a multiple of KV_PIECE.
DEVICE void kv_load_piece(const kv_t* RESTRICT row, i32 width, i32 element, u32 (&pairs)[KV_PIECE / 2]) {
#if KV_QUANTISED
    kv_unpack_piece(row + kv_code_bytes(element), kv_scale(row, width, element), pairs);
#else
    (void)width;
    kv_unpack_piece(row + element, 0, pairs);
#endif
}

#if KV_TYPE == 0
// What rounding to f16 took away from the same elements, as f16.
DEVICE void kv_unpack_rest(const void* codes, u32 (&pairs)[KV_PIECE / 2]) {
    const float* const values = static_cast<const float*>(codes);
#pragma unroll
    for (int j = 0; j < KV_PIECE / 2; j++) {
        const float low = values[2 * j];
        const float high = values[2 * j + 1];
        pairs[j] = h2_pack(low - to_f32(to_f16_saturated(low)), high - to_f32(to_f16_saturated(high)));
    }
}
#endif

// Writes 32 consecutive elements from one that is a multiple of 32, rounded once to the storage type. A block of a
// quantised type in which a value is not finite becomes NaN as a whole.
DEVICE void kv_store32(kv_t* RESTRICT row, i32 width, i32 element, const float* values) {
#if KV_QUANTISED
    float largest = 0;
    float extreme = 0;  // the element of the largest magnitude, the first of several
    bool finite = true;
#pragma unroll
    for (int i = 0; i < KV_BLOCK; i++) {
        const float size = fabsf(values[i]);
        finite = finite && size < INFINITY_F;
        if (size > largest) largest = size, extreme = values[i];
    }
    const float step = KV_TYPE == 3 ? largest / 127.0f : extreme / -8.0f;
    const float inverse = finite && fabsf(step) >= KV_SMALLEST ? 1.0f / step : 0.0f;
    u32 words[KV_BLOCK / 4] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < KV_BLOCK; i++) {
        const float x = finite ? mul_rn(values[i], inverse) : 0.0f;
#if KV_TYPE == 3
        const float whole = floorf(fabsf(x));
        const float rounded = sub_rn(fabsf(x), whole) >= 0.5f ? whole + 1 : whole;  // half away from zero
        const i32 code = static_cast<i32>(x < 0 ? -rounded : rounded);
        words[i / 4] |= (static_cast<u32>(code) & 0xFFu) << 8 * (i % 4);
#else
        const i32 code = static_cast<i32>(add_rn(x, 8.5f));
        words[i % 16 / 4] |= static_cast<u32>(code < 15 ? code : 15) << (8 * (i % 4) + i / 16 * 4);
#endif
    }
    kv_t* const codes = row + kv_code_bytes(element);
#pragma unroll
    for (int i = 0; i < KV_BLOCK / (KV_TYPE == 3 ? 4 : 8); i += 4) {
        store16(codes + 4 * i, u32x4{words[i], words[i + 1], words[i + 2], words[i + 3]});
    }
    const u16 scale = !finite ? 0x7E00 : fabsf(step) >= KV_SMALLEST ? f32_to_f16_bits(step) : 0;
    *reinterpret_cast<u16*>(row + kv_code_bytes(width) + element / KV_BLOCK * 2) = scale;
#else
    (void)width;
#pragma unroll
    for (int i = 0; i < KV_BLOCK; i++) row[element + i] = kv_store(values[i]);
#endif
}
