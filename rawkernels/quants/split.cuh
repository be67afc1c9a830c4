// split: scales of a unit of 256 weights, for the four lanes that share its row in a product: each computes those of two of
// the eight slabs, and shows them to the others. f16 pairs, the same numbers as those of decode8_half2.
//
//   void split_scales(unit, part, own)     slabs 2 part and 2 part + 1
//   u32 split_scale(own, slab)             from the lane that has it; all lanes of the warp come together
//   void split_halves_of(unit, slab, run, scales, w)   QTYPE 12 and 13: elements 32 slab + 8 run to + 7 as f16 pairs
//
// What a pair holds: QTYPE 12 and 13: H2_UP d and what is added (k_scales.cuh); 14: H2_UP times the scales of both halves of
// the slab; 23: H2_UP times the scales of slabs 2 part and 2 part + 1.
#pragma once
#include "quants/decode.cuh"

#if QTYPE == 12 || QTYPE == 13 || QTYPE == 14 || QTYPE == 23
#define SPLIT_SCALES 1

#if QTYPE == 12 || QTYPE == 13
#define SPLIT_CENTRE (QTYPE == 12 ? 8 : 16)

DEVICE void split_scales(const u8* unit, int part, u32 (&own)[2]) {
    const u32x4 head = load16<u32x4>(unit);
    const bool first = part < 2;  // of both words of scales, and of both of minima; see k_scale
    const u32 mask = first ? 0x3F3F3F3Fu : 0x0F0F0F0Fu;
    const u32 scales = ((first ? head.y : head.w) & mask) | (first ? 0 : head.y >> 2 & 0x30303030u);
    const u32 minima = ((first ? head.z : head.w >> 4) & mask) | (first ? 0 : head.z >> 2 & 0x30303030u);
    // Two bytes as f16 pairs: the last places of 1024 and more.
    const u32 places = part % 2 ? 0x4342 : 0x4140;
    const u32 scale = h2_sub(byte_perm(scales, 0x64646464u, places), 0x64006400u);
    const u32 minimum = h2_sub(byte_perm(minima, 0x64646464u, places), 0x64006400u);
    const float d = low_half(head.x), dmin = high_half(head.x);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const float of_slab = d * (j ? high_half(scale) : low_half(scale));
        const float less = dmin * (j ? high_half(minimum) : low_half(minimum));
        own[j] = h2_pack(H2_UP * of_slab, fmaf(of_slab, static_cast<float>(SPLIT_CENTRE), -less));
    }
}

DEVICE void split_halves_of(const u8* unit, int slab, int run, u32 scales, u32 (&w)[4]) {
    const u64 nibbles = *reinterpret_cast<const u64*>(unit + (QTYPE == 12 ? 16 : 48) + 32 * (slab / 2) + 8 * run);
    u32 codes[2] = {static_cast<u32>(nibbles) >> slab % 2 * 4 & 0x0F0F0F0Fu,
                    static_cast<u32>(nibbles >> 32) >> slab % 2 * 4 & 0x0F0F0F0Fu};
#if QTYPE == 13
    const u64 fifth = *reinterpret_cast<const u64*>(unit + 16 + 8 * run);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 bits = static_cast<u32>(fifth >> 32 * j);
        codes[j] |= (slab < 4 ? bits << (4 - slab) % 8 : bits >> (slab - 4) % 8) & 0x10101010u;
    }
#endif
    h2_of_codes_down<SPLIT_CENTRE>(codes, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_fma(w[j], byte_perm(scales, 0, 0x1010), byte_perm(scales, 0, 0x3232));
}

#elif QTYPE == 14

DEVICE void split_scales(const u8* unit, int part, u32 (&own)[2]) {
    const float d = f16_bits_to_f32(*reinterpret_cast<const u16*>(unit + 208)) * H2_UP;
    const u16* const pairs = reinterpret_cast<const u16*>(unit + 192 + 4 * part);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 bytes = pairs[j] ^ 0x8080u;
        own[j] = h2_pack(d * float_of_code(bytes, 0, 128), d * float_of_code(bytes, 1, 128));
    }
}

#else

DEVICE void split_scales(const u8* unit, int part, u32 (&own)[2]) {
    const u32* const head = reinterpret_cast<const u32*>(unit);
    const float d = low_half(head[0]) * H2_UP;
    const u32 low = head[1] >> 8 * part, high = head[0] >> (16 + 4 * part);
    const u32 codes = (low & 15) | (low & 0xF0) << 4 | (high & 3) << 4 | (high & 12) << 10;
    own[0] = h2_pack(d * float_of_code(codes, 0, 32), d * float_of_code(codes, 1, 32));
    own[1] = 0;
}

#endif

DEVICE u32 split_scale(const u32 (&own)[2], int slab) {
    return shfl(own[QTYPE == 23 ? 0 : slab % 2], (LANE() & ~3) + slab / 2);
}

#else
#define SPLIT_SCALES 0
#endif
