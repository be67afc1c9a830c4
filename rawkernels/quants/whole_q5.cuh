// Q5_0 and Q5_1 as signed bytes, see quants/whole.cuh; their layouts are in q5_0.cuh and q5_1.cuh.
#pragma once

// The first four bits, each at the upper end of a byte; what else is in the word does not count.
DEVICE u32 bits_on_top(u32 bits) { return (bits & 15) * 0x10204080u; }

#if QTYPE == 6

// Codes are eight times the weight's: five bits at the upper end of a byte, their first flipped.
DEVICE WholeScale whole_scale(const WholeRow& row, int slab, int half) {
    (void)half;
    return {f16_bits_to_f32(*reinterpret_cast<const u16*>(row.unit + 22 * slab)) * 0.125f, 0};
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const u16* const halves = reinterpret_cast<const u16*>(row.unit + 22 * slab + 2);
    const u32 nibbles = whole_word(row, 22 * slab + 6);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 low = j ? nibbles >> 1 : nibbles << 3;
        codes[j] = (low & 0x78787878u) | (~bits_on_top(static_cast<u32>(halves[j]) >> 4 * row.part) & 0x80808080u);
    }
}

#else

DEVICE WholeScale whole_scale(const WholeRow& row, int slab, int half) {
    (void)half;
    const u32 scales = *reinterpret_cast<const u32*>(row.unit + 24 * slab);
    return {low_half(scales), -high_half(scales)};
}

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const u32 fifth = *reinterpret_cast<const u32*>(row.unit + 24 * slab + 4) >> 4 * row.part;
    const u32 nibbles = *reinterpret_cast<const u32*>(row.lane + 24 * slab + 8);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 bits = bits_on_top(fifth >> 16 * j);
        codes[j] = (nibbles >> 4 * j & 0x0F0F0F0Fu) | (bits >> 3 & 0x10101010u);
    }
}

#endif
