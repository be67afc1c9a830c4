// whole: packed weights as signed bytes, for products of whole numbers. Of 32 weights of a row a lane takes eight.
//
// Row of a lane: where a unit of a row lies, in shared memory, and what of it is this lane's; a unit begins at a multiple of
// what its format's blocks are aligned to, or of 16 where ALIGNED.
//
//   WholeRow whole_row(unit, part, table)       part 0..3 of the weights
//   void whole_codes(row, slab, codes)          those of weights 32 slab to 32 slab + 31 that are of the part; slabs in turn
//   WHOLE_ORDER 0: weights 4 part to + 3 in the first word, 16 + 4 part to + 3 in the second; 1: 8 part to + 7; 2: the same
//   in the order 0, 4, 1, 5, 2, 6, 3, 7
//   WHOLE_QUARTERS: a part is a quarter of 256 weights: `slab` has weights 64 part + 8 slab to + 7
//
// w = d code, or w = d code - minimum. WHOLE_SCALES says how a format's scales are used:
//
//   0: floats, one for 32 weights; two halves of 16 where WHOLE_HALVES
//      WholeScale whole_scale(row, slab, half)  d, and with WHOLE_MINIMA the minimum
//   1: whole numbers times one d for units of 256 weights, so that products are added up as whole numbers
//      WholeHead whole_head(unit); float whole_d(head)
//      i32 whole_scale(head, slab, half)        two halves of 16 where WHOLE_HALVES: 1, the first and the second word of a
//                                               lane; 2, the words of parts 0 and 1 and those of parts 2 and 3
//      u32 whole_minima(head, word); float whole_dmin(head)   WHOLE_MINIMA: whole numbers, four to a word
//   2: codes have their scales in them already, so that products of 256 weights are sums of instructions. What is added to all
//      weights of a lane is a second code for all of them: w = d code + d2 code2
//      WholeHead whole_head(unit); float whole_d(head), whole_second_d(head)
//      u32 whole_second(row, slab)              code2 four times; after whole_codes of the slab
//
// A format whose weights are entries of a codebook, WHOLE_TABLE words, wants them in shared memory, as `table`; WHOLE_SOURCE
// has them.
//
// Defines   QTYPE any block format but those of floats; ALIGNED; UNIT_BYTES of a unit, for MXFP4
#pragma once
#include "quants/levels.cuh"

#define WHOLE_IQ1 (QTYPE == 19 || QTYPE == 29)
#define WHOLE_IQ2 (QTYPE == 16 || QTYPE == 17 || QTYPE == 22)
#define WHOLE_IQ3 (QTYPE == 18 || QTYPE == 21)
#define WHOLE_IQ4 (QTYPE == 20 || QTYPE == 23)
#define WHOLE_FP4 (QTYPE == 39 || QTYPE == 40)
#define WHOLE_TERNARY (QTYPE == 34 || QTYPE == 35)
#define WHOLE_PAIRS (QTYPE == 12 || QTYPE == 13)  // reads pairs of words

#define WHOLE_ORDER (WHOLE_IQ1 || WHOLE_IQ2 ? 2 : WHOLE_IQ3 || WHOLE_PAIRS || QTYPE == 10 ? 1 : 0)
#define WHOLE_QUARTERS WHOLE_IQ1
#define WHOLE_SCALES                               \
    (WHOLE_IQ1 || WHOLE_TERNARY || QTYPE == 10 ? 2 \
     : WHOLE_IQ2 || WHOLE_IQ3 || WHOLE_PAIRS || QTYPE == 11 || QTYPE == 14 || QTYPE == 23 ? 1 : 0)
#define WHOLE_MINIMA (QTYPE == 3 || QTYPE == 7 || WHOLE_PAIRS)
#define WHOLE_HALVES (QTYPE == 11 || QTYPE == 14 || QTYPE == 40 ? 1 : QTYPE == 17 || QTYPE == 22 ? 2 : 0)
#define WHOLE_TABLE (WHOLE_IQ1 ? 2048 : QTYPE == 22 ? 1024 : QTYPE == 17 || QTYPE == 21 ? 512 : QTYPE == 16 || QTYPE == 18 ? 256 : 0)
#define WHOLE_LEVELS (WHOLE_IQ2 || WHOLE_IQ4 || WHOLE_FP4)  // constants to choose codes from
#define WHOLE_ODD (QTYPE == 39 && UNIT_BYTES % 2)           // units may begin at odd addresses
#define WHOLE_BLOCK_BYTES (QTYPE == 8 ? 34 : 18)            // of formats with blocks of 32 at multiples of two bytes
// Bytes from one part to the next of what a lane reads most.
#define WHOLE_STEP (QTYPE == 16 || QTYPE == 22 ? 1 : QTYPE == 17 || WHOLE_IQ3 ? 2 : WHOLE_ORDER ? 8 : 4)

