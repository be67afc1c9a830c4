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

DEVICE void begin_digits(WholeDigits& digits, u32 bytes) {
    digits.even = bytes & 0x00FF00FFu, digits.odd = bytes >> 8 & 0x00FF00FFu;
    digits.above = 0;
}

// Digit `place` to base 3 of four bytes, which are fractions of 256; places in turn. What 3^(place + 1) times a fraction has
// above a byte is the number of all digits so far.
DEVICE u32 next_digits(WholeDigits& digits, int place) {
    const u32 power = place == 0 ? 3 : place == 1 ? 9 : place == 2 ? 27 : place == 3 ? 81 : 243;
    const u32 above = byte_perm(digits.even * power, digits.odd * power, 0x7351);
    const u32 own = above - 3 * digits.above;
    digits.above = above;
    return own;
}

DEVICE void whole_codes(WholeRow& row, int slab, u32 (&codes)[2]) {
    if (slab == 0) begin_digits(row.digits[0], whole_word(row, 0)), begin_digits(row.digits[1], whole_word(row, 16));
    if (slab == 5) begin_digits(row.digits[0], whole_word(row, 32));
    const int place = slab < 5 ? slab : 2 * slab - 10;
    codes[0] = next_digits(row.digits[0], place);
    if (slab == 7) {
        // The last 16 weights: of each part one digit of the same four bytes.
        const u32 power = row.part == 0 ? 1 : row.part == 1 ? 3 : row.part == 2 ? 9 : 27;
        begin_digits(row.digits[1], word_of(words_at(row.unit, ALIGNED, 48), 0));
        row.digits[1].even = row.digits[1].even * power & 0x00FF00FFu;
        row.digits[1].odd = row.digits[1].odd * power & 0x00FF00FFu;
    }
    codes[1] = slab < 5 ? next_digits(row.digits[1], place)
             : slab < 7 ? next_digits(row.digits[0], place + 1)
                        : next_digits(row.digits[1], 0);
}

#endif
