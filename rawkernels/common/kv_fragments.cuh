// kv_fragments: factors of tile_mma's products straight from K/V rows as they are stored, for rows in shared memory.
//
// A product over elements may take them in any order, if queries come in the same; and columns of V may come in any order,
// if it is known which is which. So each lane reads runs of a row, which is what its bytes convert to.
//
// With g = lane / 4 and t = lane % 4: for scores, lane (g, t) supplies a quarter of the elements of keys g and g + 8; for sums,
// an eighth of the elements of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
//
//   key_pairs(row, scales, key, pairs, rest)    pair j is elements key_dim(j), key_dim(j) + 1 of `key`
//   ValueRun::load(row, key, unit)              what a lane needs of a key for RUN_UNITS units from `unit` on
//   value_pairs(a, b, ..., unit, pairs, rest)   pair e: element value_dim(g, 8 unit + e) of two neighbouring keys
//
// `rest` is what rounding f32 rows to f16 took away; nothing for other types.
//
// Defines   KV_TYPE (not 1), HEAD_DIM: a multiple of 64
#pragma once
#include "common/kv.cuh"
#include "common/tile.cuh"

#define KEY_PAIRS (HEAD_DIM / 8)     // of a lane, for each of its keys
#define VALUE_UNITS (HEAD_DIM / 64)  // of eight elements
#define RUN_UNITS (KV_QUANTISED && HEAD_DIM % 128 == 0 ? 2 : 1)
#define RUN_WORDS (KV_QUANTISED ? RUN_UNITS * (KV_TYPE == 3 ? 2 : 1) : KV_TYPE == 0 ? 8 : 4)

// Where 16-byte piece `piece` of a key's row lies, so that the lanes of a quarter of a warp read different banks. Rows of
// quantised types have their scales behind them, which does it.
DEVICE i32 stored_piece(i32 key, i32 piece) {
    return KV_QUANTISED ? piece : piece ^ (key / 2 % 4 * 2 ^ key % 2 * 4);
}

DEVICE i32 key_dim(int pair) {
    const i32 t = LANE() % 4;
#if KV_TYPE == 0
    return 4 * (4 * (pair / 2) + t) + 2 * (pair % 2);
#elif KV_TYPE == 2
    return 8 * (4 * (pair / 4) + t) + 2 * (pair % 4);
#elif KV_TYPE == 3
    return t * (HEAD_DIM / 4) + 2 * pair;
#else
    const i32 code = t * (HEAD_DIM / 8) + 4 * (pair / 4) + 2 * (pair % 2);
    return code / 16 * 32 + code % 16 + pair % 4 / 2 * 16;
#endif
}

DEVICE i32 value_dim(i32 g, i32 n) {
#if KV_TYPE == 0
    return 4 * (g + 8 * (n / 4)) + n % 4;
#elif KV_TYPE == 2
    return 8 * (g + 8 * (n / 8)) + n % 8;
#elif KV_TYPE == 3
    return g * (HEAD_DIM / 8) + n;
#else
    const i32 code = g * (HEAD_DIM / 16) + 4 * (n / 8) + n % 4;
    return code / 16 * 32 + code % 16 + n % 8 / 4 * 16;
#endif
}

// Codes begin at `row`, the head's scales at `scales`.
DEVICE void key_pairs(const u8* row, const u8* scales, i32 key, u32 (&pairs)[KEY_PAIRS], u32 (&rest)[KEY_PAIRS]) {
    const i32 t = LANE() % 4;
    (void)scales, (void)rest;
#if KV_TYPE == 0
#pragma unroll
    for (int i = 0; i < KEY_PAIRS / 2; i++) {
        const f32x4 x = load16<f32x4>(row + 16 * stored_piece(key, 4 * i + t));
        pairs[2 * i] = h2_pack_saturated(x.x, x.y);
        pairs[2 * i + 1] = h2_pack_saturated(x.z, x.w);
        rest[2 * i] = h2_pack(x.x - low_half(pairs[2 * i]), x.y - high_half(pairs[2 * i]));
        rest[2 * i + 1] = h2_pack(x.z - low_half(pairs[2 * i + 1]), x.w - high_half(pairs[2 * i + 1]));
    }
#elif KV_TYPE == 2
#pragma unroll
    for (int i = 0; i < KEY_PAIRS / 4; i++) {
        u32 some[4];
        kv_unpack_piece(row + 16 * stored_piece(key, 4 * i + t), 0, some);
#pragma unroll
        for (int j = 0; j < 4; j++) pairs[4 * i + j] = some[j];
    }
#elif KV_TYPE == 3
#pragma unroll
    for (int i = 0; i < KEY_PAIRS / 8; i++) {
        const i32 piece = t * (KEY_PAIRS / 8) + i;
        u32 some[8];
        kv_unpack_piece(row + 16 * piece, reinterpret_cast<const u16*>(scales)[piece / 2], some);
#pragma unroll
        for (int j = 0; j < 8; j++) pairs[8 * i + j] = some[j];
    }
#else
#pragma unroll
    for (int i = 0; i < KEY_PAIRS / 8; i++) {
        const i32 code = t * (HEAD_DIM / 8) + 8 * i;
        const u64 loaded = *reinterpret_cast<const u64*>(row + code);
        const u32 scale = h2_splat(reinterpret_cast<const u16*>(scales)[code / 16]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 codes = four_codes(static_cast<u32>(j < 2 ? loaded : loaded >> 32), j % 2);
            pairs[8 * i + 2 * j] = h2_mul(two_codes<0>(codes), scale);
            pairs[8 * i + 2 * j + 1] = h2_mul(two_codes<1>(codes), scale);
        }
    }
#endif
}

