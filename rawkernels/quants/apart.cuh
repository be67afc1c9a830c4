// apart: packed weights as signed bytes, for products in which each lane adds up its own weights apart from other lanes'
// (common/product_apart.cuh): of a block of 256 weights of a row, lane `part` of four has two runs of 32, `part` and part + 4.
//
//   ApartBlock apart_block(unit, table)    of a row, in shared memory, at a multiple of what blocks are aligned to
//   ApartRun apart_run(block, run)         what of the block tells of run 0..7
//   void apart_codes(row, eight, codes)    eight 0..3 of its weights, in the order of WHOLE_ORDER
//   i32 apart_scale(row, half)             w = d scale code; of each half of the run where APART_SCALES is 2
//   float apart_d(unit)
//
// The codebook lies in shared memory TABLE_COPIES times, entry by entry, so that lanes with different copies meet no bank
// conflicts; `table` has its bytes, from the lane's copy on.
//
// Products with their sums have units of their own, which are as wide as those of shifts and logic: what can be a product
// is one.
//
// Defines   QTYPE IQ1, IQ2 or IQ3_XXS; TABLE_COPIES, see common/product_s8.cuh
#pragma once
#include "quants/whole.cuh"

#define APART_SCALES (QTYPE == 17 || QTYPE == 22 || QTYPE == 29 ? 2 : 1)
#define ENTRY (4 * TABLE_COPIES)  // bytes from one entry to the next

struct ApartBlock {
    const u8* unit;
    WholeWords from2;  // words at offsets 2, 6, 10 ..
    const u8* table;
};

DEVICE ApartBlock apart_block(const u8* unit, const u8* table) { return {unit, words_at(unit, false, 2), table}; }

// Words at an offset that is two more than a multiple of four.
template <int N>
DEVICE void load_words(const ApartBlock& block, int offset, u32 (&words)[N]) {
    const u32* const source = block.from2.words + offset / 4;
    u32 next = source[0];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u32 low = next;
        next = source[i + 1];
        words[i] = static_cast<u32>((static_cast<u64>(next) << 32 | low) >> block.from2.shift);
    }
}

DEVICE u32 byte_of(u32 word, int i) { return byte_perm(word, 0, 0x4440 | i); }
DEVICE u32 half_at(const u8* p) { return *reinterpret_cast<const u16*>(p); }

DEVICE u32 entry_at(const u8* table, u32 offset) { return *reinterpret_cast<const u32*>(table + offset); }

#if WHOLE_IQ1

struct ApartRun {
    u32 low, high;  // bits of entry numbers
    u32 scales;
    const u8* table;
};

// Digits -1, 0, 1 with delta, times 8.
DEVICE u32 digit_levels_of(u32 is_down) { return 0x000901F9u + is_down * (0x0007FFF7u - 0x000901F9u); }

#if QTYPE == 19

DEVICE ApartRun apart_run(const ApartBlock& block, int run) {
    u32 low[1];
    load_words(block, 2 + 4 * run, low);
    const u32 high = half_at(block.unit + 34 + 2 * run);
    return {low[0], high, digit_levels_of(high >> 15), block.table};
}

DEVICE float apart_d(const u8* unit) { return f16_bits_to_f32(static_cast<u16>(half_at(unit))) * 0.125f; }
DEVICE i32 apart_scale(const ApartRun& run, int half) {
    (void)half;
    return static_cast<i32>((run.high >> 11 & 14) | 1);
}

DEVICE u32 levels_of(const ApartRun& run, int eight) {
    (void)eight;
    return run.scales;
}

constexpr int HIGH_STEP = 3;  // bits

#else

DEVICE ApartRun apart_run(const ApartBlock& block, int run) {
    return {*reinterpret_cast<const u32*>(block.unit + 4 * run), half_at(block.unit + 32 + 2 * run),
            half_at(block.unit + 48 + run / 2 * 2) >> run % 2 * 6, block.table};
}

DEVICE float apart_d(const u8* unit) {
    const u64 words = *reinterpret_cast<const u64*>(unit + 48);
    const u32 low = static_cast<u32>(words), high = static_cast<u32>(words >> 32);
    const u32 bits = (low >> 12 & 0xF) | (low >> 24 & 0xF0) | (high >> 4 & 0xF00) | (high >> 16 & 0xF000);
    return f16_bits_to_f32(static_cast<u16>(bits)) * 0.125f;
}

DEVICE i32 apart_scale(const ApartRun& run, int half) {
    return static_cast<i32>((half ? run.scales >> 2 & 14 : run.scales << 1 & 14) | 1);
}

DEVICE u32 levels_of(const ApartRun& run, int eight) { return digit_levels_of(run.high >> (4 * eight + 3) & 1); }

constexpr int HIGH_STEP = 4;

#endif