// Four bytes at a multiple of two are a piece of two words. `even` serves offsets that are multiples of four, `odd` the
// others.
struct WholeWords {
    const u32* words;
    u32 shift;
};

DEVICE WholeWords words_at(const u8* p, bool aligned, int offset) {
    const u32 rest = aligned ? offset : static_cast<u32>(reinterpret_cast<u64>(p) + offset) & 2;
    return {reinterpret_cast<const u32*>(p + offset - rest), rest * 8};
}

DEVICE u32 word_of(const WholeWords& source, int i) {
    const u32 low = source.words[i];
    if (ALIGNED && !source.shift) return low;
    return static_cast<u32>((static_cast<u64>(source.words[i + 1]) << 32 | low) >> source.shift);
}

// Four bytes, those of even places and of odd ones apart, as digits are taken from them.
struct WholeDigits {
    u32 even, odd, above;
};

struct WholeRow {
    const u8* unit;
    const u8* lane;  // the unit's bytes that begin with this lane's
    WholeWords even, odd;
    int part;
    const u32* table;
#if WHOLE_LEVELS
    u32 zero;  // which the compiler does not know: it would bring constants of a table anew for each use
#endif
#if QTYPE == 34
    WholeDigits digits[2];
#endif
};

DEVICE WholeRow whole_row(const u8* unit, int part, const u32* table = nullptr) {
    const u8* const lane = unit + WHOLE_STEP * part;
    WholeRow row;
    row.unit = unit, row.lane = lane, row.part = part, row.table = table;
    row.even = words_at(lane, ALIGNED, 0), row.odd = words_at(lane, ALIGNED, 2);
#if WHOLE_LEVELS
    row.zero = WHOLE_ODD ? 0 : static_cast<u32>(reinterpret_cast<u64>(unit)) & 1;
#endif
    return row;
}

// Four bytes at a constant, even offset from the lane's first.
DEVICE u32 whole_word(const WholeRow& row, int offset) {
    return offset % 4 ? word_of(row.odd, offset / 4) : word_of(row.even, offset / 4);
}

#if WHOLE_SCALES == 0
struct WholeScale {
    float d, minimum;
};
#endif

#if QTYPE == 12 || QTYPE == 13

struct WholeHead {
    u32 d;  // and dmin
    u32 scales[2], minima[2];
};

DEVICE WholeHead whole_head(const u8* unit) {
    const u32x4 head = load16<u32x4>(unit);
    WholeHead s;
    s.d = head.x;
    s.scales[0] = head.y & 0x3F3F3F3Fu;
    s.minima[0] = head.z & 0x3F3F3F3Fu;
    s.scales[1] = (head.w & 0x0F0F0F0Fu) | (head.y >> 2 & 0x30303030u);
    s.minima[1] = (head.w >> 4 & 0x0F0F0F0Fu) | (head.z >> 2 & 0x30303030u);
    return s;
}

DEVICE float whole_d(const WholeHead& head) { return low_half(head.d); }
DEVICE float whole_dmin(const WholeHead& head) { return high_half(head.d); }
DEVICE u32 whole_minima(const WholeHead& head, int word) { return word ? head.minima[1] : head.minima[0]; }
DEVICE i32 whole_scale(const WholeHead& head, int slab, int half) {
    (void)half;
    return static_cast<i32>(byte_perm(head.scales[slab / 4], 0, 0x4440 | slab % 4));
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const int first = QTYPE == 12 ? 16 : 48;
    const u64 nibbles = *reinterpret_cast<const u64*>(row.lane + first + 32 * (slab / 2));
    codes[0] = static_cast<u32>(nibbles) >> slab % 2 * 4 & 0x0F0F0F0Fu;
    codes[1] = static_cast<u32>(nibbles >> 32) >> slab % 2 * 4 & 0x0F0F0F0Fu;
#if QTYPE == 13
    const u64 fifth = *reinterpret_cast<const u64*>(row.lane + 16);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 bits = static_cast<u32>(fifth >> 32 * j);
        codes[j] |= (slab < 4 ? bits << (4 - slab) % 8 : bits >> (slab - 4) % 8) & 0x10101010u;
    }
