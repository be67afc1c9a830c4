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
        pairs[j] = h2_pack_saturated(f32_from_bits(all[2 * j]), f32_from_bits(all[2 * j + 1]));
    }
#elif KV_TYPE == 1
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = words[j];
#elif KV_TYPE == 2
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pairs[j] = h2_pack_saturated(f32_from_bits(words[j] << 16), f32_from_bits(words[j] & 0xFFFF0000u));
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

#if KV_QUANTISED

// Two codes, bytes 0 and 1 or 2 and 3 of four, as f16: behind the high byte 0x64 a byte is 1024 more, and then there is what
// codes are stored with.
template <int HIGH>
DEVICE u32 two_codes(u32 codes) {
    return h2_sub(byte_perm(codes, 0x64646464u, HIGH ? 0x4342 : 0x4140), KV_TYPE == 3 ? 0x64806480u : 0x64086408u);
}

// Signed bytes as bytes that are 128 more; four-bit codes of the low or high halves of bytes.
DEVICE u32 four_codes(u32 word, int high) {
    return KV_TYPE == 3 ? word ^ 0x80808080u : (high ? word >> 4 : word) & 0x0F0F0F0Fu;
}

#endif

#if KV_TYPE != 1

// Eight consecutive elements as they are stored, from one that is a multiple of eight.
struct KVEight {
#if KV_QUANTISED
    u64 codes;
    u16 scale;
#else
    u32x4 words[KV_TYPE == 0 ? 2 : 1];
#endif
};

DEVICE void kv_load_eight(KVEight& stored, const kv_t* RESTRICT row, i32 width, i32 element) {
#if KV_QUANTISED
    const i32 code = KV_TYPE == 3 ? element : element / KV_BLOCK * 16 + element % 16;
    stored.codes = *reinterpret_cast<const u64*>(row + code);
    stored.scale = kv_scale(row, width, element);
#else
    (void)width;
#pragma unroll
    for (int i = 0; i < (KV_TYPE == 0 ? 2 : 1); i++) {
        stored.words[i] = load16<u32x4>(reinterpret_cast<const u32x4*>(row + element) + i);
    }
#endif
}

// The same as pairs of f16, rounded as kv_unpack_piece does it.
DEVICE u32x4 kv_unpack_eight(const KVEight& stored, i32 element) {
#if KV_QUANTISED
    const u32 scale = h2_splat(stored.scale);
    const int high = KV_TYPE == 4 && element % KV_BLOCK >= 16;
    const u32 a = four_codes(static_cast<u32>(stored.codes), high);
    const u32 b = four_codes(static_cast<u32>(stored.codes >> 32), high);
    return u32x4{h2_mul(two_codes<0>(a), scale), h2_mul(two_codes<1>(a), scale), h2_mul(two_codes<0>(b), scale),
                 h2_mul(two_codes<1>(b), scale)};
#else
    (void)element;
    const u32x4 x = stored.words[0];
#if KV_TYPE == 0
    const u32x4 y = stored.words[1];
    return u32x4{h2_pack_saturated(f32_from_bits(x.x), f32_from_bits(x.y)),
                 h2_pack_saturated(f32_from_bits(x.z), f32_from_bits(x.w)),
                 h2_pack_saturated(f32_from_bits(y.x), f32_from_bits(y.y)),
                 h2_pack_saturated(f32_from_bits(y.z), f32_from_bits(y.w))};
#else
    const u32 words[4] = {x.x, x.y, x.z, x.w};
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pairs[j] = h2_pack_saturated(f32_from_bits(words[j] << 16), f32_from_bits(words[j] & 0xFFFF0000u));
    }
    return u32x4{pairs[0], pairs[1], pairs[2], pairs[3]};
#endif
#endif
}

#endif

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

// Four consecutive elements, from one that is a multiple of four, as they are: every type's values are float32 numbers.
DEVICE f32x4 kv_load4(const kv_t* RESTRICT row, i32 width, i32 element) {
#if KV_QUANTISED
    const float scale = f16_bits_to_f32(kv_scale(row, width, element));
    const i32 code = KV_TYPE == 3 ? element : element / KV_BLOCK * 16 + element % 16;
    const u32 codes = *reinterpret_cast<const u32*>(row + code) >> (KV_TYPE == 4 && element % KV_BLOCK >= 16 ? 4 : 0);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const i32 byte = codes >> 8 * i & (KV_TYPE == 3 ? 0xFF : 0x0F);
        x[i] = mul_rn(static_cast<float>(KV_TYPE == 3 ? (byte ^ 0x80) - 128 : byte - 8), scale);
    }
    return f32x4{x[0], x[1], x[2], x[3]};
#else
    (void)width;
#if KV_TYPE == 0
    return load16<f32x4>(row + element);
#else
    const u64 loaded = *reinterpret_cast<const u64*>(row + element);
    const u32 low = static_cast<u32>(loaded);
    const u32 high = static_cast<u32>(loaded >> 32);
#if KV_TYPE == 1
    return f32x4{low_half(low), high_half(low), low_half(high), high_half(high)};
#else
    return f32x4{f32_from_bits(low << 16), f32_from_bits(low & 0xFFFF0000u), f32_from_bits(high << 16),
                 f32_from_bits(high & 0xFFFF0000u)};
#endif
#endif
#endif
}

#if KV_QUANTISED

// What the codes of a block are made with, from its element of the largest magnitude, the first of several; that is infinite
// if an element is not finite, and then the block becomes NaN as a whole.
struct KVStep {
    float inverse;
    bool finite;
    u16 scale;
};

