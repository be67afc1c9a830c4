// TQ1_0 and TQ2_0 as signed bytes, see quants/whole.cuh; their layouts are in tq1_0.cuh and tq2_0.cuh. w = d (q - 1): codes
// are q, and the second ones 1.
#pragma once

struct WholeHead {
    float d;
};

DEVICE WholeHead whole_head(const u8* unit) {
    return {f16_bits_to_f32(*reinterpret_cast<const u16*>(unit + (QTYPE == 34 ? 52 : 64)))};
}

DEVICE float whole_d(const WholeHead& head) { return head.d; }
DEVICE float whole_second_d(const WholeHead& head) { return -head.d; }

DEVICE u32 whole_second(const WholeRow& row, int slab) {
    (void)row, (void)slab;
    return 0x01010101u;
}

#if QTYPE == 35

DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
#pragma unroll
    for (int j = 0; j < 2; j++) codes[j] = whole_word(row, slab / 4 * 32 + 16 * j) >> slab % 4 * 2 & 0x03030303u;
}

#else

DEVICE void begin_digits(u32 (&rest)[2], u32 bytes) {
    rest[0] = bytes & 0x00FF00FFu;
    rest[1] = bytes >> 8 & 0x00FF00FFu;
}

// The next digits to base 3 of four bytes, which are fractions of 256: what three times one has above a byte.
DEVICE u32 next_digits(u32 (&rest)[2]) {
    const u32 even = rest[0] * 3, odd = rest[1] * 3;
    rest[0] = even & 0x00FF00FFu, rest[1] = odd & 0x00FF00FFu;
    return byte_perm(even, odd, 0x7351);
}

DEVICE void whole_codes(WholeRow& row, int slab, u32 (&codes)[2]) {
    if (slab == 0) begin_digits(row.rest[0], whole_word(row, 0)), begin_digits(row.rest[1], whole_word(row, 16));
    if (slab == 5) begin_digits(row.rest[0], whole_word(row, 32));
    codes[0] = next_digits(row.rest[0]);
    if (slab == 7) {
        // The last 16 weights: of each part one digit of the same four bytes.
        const u32 power = row.part == 0 ? 1 : row.part == 1 ? 3 : row.part == 2 ? 9 : 27;
        begin_digits(row.rest[1], word_of(words_at(row.unit, ALIGNED, 48), 0));
        row.rest[1][0] = row.rest[1][0] * power & 0x00FF00FFu;
        row.rest[1][1] = row.rest[1][1] * power & 0x00FF00FFu;
    }
    codes[1] = next_digits(row.rest[slab < 5 || slab == 7]);
}

#endif