#endif
}

#elif QTYPE == 14

struct WholeHead {
    u32 scales[4];  // signed bytes
    u16 d;
};

DEVICE WholeHead whole_head(const u8* unit) {
    const WholeWords words = words_at(unit, ALIGNED, 0);
    WholeHead s;
#pragma unroll
    for (int i = 0; i < 4; i++) s.scales[i] = word_of(words, 48 + i);
    s.d = *reinterpret_cast<const u16*>(unit + 208);
    return s;
}

// Codes are four times the weight's.
DEVICE float whole_d(const WholeHead& head) { return f16_bits_to_f32(head.d) * 0.25f; }

DEVICE i32 whole_scale(const WholeHead& head, int slab, int half) {
    return static_cast<i8>(head.scales[slab / 2] >> (slab % 2 * 16 + half * 8));
}

// Six bits at the upper end of a byte, their first flipped: 4 (q - 32).
DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const int group = slab / 4, quarter = slab % 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 low = whole_word(row, 64 * group + 32 * (quarter % 2) + 16 * j);
        const u32 high = whole_word(row, 128 + 32 * group + 16 * j);
        const u32 nibbles = quarter < 2 ? low << 2 : low >> 2;
        codes[j] = ((nibbles & 0x3C3C3C3Cu) | (high << (6 - 2 * quarter) & 0xC0C0C0C0u)) ^ 0x80808080u;
    }
}

#elif QTYPE == 23

struct WholeHead {
    u32 d;
    u32 scales[2];  // signed bytes, of even slabs and of odd ones
};

DEVICE WholeHead whole_head(const u8* unit) {
    const u32 d = reinterpret_cast<const u32*>(unit)[0], low = reinterpret_cast<const u32*>(unit)[1];
    const u32 pairs = (d >> 16 & 0xFFu) | (d >> 8 & 0x00FF0000u);  // of bits, four in each half
    const u32 high = (pairs | pairs << 4) & 0x0F0F0F0Fu;
    const u32 even = (low & 0x0F0F0F0Fu) | (high << 4 & 0x30303030u);
    const u32 odd = (low >> 4 & 0x0F0F0F0Fu) | (high << 2 & 0x30303030u);
    // Less 32: 96 more does not leave a byte, and 128 more turns its sign.
    return {d, {(even + 0x60606060u) ^ 0x80808080u, (odd + 0x60606060u) ^ 0x80808080u}};
}

DEVICE float whole_d(const WholeHead& head) { return low_half(head.d); }
DEVICE i32 whole_scale(const WholeHead& head, int slab, int half) {
    (void)half;
    return static_cast<i8>(head.scales[slab % 2] >> 8 * (slab / 2));
}

#elif QTYPE == 3

DEVICE WholeScale whole_scale(const WholeRow& row, int slab, int half) {
    (void)half;
    const u32 scales = *reinterpret_cast<const u32*>(row.unit + 20 * slab);
    return {low_half(scales), -high_half(scales)};
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const u32 nibbles = *reinterpret_cast<const u32*>(row.lane + 20 * slab + 4);
    codes[0] = nibbles & 0x0F0F0F0Fu;
    codes[1] = nibbles >> 4 & 0x0F0F0F0Fu;
}

#elif QTYPE == 8

DEVICE WholeScale whole_scale(const WholeRow& row, int slab, int half) {
    (void)half;
    return {f16_bits_to_f32(*reinterpret_cast<const u16*>(row.unit + 34 * slab)), 0};
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    codes[0] = whole_word(row, 34 * slab + 2);
    codes[1] = whole_word(row, 34 * slab + 18);
}

#elif QTYPE == 2

// Codes are 16 times the weight's: a nibble at the upper end of a byte, its first bit flipped, is 16 (n - 8).
DEVICE WholeScale whole_scale(const WholeRow& row, int slab, int half) {
    (void)half;
    return {f16_bits_to_f32(*reinterpret_cast<const u16*>(row.unit + 18 * slab)) * 0.0625f, 0};
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const u32 nibbles = whole_word(row, 18 * slab + 2);
    codes[0] = (nibbles << 4 & 0xF0F0F0F0u) ^ 0x80808080u;
    codes[1] = (nibbles & 0xF0F0F0F0u) ^ 0x80808080u;
}