DEVICE KVStep kv_step(float extreme) {
    const bool finite = fabsf(extreme) < INFINITY_F;
    const float step = KV_TYPE == 3 ? fabsf(extreme) / 127.0f : extreme / -8.0f;
    const bool large = fabsf(step) >= KV_SMALLEST;
    const u16 scale = !finite ? 0x7E00 : large ? f32_to_f16_bits(step) : 0;
    return KVStep{finite && large ? 1.0f / step : 0.0f, finite, scale};
}

// The extreme of what came before and x.
DEVICE float kv_extreme_of(float before, float x) {
    return fabsf(x) <= fabsf(before) ? before : fabsf(x) < INFINITY_F ? x : INFINITY_F;
}

// That of LANES lanes beside each other, whose elements follow each other.
template <int LANES>
DEVICE float kv_extreme_of_lanes(float own) {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
        const float other = shfl_xor(own, mask);
        const bool is_first = LANE() & mask;  // the other one is
        if (fabsf(other) > fabsf(own) || (is_first && fabsf(other) == fabsf(own))) own = other;
    }
    return own;
}

// Four codes, each in a byte.
DEVICE u32 kv_codes(const float (&x)[4], const KVStep& step) {
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float scaled = step.finite ? mul_rn(x[i], step.inverse) : 0.0f;
#if KV_TYPE == 3
        const float whole = floorf(fabsf(scaled));
        const float rounded = sub_rn(fabsf(scaled), whole) >= 0.5f ? whole + 1 : whole;  // half away from zero
        codes |= (static_cast<u32>(static_cast<i32>(scaled < 0 ? -rounded : rounded)) & 0xFFu) << 8 * i;
#else
        const i32 code = static_cast<i32>(add_rn(scaled, 8.5f));
        codes |= static_cast<u32>(code < 15 ? code : 15) << 8 * i;
#endif
    }
    return codes;
}

// Each lane writes eight consecutive elements, from one that is a multiple of eight: four lanes beside each other hold a block,
// of which all or none are wanted. Whole warps come here.
DEVICE void kv_store8(kv_t* RESTRICT row, i32 width, i32 element, const f32x4& low, const f32x4& high, bool wanted) {
    const float a[4] = {low.x, low.y, low.z, low.w};
    const float b[4] = {high.x, high.y, high.z, high.w};
    float extreme = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) extreme = kv_extreme_of(extreme, a[i]);
#pragma unroll
    for (int i = 0; i < 4; i++) extreme = kv_extreme_of(extreme, b[i]);
    const KVStep step = kv_step(kv_extreme_of_lanes<KV_BLOCK / 8>(extreme));
    const u32 codes[2] = {kv_codes(a, step), kv_codes(b, step)};
    const i32 in_block = element % KV_BLOCK;
    u8* const block = row + kv_code_bytes(element - in_block);
#if KV_TYPE == 3
    if (!wanted) return;
    *reinterpret_cast<u64*>(block + in_block) = codes[0] | static_cast<u64>(codes[1]) << 32;
#else
    // Lanes of elements 0-15 write the first four bytes of the eight that they share with those of 16-31, the others the rest.
    const bool upper = LANE() & 2;
    const u32 other = shfl_xor(codes[upper ? 0 : 1], 2);
    if (!wanted) return;
    *reinterpret_cast<u32*>(block + in_block % 16 + (upper ? 4 : 0)) = upper ? other | codes[1] << 4 : codes[0] | other << 4;
#endif
    if (in_block == 0) *reinterpret_cast<u16*>(row + kv_code_bytes(width) + element / KV_BLOCK * 2) = step.scale;
}

#endif

// Each lane writes four consecutive elements, from one that is a multiple of four, rounded once to the storage type. Lanes beside
// each other hold neighbours: eight lanes from a multiple of eight on hold a block of a quantised type, of which all or none
// are wanted. Whole warps come here. A block in which a value is not finite becomes NaN as a whole.
DEVICE void kv_store4(kv_t* RESTRICT row, i32 width, i32 element, const f32x4& values, bool wanted) {
#if KV_QUANTISED
    const float x[4] = {values.x, values.y, values.z, values.w};
    float extreme = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) extreme = kv_extreme_of(extreme, x[i]);
    const KVStep step = kv_step(kv_extreme_of_lanes<KV_BLOCK / 4>(extreme));
    u32 codes = kv_codes(x, step);
#if KV_TYPE == 4
    codes |= shfl_xor(codes, 4) << 4;  // for the lanes of elements 0-15
#endif
    if (!wanted) return;
    const i32 in_block = element % KV_BLOCK;
    if (KV_TYPE == 3 || in_block < 16) {
        *reinterpret_cast<u32*>(row + kv_code_bytes(element - in_block) + in_block) = codes;
    }
    if (in_block == 0) *reinterpret_cast<u16*>(row + kv_code_bytes(width) + element / KV_BLOCK * 2) = step.scale;
#else
    (void)width;
    if (!wanted) return;
#if KV_TYPE == 0
    store16(row + element, values);
#else
#if KV_TYPE == 1  // pairs: NVRTC 13.0 loses two of four numbers that are rounded one by one
    const u64 low = h2_pack(values.x, values.y);
    const u64 high = h2_pack(values.z, values.w);
#else
    const u64 low = f32_to_bf16(values.x) | static_cast<u32>(f32_to_bf16(values.y)) << 16;
    const u64 high = f32_to_bf16(values.z) | static_cast<u32>(f32_to_bf16(values.w)) << 16;
#endif
    *reinterpret_cast<u64*>(row + element) = low | high << 32;
#endif
#endif
}