DEVICE void apart_codes(const ApartRun& run, int eight, u32 (&codes)[2]) {
    const u32 bits = run.high & 7u << HIGH_STEP * eight;
    constexpr u32 entries = 256 * ENTRY;
    const u32 high = entries >> HIGH_STEP * eight ? bits * (entries >> HIGH_STEP * eight) : bits / (4096 / entries);
    const u32 entry = entry_at(run.table, byte_of(run.low, eight) * ENTRY + high);
    const u32 levels = levels_of(run, eight);
    codes[0] = bytes_at(levels, 0, entry);
    codes[1] = bytes_at(levels, 0, entry >> 16);
}

#else

struct ApartRun {
    u32 codes[2];
    u32 signs, high, scales;
    const u8* table;
    u32 zero;  // see WholeRow
};

#if QTYPE == 16 || QTYPE == 18
DEVICE ApartRun apart_run(const ApartBlock& block, int run) {
    ApartRun found = {};
    if (QTYPE == 16) {
        u32 words[2];
        load_words(block, 2 + 8 * run, words);
        found.codes[0] = words[0], found.signs = words[1];
    } else {
        u32 words[1];
        load_words(block, 2 + 8 * run, found.codes);
        load_words(block, 66 + 4 * run, words);
        found.signs = words[0];
    }
    found.table = block.table;
    return found;
}

DEVICE float apart_d(const u8* unit) {
    return f16_bits_to_f32(static_cast<u16>(half_at(unit))) * (QTYPE == 16 ? 0.125f : 0.25f);
}
DEVICE i32 apart_scale(const ApartRun& run, int half) {
    (void)half;
    return static_cast<i32>(run.signs >> 27 | 1);
}
#else
DEVICE ApartRun apart_run(const ApartBlock& block, int run) {
    ApartRun found = {};
    if (QTYPE == 17) {
        load_words(block, 2 + 8 * run, found.codes);
    } else {
        u32 words[1];
        load_words(block, 2 + 4 * run, words);
        found.codes[0] = words[0];
        load_words(block, 34 + 4 * run, words);
        found.signs = words[0];
        found.high = block.unit[66 + run];
    }
    found.scales = block.unit[(QTYPE == 17 ? 66 : 74) + run];
    found.table = block.table;
    return found;
}

DEVICE float apart_d(const u8* unit) { return f16_bits_to_f32(static_cast<u16>(half_at(unit))) * 0.125f; }
DEVICE i32 apart_scale(const ApartRun& run, int half) {
    return static_cast<i32>((half ? run.scales >> 3 & 0x1E : run.scales << 1 & 0x1E) | 1);
}
#endif

#if WHOLE_IQ2
// The product leaves bit j of seven as the third one of nibble 2 j, or 2 j - 7 from j = 4 on.
DEVICE void signed_codes(u32 entry, u32 spread, u32 zero, u32 (&codes)[2]) {
    const u32 selectors = entry | (spread & 0x44444444u);
    const u32 levels = QUANT_LEVELS ^ zero, negated = NEGATED(QUANT_LEVELS) ^ zero;
    codes[0] = bytes_at(levels, negated, selectors);
    codes[1] = bytes_at(levels, negated, selectors >> 16);
}

DEVICE void apart_codes(const ApartRun& run, int eight, u32 (&codes)[2]) {
    u32 offset, spread;
    if (QTYPE == 22) {
        const u32 signs = byte_of(run.signs, eight);
        // Seven bits, and the eighth.
        spread = (signs & 127) * (0x00810204u - 0x00800000u) + signs * 0x00800000u;
        offset = byte_of(run.codes[0], eight) * ENTRY + (run.high & 3u << 2 * eight) * (256 * ENTRY >> 2 * eight);
    } else {
        u32 signs;
        if (QTYPE == 16) {
            signs = run.signs >> 7 * eight & 127;
            offset = byte_of(run.codes[0], eight) * ENTRY;
        } else {
            const u32 word = run.codes[eight / 2];
            signs = eight % 2 ? word >> 25 : word >> 9 & 127;
            offset = eight % 2 ? (word >> 16 & 511) * ENTRY : (word & 511) * ENTRY;
        }
        spread = static_cast<u32>(popcount(signs)) * (1u << 30) + signs * 0x00810204u;
    }
    signed_codes(entry_at(run.table, offset), spread, run.zero, codes);
}
#else
DEVICE void apart_codes(const ApartRun& run, int eight, u32 (&codes)[2]) {
    const u32 word = run.codes[eight / 2];
    const u32 offset[2] = {byte_of(word, eight % 2 * 2) * ENTRY, byte_of(word, eight % 2 * 2 + 1) * ENTRY};
    const u32 signs = run.signs >> 7 * eight & 127;
    const u32 eighth = static_cast<u32>(popcount(signs)) * 0x80000000u;  // the number of signs is even
    // Products that leave bit j of four at the upper end of byte j; those of seven bits do not meet.
    codes[0] = signed_bytes(entry_at(run.table, offset[0]), signs * 0x10204080u);
    codes[1] = signed_bytes(entry_at(run.table, offset[1]), signs * 0x01020408u + eighth);
}
#endif

#endif