#elif QTYPE == 20

DEVICE WholeScale whole_scale(const WholeRow& row, int slab, int half) {
    (void)half;
    return {f16_bits_to_f32(*reinterpret_cast<const u16*>(row.unit + 18 * slab)), 0};
}

#elif QTYPE == 6 || QTYPE == 7
#include "quants/whole_q5.cuh"
#elif QTYPE == 10 || QTYPE == 11
#include "quants/whole_k.cuh"
#elif WHOLE_IQ2 || WHOLE_IQ3
#include "quants/whole_grid.cuh"
#elif WHOLE_IQ1
#include "quants/whole_iq1.cuh"
#elif WHOLE_TERNARY
#include "quants/whole_ternary.cuh"
#elif WHOLE_FP4
#include "quants/whole_fp4.cuh"
#else
#error "QTYPE names a block format without whole numbers"
#endif

#if WHOLE_IQ4
// Levels, counted from -128, with FLIP.
template <u32 FLIP>
DEVICE void whole_levels(const WholeRow& row, int slab, u32 (&codes)[2]) {
#if QTYPE == 20
    const u32 nibbles = whole_word(row, 18 * slab + 2);
#else
    const u32 nibbles = *reinterpret_cast<const u32*>(row.lane + 8 + 16 * slab);
#endif
    const u32 levels[4] = {IQ4_LEVELS_0 ^ FLIP ^ row.zero, IQ4_LEVELS_1 ^ FLIP, IQ4_LEVELS_2 ^ FLIP ^ row.zero,
                           IQ4_LEVELS_3 ^ FLIP};
    nibbles_of_table(nibbles, levels, codes[0], codes[1]);
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) { whole_levels<0x80808080u>(row, slab, codes); }
#endif

#if QTYPE == 2 || QTYPE == 8 || QTYPE == 14 || QTYPE == 20 || QTYPE == 23
#define WHOLE_HALVES_OF 1

// Codes with their signs flipped.
DEVICE void whole_flipped(const WholeRow& row, int slab, u32 (&codes)[2]) {
#if WHOLE_IQ4
    whole_levels<0>(row, slab, codes);
#else
    whole_codes(row, slab, codes);
    codes[0] ^= 0x80808080u, codes[1] ^= 0x80808080u;
#endif
}

// The same eight weights as f16 pairs, rounded as by decode8_half2.
#if WHOLE_SCALES
// `scales` is that of quants/split.cuh.
DEVICE void whole_halves_of(const WholeRow& row, int slab, u32 scales, u32 (&w)[4]) {
    u32 codes[2];
    whole_flipped(row, slab, codes);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 scale = byte_perm(scales, 0, (QTYPE == 14 ? j : slab % 2) ? 0x3232 : 0x1010);
        constexpr u32 down = QTYPE == 14 ? 0x1C001C00u : 0x24002400u;    // 2^-8: these codes are four times as large; 2^-6
        constexpr u32 offset = QTYPE == 14 ? 0xC480C480u : 0xCC80CC80u;  // -1152 times that
        w[2 * j] = h2_mul(h2_fma(byte_perm(codes[j], 0x64646464u, 0x4140), down, offset), scale);
        w[2 * j + 1] = h2_mul(h2_fma(byte_perm(codes[j], 0x64646464u, 0x4342), down, offset), scale);
    }
}
#else
DEVICE void whole_halves_of(const WholeRow& row, int slab, u32 (&w)[4]) {
    u32 codes[2];
    whole_flipped(row, slab, codes);
    const u32 scale = h2_splat(*reinterpret_cast<const u16*>(row.unit + WHOLE_BLOCK_BYTES * slab));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 flipped = byte_perm(codes[j / 2], 0x64646464u, j % 2 ? 0x4342 : 0x4140);
        // -1152, or a 16th of the sum where codes are 16 times as large.
        const u32 code = QTYPE == 2 ? h2_fma(flipped, 0x2C002C00u, 0xD480D480u) : h2_sub(flipped, 0x64806480u);
        w[j] = h2_mul(code, scale);
    }
}
#endif

#else
#define WHOLE_HALVES_OF 0
#endif
