// held: weights as f16 pairs for products whose other factor stays in registers, so that its order is free: of eight weights
// the pairs 0 2, 1 3, 4 6, 5 7, as masks bring them out of words of nibbles. A unit of 256 weights is d times these pairs.
//
//   HeldRow held_row(unit, part)               of a row, for the lane of four that takes weights 8 part to + 7 of each 32
//   u32 held_scales(row, slab)                 from the lane that has them; all lanes of the warp come together
//   void held_halves(row, slab, scales, w)     weights 32 slab + 8 part to + 7
//
// A code is a subnormal f16 as it stands; its product with a scale is a normal number. So that scale and minimum fit, d is a power
// of two near the block's own, which goes into the scales.
#pragma once
#include "quants/codes.cuh"

#define HELD_BYTES (QTYPE == 12 ? 144 : 176)  // of a unit

struct HeldRow {
    const u8* lane;
    float d;
    u32 own[2];  // scale and negative minimum of slabs 2 part and 2 part + 1
};

DEVICE HeldRow held_row(const u8* unit, int part) {
    const u32x4 head = load16<u32x4>(unit);
    const bool first = part < 2;  // of both words of scales, and of both of minima; see k_scale
    const u32 mask = first ? 0x3F3F3F3Fu : 0x0F0F0F0Fu;
    const u32 scales = ((first ? head.y : head.w) & mask) | (first ? 0 : head.y >> 2 & 0x30303030u);
    const u32 minima = ((first ? head.z : head.w >> 4) & mask) | (first ? 0 : head.z >> 2 & 0x30303030u);
    // Two bytes as f16 pairs: the last places of 1024 and more.
    const u32 places = part % 2 ? 0x4342 : 0x4140;
    const u32 scale = h2_sub(bytes_at(scales, 0x64646464u, places), 0x64006400u);
    const u32 minimum = h2_sub(bytes_at(minima, 0x64646464u, places), 0x64006400u);
    const float d = low_half(head.x), dmin = high_half(head.x);
    // The power of two that is not above |d|; above |dmin| / 1024 where d is smaller than that, so that the minimum fits.
    const float size = fmaxf(fmaxf(fabsf(d), fabsf(dmin) * 0x1p-10f), 0x1p-30f);
    const u32 exponent = f32_bits(size) & 0x7F800000u;
    const float down = bits_as<float>(0x7F000000u - exponent);
    const float less = -dmin * down * 0x1p-15f;
    HeldRow row;
    row.lane = unit + 8 * part;
    row.d = bits_as<float>(exponent) * 0x1p15f;
    // Q4_K: codes of odd slabs are taken as they are, 16 times as large.
    row.own[0] = h2_pack(d * down * 0x1p9f * low_half(scale), less * low_half(minimum));
    row.own[1] = h2_pack(d * down * (QTYPE == 12 ? 0x1p5f : 0x1p9f) * high_half(scale), less * high_half(minimum));
    return row;
}

DEVICE u32 held_scales(const HeldRow& row, int slab) { return shfl(row.own[slab % 2], (LANE() & ~3) + slab / 2); }

DEVICE void held_halves(const HeldRow& row, int slab, u32 scales, u32 (&w)[4]) {
    const u64 nibbles = *reinterpret_cast<const u64*>(row.lane + (QTYPE == 12 ? 16 : 48) + 32 * (slab / 2));
    u32 codes[2] = {static_cast<u32>(nibbles), static_cast<u32>(nibbles >> 32)};
    const u32 mask = QTYPE == 13 ? 0x001F001Fu : slab % 2 ? 0x00F000F0u : 0x000F000Fu;
#if QTYPE == 13
    const u64 fifth = *reinterpret_cast<const u64*>(row.lane + 16);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 bits = static_cast<u32>(fifth >> 32 * j);
        codes[j] = (codes[j] >> slab % 2 * 4 & 0x0F0F0F0Fu) |
                   ((slab < 4 ? bits << (4 - slab) % 8 : bits >> (slab - 4) % 8) & 0x10101010u);
    }
#endif
    const u32 scale = h2_low(scales), minimum = h2_high(scales);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        w[2 * j] = h2_fma(codes[j] & mask, scale, minimum);
        w[2 * j + 1] = h2_fma(codes[j] >> 8 & mask, scale, minimum);
    }
}
