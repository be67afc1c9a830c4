// kv_fragments: factors of tile_mma's products straight from K/V rows as they are stored, for rows in shared memory.
//
// A product over elements may take them in any order, if queries come in the same; and columns of V may come in any order,
// if it is known which is which. So each lane reads runs of a row, which is what its bytes convert to.
//
// With g = lane / 4 and t = lane % 4: for scores, lane (g, t) supplies a quarter of the elements of keys g and g + 8; for sums,
// an eighth of the elements of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
//
//   key_pairs(row, scales, key, pairs, rest)    pair j is elements key_dim(j), key_dim(j) + 1 of `key`
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

// Rows a and b are those of keys `key` and key + 1; `scales` are the first one's, and the other's lie as far behind them as b
// behind a.
DEVICE void value_pairs(const u8* a, const u8* b, const u8* scales, i32 key, int unit, u32 (&pairs)[8], u32 (&rest)[8]) {
    const i32 g = LANE() / 4;
    (void)scales, (void)key, (void)rest;
#if KV_TYPE == 0
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const i32 piece = g + 8 * (2 * unit + i);
        const f32x4 x = load16<f32x4>(a + 16 * stored_piece(key, piece));
        const f32x4 y = load16<f32x4>(b + 16 * stored_piece(key + 1, piece));
        const float low[4] = {x.x, x.y, x.z, x.w};
        const float high[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            pairs[4 * i + j] = h2_pack_saturated(low[j], high[j]);
            rest[4 * i + j] = h2_pack(low[j] - low_half(pairs[4 * i + j]), high[j] - high_half(pairs[4 * i + j]));
        }
    }
#elif KV_TYPE == 2
    const i32 piece = g + 8 * unit;
    const u32x4 x = load16<u32x4>(a + 16 * stored_piece(key, piece));
    const u32x4 y = load16<u32x4>(b + 16 * stored_piece(key + 1, piece));
    const u32 low[4] = {x.x, x.y, x.z, x.w};
    const u32 high[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pairs[2 * j] = h2_pack_saturated(f32_from_bits(low[j] << 16), f32_from_bits(high[j] << 16));
        pairs[2 * j + 1] =
            h2_pack_saturated(f32_from_bits(low[j] & 0xFFFF0000u), f32_from_bits(high[j] & 0xFFFF0000u));
    }
#else
    const i32 code = g * (HEAD_DIM / (KV_TYPE == 3 ? 8 : 16)) + (KV_TYPE == 3 ? 8 : 4) * unit;
    const i32 block = code / (KV_TYPE == 3 ? 32 : 16) * 2;
    const u32 scale = *reinterpret_cast<const u16*>(scales + block) |
                      static_cast<u32>(*reinterpret_cast<const u16*>(scales + (b - a) + block)) << 16;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const i32 offset = code + (KV_TYPE == 3 ? 4 * j : 0);
        const u32 low = four_codes(*reinterpret_cast<const u32*>(a + offset), j);
        const u32 high = four_codes(*reinterpret_cast<const u32*>(b + offset), j);
        const u32 first = byte_perm(low, high, 0x5140);
        const u32 second = byte_perm(low, high, 0x7362);
        pairs[4 * j] = h2_mul(two_codes<0>(first), scale);
        pairs[4 * j + 1] = h2_mul(two_codes<1>(first), scale);
        pairs[4 * j + 2] = h2_mul(two_codes<0>(second), scale);
        pairs[4 * j + 3] = h2_mul(two_codes<1>(second), scale);
    }
#endif
}
