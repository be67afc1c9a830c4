// MXFP4 and NVFP4 as signed bytes, see quants/whole.cuh; their layouts are in mxfp4.cuh and nvfp4.cuh. Codes are twice the
// E2M1 numbers.
#pragma once

DEVICE void fp4_codes(const WholeRow& row, u32 nibbles, u32 (&codes)[2]) {
    constexpr u32 flip = 0x80808080u;
    const u32 levels[4] = {LEVELS(0, 1, 2, 3) ^ flip ^ row.zero, LEVELS(4, 6, 8, 12) ^ flip,
                           LEVELS(0, -1, -2, -3) ^ flip ^ row.zero, LEVELS(-4, -6, -8, -12) ^ flip};
    nibbles_of_table(nibbles, levels, codes[0], codes[1]);
}

#if QTYPE == 39

DEVICE WholeScale whole_scale(const WholeRow& row, int slab, int half) {
    (void)half;
    const u32 e = row.unit[17 * slab];
    return {f32_from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23), 0};
}

// Four bytes at any address; what it is to the next multiple of four is known where units are such multiples.
DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const int offset = 17 * slab + 1;
    const u32 rest = UNIT_BYTES % 4 ? static_cast<u32>(reinterpret_cast<u64>(row.lane) + offset) & 3 : offset & 3;
    const u32* const words = reinterpret_cast<const u32*>(row.lane + offset - rest);
    u32 nibbles = words[0];
    if (UNIT_BYTES % 4 || rest) nibbles = static_cast<u32>((static_cast<u64>(words[1]) << 32 | nibbles) >> 8 * rest);
    fp4_codes(row, nibbles, codes);
}

#else

// An E4M3 number without sign, halved; its bits are those of an f16 but for the place, and 2^8 in the exponent. 0x7F is none.
DEVICE WholeScale whole_scale(const WholeRow& row, int slab, int half) {
    const u32 word = *reinterpret_cast<const u32*>(row.unit + 36 * (slab / 2)), bits = word & 0x7F7F7F7Fu;
    const u32 numbers = bits & ~bytes_of_signs((bits + 0x01010101u) & ~word);
    const u32 pair = byte_perm(numbers, 0, slab % 2 ? 0x4342 : 0x4140) << 7;
    return {(half ? high_half(pair) : low_half(pair)) * 128.0f, 0};
}

// Of 16 weights the first eight are the low nibbles of eight bytes.
DEVICE void whole_codes(const WholeRow& row, int slab, u32 (&codes)[2]) {
    const int shift = row.part / 2 * 4;
    const u32* const words = reinterpret_cast<const u32*>(row.unit + 4 * (row.part % 2) + 36 * (slab / 2) + 4 + slab % 2 * 16);
    fp4_codes(row, (words[0] >> shift & 0x0F0F0F0Fu) | (words[2] >> shift & 0x0F0F0F0Fu) << 4, codes);
}

#endif
