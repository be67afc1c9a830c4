// IQ2 and IQ3 as signed bytes, see quants/whole.cuh; their layouts are in iq2_xxs.cuh and its neighbours.
//
// IQ2: entries of the table are eight numbers of levels, a nibble each, whose third bit is free for the sign: selectors among
// eight bytes. IQ3: entries are four codes, whose bytes are negated where the sign says so.
#pragma once

#if WHOLE_IQ3
#include "generated/quant_grid.cuh"
#define WHOLE_SOURCE quant_grid
#else
#include "generated/quant_selectors.cuh"
#define WHOLE_SOURCE quant_selectors
#endif

// Of eight weights: seven sign bits, and the eighth as the lowest bit of a number.
struct WholeSigns {
    u32 bits, eighth;
};

DEVICE WholeSigns even_signs(u32 bits) { return {bits, static_cast<u32>(popcount(bits))}; }  // their number is even
DEVICE WholeSigns eight_signs(u32 bits) { return {bits & 127, bits >> 7}; }

#if WHOLE_IQ3

// No code is 0, so that negating one does not carry into the next.
DEVICE u32 signed_bytes(u32 sizes, u32 signs) {
    const u32 mask = bytes_of_signs(signs);
    return (sizes & ~mask) | ((0x01010100u - sizes) & mask);
}

// Products that leave bit j of four at the upper end of byte j; up to seven bits do not meet.
DEVICE void put_signs(const WholeSigns& signs, u32 (&codes)[2]) {
    codes[0] = signed_bytes(codes[0], signs.bits * 0x10204080u);
    codes[1] = signed_bytes(codes[1], (signs.bits >> 4) * 0x10204080u + (signs.eighth << 31));
}

#else

#define NEGATED(bytes) (((~(bytes) & 0x7F7F7F7Fu) + 0x01010101u) ^ (~(bytes) & 0x80808080u))

// The product leaves bit j of seven as the third one of nibble 2 j, or 2 j - 7 from j = 4 on.
DEVICE void signed_levels(const WholeRow& row, u32 entry, const WholeSigns& signs, u32 (&codes)[2]) {
    const u32 selectors = entry | ((signs.bits * 0x00810204u + (signs.eighth << 30)) & 0x44444444u);
    const u32 levels = QUANT_LEVELS ^ row.zero, negated = NEGATED(QUANT_LEVELS) ^ row.zero;
    codes[0] = bytes_at(levels, negated, selectors);
    codes[1] = bytes_at(levels, negated, selectors >> 16);
}

#endif

#if QTYPE == 16 || QTYPE == 18

// Of 32 weights: four times seven signs, and the scale.
DEVICE u32 signs_and_scale(const u8* unit, int slab) {
    const u16* const halves = reinterpret_cast<const u16*>(unit + (QTYPE == 16 ? 6 + 8 * slab : 66 + 4 * slab));
    return halves[0] | static_cast<u32>(halves[1]) << 16;
}

struct WholeHead {
    const u8* unit;
};

DEVICE WholeHead whole_head(const u8* unit) { return {unit}; }

DEVICE float whole_d(const WholeHead& head) {
    return f16_bits_to_f32(*reinterpret_cast<const u16*>(head.unit)) * (QTYPE == 16 ? 0.125f : 0.25f);
}

DEVICE i32 whole_scale(const WholeHead& head, int slab, int half) {
    (void)half;
    return static_cast<i32>(signs_and_scale(head.unit, slab) >> 27 | 1);
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const WholeSigns signs = even_signs(signs_and_scale(row.unit, slab) >> 7 * row.part & 127);
#if QTYPE == 16
    signed_levels(row, row.table[row.lane[2 + 8 * slab]], signs, codes);
#else
    const u32 both = *reinterpret_cast<const u16*>(row.lane + 2 + 8 * slab);
    codes[0] = row.table[both & 0xFF], codes[1] = row.table[both >> 8];
    put_signs(signs, codes);
#endif
}

#elif QTYPE == 17 || QTYPE == 22

struct WholeHead {
    u32 scales[2][2];  // bytes 2 sc + 1 of first halves and of second ones
    u16 d;
};

DEVICE WholeHead whole_head(const u8* unit) {
    const int first = QTYPE == 17 ? 66 : 74;
    const WholeWords words = words_at(unit, ALIGNED, first);
    WholeHead s;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 nibbles = word_of(words, i);
        s.scales[0][i] = (nibbles << 1 & 0x1E1E1E1Eu) | 0x01010101u;
        s.scales[1][i] = (nibbles >> 3 & 0x1E1E1E1Eu) | 0x01010101u;
    }
    s.d = *reinterpret_cast<const u16*>(unit);
    return s;
}

DEVICE float whole_d(const WholeHead& head) { return f16_bits_to_f32(head.d) * 0.125f; }

DEVICE i32 whole_scale(const WholeHead& head, int slab, int half) {
    return static_cast<i32>(byte_perm(head.scales[half][slab / 4], 0, 0x4440 | slab % 4));
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
#if QTYPE == 17
    const u32 code = *reinterpret_cast<const u16*>(row.lane + 2 + 8 * slab);
    signed_levels(row, row.table[code & 511], even_signs(code >> 9), codes);
#else
    const u32 high = (static_cast<u32>(row.unit[66 + slab]) >> 2 * row.part & 3) << 8;
    const u32 index = row.lane[2 + 4 * slab] | high;
    signed_levels(row, row.table[index], eight_signs(row.lane[34 + 4 * slab]), codes);
#endif
}

#else

struct WholeHead {
    u32 scales[2];  // bytes 2 sc + 1 of even slabs and of odd ones
    u16 d;
};

DEVICE WholeHead whole_head(const u8* unit) {
    const u32 nibbles = word_of(words_at(unit, ALIGNED, 106), 0);
    return {{(nibbles << 1 & 0x1E1E1E1Eu) | 0x01010101u, (nibbles >> 3 & 0x1E1E1E1Eu) | 0x01010101u},
            *reinterpret_cast<const u16*>(unit)};
}

DEVICE float whole_d(const WholeHead& head) { return f16_bits_to_f32(head.d); }

DEVICE i32 whole_scale(const WholeHead& head, int slab, int half) {
    (void)half;
    return static_cast<i32>(byte_perm(head.scales[slab % 2], 0, 0x4440 | slab / 2));
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const u32 both = *reinterpret_cast<const u16*>(row.lane + 2 + 8 * slab);
    const u32 ninth = static_cast<u32>(row.unit[66 + slab]) >> 2 * row.part;
    codes[0] = row.table[(both & 0xFF) | (ninth << 8 & 0x100)];
    codes[1] = row.table[both >> 8 | (ninth << 7 & 0x100)];
    put_signs(eight_signs(row.unit[74 + 4 * slab + row.part]), codes);
}

#endif
