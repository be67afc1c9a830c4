// slab: what one lane multiplies of 32 consecutive weights, for kernels that unroll over the slabs of a unit of a row.
//
//   void slab_decode(unit, slab, run, w)     elements 32 slab + 8 run to + 7 of the row that begins at `unit`, as f16 pairs
//
// With SLAB_SCALED a format also gives whole numbers and, apart from them, scale and minimum of the slab in f32, so that
// the products of a slab can be scaled instead of the weights: w = d code - minimum. Codes are exact in f16.
//
//   SlabHead slab_head(unit, slab)           what the slabs of one block share; slab is the block's first
//   void slab_codes(unit, slab, run, w)      codes as f16 pairs, in place of slab_decode
//   SlabScale slab_scale(head, slab)
#pragma once
#include "quants/decode.cuh"

DEVICE void slab_decode(const u8* RESTRICT unit, int slab, int run, u32 (&w)[4]) {
    decode8_half2(unit, 32 * slab + 8 * run, w);
}

#if QTYPE == 12 || QTYPE == 13
#define SLAB_SCALED 1
#define SLAB_BLOCK_BYTES (QTYPE == 12 ? 144 : 176)

struct SlabHead {
    float d, dmin;
    u32 scales[2], minima[2];  // a byte each, four to a word
};

struct SlabScale {
    float d, minimum;
};

DEVICE SlabHead slab_head(const u8* RESTRICT unit, int slab) {
    const u32x4 head = load16(unit + slab / 8 * SLAB_BLOCK_BYTES);
    SlabHead s;
    s.d = f16_bits_to_f32(static_cast<u16>(head.x & 0xFFFF));
    s.dmin = f16_bits_to_f32(static_cast<u16>(head.x >> 16));
    s.scales[0] = head.y & 0x3F3F3F3Fu;
    s.minima[0] = head.z & 0x3F3F3F3Fu;
    s.scales[1] = (head.w & 0x0F0F0F0Fu) | (head.y >> 2 & 0x30303030u);
    s.minima[1] = (head.w >> 4 & 0x0F0F0F0Fu) | (head.z >> 2 & 0x30303030u);
    return s;
}

DEVICE SlabScale slab_scale(const SlabHead& head, int slab) {
    const int sub = slab % 8;
    // Not by an index, which would keep them in memory where slabs are not all unrolled.
    const u32 scales = sub < 4 ? head.scales[0] : head.scales[1], minima = sub < 4 ? head.minima[0] : head.minima[1];
    const u32 bytes = byte_perm(scales, minima, 0x0400 + 0x1111 * (sub % 4));
    // A byte below the exponent of 1024 is the f16 1024 + byte; the subtraction is exact.
    const u32 pair = h2_sub((bytes & 0x00FF00FFu) | 0x64006400u, 0x64006400u);
    return {head.d * f16_bits_to_f32(static_cast<u16>(pair & 0xFFFF)),
            head.dmin * f16_bits_to_f32(static_cast<u16>(pair >> 16))};
}

DEVICE void slab_codes(const u8* RESTRICT unit, int slab, int run, u32 (&w)[4]) {
    const u8* block = unit + slab / 8 * SLAB_BLOCK_BYTES;
    const int sub = slab % 8;
    const u64 nibbles = *reinterpret_cast<const u64*>(block + SLAB_BLOCK_BYTES - 128 + 32 * (sub / 2) + 8 * run);
    u32 codes[2] = {static_cast<u32>(nibbles), static_cast<u32>(nibbles >> 32)};
#pragma unroll
    for (int j = 0; j < 2; j++) codes[j] = codes[j] >> (sub % 2 * 4) & 0x0F0F0F0Fu;
#if QTYPE == 13
    const u64 fifth = *reinterpret_cast<const u64*>(block + 16 + 8 * run);
    codes[0] |= (static_cast<u32>(fifth) >> sub & 0x01010101u) << 4;
    codes[1] |= (static_cast<u32>(fifth >> 32) >> sub & 0x01010101u) << 4;
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[j] = h2_sub(byte_perm(codes[j / 2], 0x64646464u, j % 2 ? 0x4342 : 0x4140), 0x64006400u);
    }
}

#else
#define SLAB_SCALED 0
#endif