struct ValueRun {
    u32 words[RUN_WORDS];

    DEVICE void load(const u8* row, i32 key, int unit) {
        const i32 g = LANE() / 4;
        (void)key;
#if KV_QUANTISED
        const u8* const first = row + (g * VALUE_UNITS + unit) * (RUN_WORDS * 4 / RUN_UNITS);
        if constexpr (RUN_WORDS == 4) {
            set(0, load16<u32x4>(first));
        } else if constexpr (RUN_WORDS == 2) {
            const u64 both = *reinterpret_cast<const u64*>(first);
            words[0] = static_cast<u32>(both), words[RUN_WORDS - 1] = static_cast<u32>(both >> 32);
        } else {
            words[0] = *reinterpret_cast<const u32*>(first);
        }
#else
#pragma unroll
        for (int i = 0; i < RUN_WORDS / 4; i++) {
            const i32 piece = g + 8 * (RUN_WORDS / 4 * unit + i);
            set(4 * i, load16<u32x4>(row + 16 * stored_piece(key, piece)));
        }
#endif
    }

    DEVICE void set(int first, const u32x4& x) {
        words[first] = x.x, words[(first + 1) % RUN_WORDS] = x.y;
        words[(first + 2) % RUN_WORDS] = x.z, words[(first + 3) % RUN_WORDS] = x.w;
    }
};

// Runs a and b are those of neighbouring keys, a_scales and b_scales the scales of their head.
DEVICE void value_pairs(const ValueRun& a, const ValueRun& b, const u8* a_scales, const u8* b_scales, int unit,
                        u32 (&pairs)[8], u32 (&rest)[8]) {
    (void)a_scales, (void)b_scales, (void)unit, (void)rest;
#if KV_TYPE == 0
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float low = f32_from_bits(a.words[j]);
        const float high = f32_from_bits(b.words[j]);
        pairs[j] = h2_pack_saturated(low, high);
        rest[j] = h2_pack(low - low_half(pairs[j]), high - high_half(pairs[j]));
    }
#elif KV_TYPE == 2
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 low = a.words[j];
        const u32 high = b.words[j];
        pairs[2 * j] = h2_pack_saturated(f32_from_bits(low << 16), f32_from_bits(high << 16));
        pairs[2 * j + 1] = h2_pack_saturated(f32_from_bits(low & 0xFFFF0000u), f32_from_bits(high & 0xFFFF0000u));
    }
#else
    const i32 code = (LANE() / 4 * VALUE_UNITS + unit) * (KV_TYPE == 3 ? 8 : 4);
    const i32 block = code / (KV_TYPE == 3 ? 32 : 16) * 2;
    const u32 scale = *reinterpret_cast<const u16*>(a_scales + block) |
                      static_cast<u32>(*reinterpret_cast<const u16*>(b_scales + block)) << 16;
#if KV_TYPE == 3
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 low = four_codes(a.words[unit % RUN_UNITS * 2 + j], 0);
        const u32 high = four_codes(b.words[unit % RUN_UNITS * 2 + j], 0);
        const u32 first = byte_perm(low, high, 0x5140);
        const u32 second = byte_perm(low, high, 0x7362);
        pairs[4 * j] = h2_mul(two_codes<0>(first), scale);
        pairs[4 * j + 1] = h2_mul(two_codes<1>(first), scale);
        pairs[4 * j + 2] = h2_mul(two_codes<0>(second), scale);
        pairs[4 * j + 3] = h2_mul(two_codes<1>(second), scale);
    }
#else
    // Two bytes of each key beside each other; their low four bits, or the high ones, are the last of the f16 1024 + code, or
    // 1024 + 16 code.
    const u32 low = a.words[unit % RUN_UNITS];
    const u32 high = b.words[unit % RUN_UNITS];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 even = byte_perm(low, high, j ? 0x7632 : 0x5410);
        const u32 odd = even >> 8;
        pairs[2 * j] = h2_mul(h2_sub(and_or(even, 0x000F000Fu, 0x64006400u), 0x64086408u), scale);
        pairs[2 * j + 1] = h2_mul(h2_sub(and_or(odd, 0x000F000Fu, 0x64006400u), 0x64086408u), scale);
        pairs[2 * j + 4] = h2_mul(h2_fma(and_or(even, 0x00F000F0u, 0x64006400u), 0x2C002C00u, 0xD480D480u), scale);
        pairs[2 * j + 5] = h2_mul(h2_fma(and_or(odd, 0x00F000F0u, 0x64006400u), 0x2C002C00u, 0xD480D480u), scale);
    }
#endif
#endif
}
