// Q2_K and Q3_K as signed bytes, see quants/whole.cuh; their layouts are in q2_k.cuh and q3_k.cuh.
#pragma once

#if QTYPE == 10

// w = d (sc q) - dmin m: sc q is at most 45.
struct WholeHead {
    u32 d;  // and dmin
};

DEVICE WholeHead whole_head(const u8* unit) { return {*reinterpret_cast<const u32*>(unit + 80)}; }
DEVICE float whole_d(const WholeHead& head) { return low_half(head.d); }
DEVICE float whole_second_d(const WholeHead& head) { return -high_half(head.d); }

// Scale and minimum of the lane's weights, a nibble each.
DEVICE u32 scale_and_minimum(const WholeRow& row, int slab) {
    const u32 word = *reinterpret_cast<const u32*>(row.unit + slab / 2 * 4) >> row.part / 2 * 8;
    return slab % 2 ? word >> 16 : word;
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const u32* const words = reinterpret_cast<const u32*>(row.lane + 16 + slab / 4 * 32);
    const u32 scale = scale_and_minimum(row, slab) & 15;
#pragma unroll
    for (int j = 0; j < 2; j++) codes[j] = (words[j] >> slab % 4 * 2 & 0x03030303u) * scale;
}

DEVICE u32 whole_second(const WholeRow& row, int slab) {
    return (scale_and_minimum(row, slab) >> 4 & 15) * 0x01010101u;
}

#else

struct WholeHead {
    u32 scales[4];  // signed bytes
    u16 d;
};

DEVICE WholeHead whole_head(const u8* unit) {
    const WholeWords words = words_at(unit, ALIGNED, 0);
    const u32 first = word_of(words, 24), second = word_of(words, 25), pairs = word_of(words, 26);
    WholeHead s;
    s.scales[0] = (first & 0x0F0F0F0Fu) | (pairs << 4 & 0x30303030u);
    s.scales[1] = (second & 0x0F0F0F0Fu) | (pairs << 2 & 0x30303030u);
    s.scales[2] = (first >> 4 & 0x0F0F0F0Fu) | (pairs & 0x30303030u);
    s.scales[3] = (second >> 4 & 0x0F0F0F0Fu) | (pairs >> 2 & 0x30303030u);
    // Less 32: 96 more does not leave a byte, and 128 more turns its sign.
#pragma unroll
    for (int i = 0; i < 4; i++) s.scales[i] = (s.scales[i] + 0x60606060u) ^ 0x80808080u;
    s.d = *reinterpret_cast<const u16*>(unit + 108);
    return s;
}

// Codes are 32 times the weight's: three bits at the upper end of a byte, their first flipped, are 32 (q - 4).
DEVICE float whole_d(const WholeHead& head) { return f16_bits_to_f32(head.d) * 0.03125f; }

DEVICE i32 whole_scale(const WholeHead& head, int slab, int half) {
    return static_cast<i8>(head.scales[slab / 2] >> (slab % 2 * 16 + half * 8));
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const int quarter = slab % 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 low = whole_word(row, 32 + slab / 4 * 32 + 16 * j);
        const u32 third = whole_word(row, 16 * j) << (7 - slab);
        const u32 pairs = quarter < 3 ? low << (5 - 2 * quarter) % 8 : low >> 1;
        codes[j] = (pairs & 0x60606060u) | (~third & 0x80808080u);
    }
}

#endif
