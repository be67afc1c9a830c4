// IQ1_S and IQ1_M as signed bytes, see quants/whole.cuh; their layouts are in iq1_s.cuh and iq1_m.cuh.
//
// w = d sc (digit + delta): codes are sc digit, and the second ones sc or -sc for delta, times d / 8. Entries of the table are
// eight digits plus one, a nibble each: selectors among the bytes -sc, 0, sc.
#pragma once
#include "generated/quant_selectors.cuh"
#define WHOLE_SOURCE quant_selectors

struct WholeHead {
    float d;
};

DEVICE float whole_d(const WholeHead& head) { return head.d; }
DEVICE float whole_second_d(const WholeHead& head) { return head.d * 0.125f; }

#if QTYPE == 19

DEVICE WholeHead whole_head(const u8* unit) { return {f16_bits_to_f32(*reinterpret_cast<const u16*>(unit))}; }

DEVICE u32 low_bytes(const WholeRow& row, int word) { return whole_word(row, 2 + 4 * word); }

// Of 32 weights: four times three bits of entry numbers, the scale, and whether delta is negative.
DEVICE u32 high_bits(const WholeRow& row, int slab) {
    return *reinterpret_cast<const u16*>(row.unit + 34 + 4 * row.part + slab / 4 * 2);
}

DEVICE u32 high_of_entry(u32 bits, int slab) {
    const int shift = 8 - slab % 4 * 3;
    return (shift > 0 ? bits << shift : bits >> -shift) & 0x700u;
}

DEVICE u32 odd_scale(const WholeRow& row, u32 bits, int slab) {
    (void)row, (void)slab;
    return (bits >> 11 & 14) | 1;
}

DEVICE u32 is_down(u32 bits, int slab) {
    (void)slab;
    return bits >> 15;
}

#else

DEVICE WholeHead whole_head(const u8* unit) {
    const u64 words = *reinterpret_cast<const u64*>(unit + 48);
    const u32 low = static_cast<u32>(words), high = static_cast<u32>(words >> 32);
    const u32 bits = (low >> 12 & 0xF) | (low >> 24 & 0xF0) | (high >> 4 & 0xF00) | (high >> 16 & 0xF000);
    return {f16_bits_to_f32(static_cast<u16>(bits))};
}

DEVICE u32 low_bytes(const WholeRow& row, int word) {
    const u64 bytes = *reinterpret_cast<const u64*>(row.lane);
    return static_cast<u32>(bytes >> 32 * word);
}

// Of eight weights: three bits of the entry number, and whether delta is negative.
DEVICE u32 high_bits(const WholeRow& row, int slab) {
    (void)slab;
    return *reinterpret_cast<const u32*>(row.unit + 32 + 4 * row.part);
}

DEVICE u32 high_of_entry(u32 bits, int slab) { return (slab < 2 ? bits << (8 - 4 * slab) : bits >> (4 * slab - 8)) & 0x700u; }

DEVICE u32 odd_scale(const WholeRow& row, u32 bits, int slab) {
    (void)bits;
    const u32 scales = *reinterpret_cast<const u16*>(row.unit + 48 + 2 * row.part);
    return (slab < 2 ? scales << 1 & 14 : scales >> (slab / 2 * 3 - 1) & 14) | 1;
}

DEVICE u32 is_down(u32 bits, int slab) { return bits >> (4 * slab + 3) & 1; }

#endif

DEVICE u32 digit_levels(const WholeRow& row, u32 bits, int slab) { return odd_scale(row, bits, slab) * 0xFFFFu + 256; }

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const u32 bits = high_bits(row, slab);
    const u32 index = (low_bytes(row, slab / 4) >> slab % 4 * 8 & 0xFF) | high_of_entry(bits, slab);
    const u32 entry = row.table[index];
    const u32 levels = digit_levels(row, bits, slab);
    codes[0] = bytes_at(levels, 0, entry);
    codes[1] = bytes_at(levels, 0, entry >> 16);
}

DEVICE u32 whole_second(const WholeRow& row, int slab) {
    const u32 bits = high_bits(row, slab);
    return bytes_at(digit_levels(row, bits, slab), 0, 0x2222u - is_down(bits, slab) * 0x2222u);
}
