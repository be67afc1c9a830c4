// codes: what block formats share. Eight weights are eight code bytes in two words, natural order, low byte first.
//
// float_of_code(word, j, centre)          byte j of a word minus centre, exactly
// h2_of_codes<CENTRE>(codes, w)           all eight as four f16 pairs, exactly
// h2_scale<CENTRE>(codes, scale, w)       (code - CENTRE) scale, rounded once
// h2_affine<CENTRE>(codes, scale, shift, w)   (code - CENTRE) scale + shift, rounded once
// load_bytes8(p, words)                   eight bytes at any address
//
// No conversion instructions, which are slow: a byte in the last place of 2^23 (float) or 1024 (f16) is that number plus
// the byte.
#pragma once
#include "common/platform.cuh"

DEVICE float float_of_code(u32 word, int j, int centre) {
    return f32_from_bits(byte_perm(word, 0x4B000000u, 0x7650 | j)) - static_cast<float>(8388608 + centre);
}

template <int CENTRE>
DEVICE void h2_of_codes(const u32 (&codes)[2], u32 (&w)[4]) {
    constexpr u32 offset = (0x6400u + CENTRE) * 0x10001u;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        w[2 * j] = h2_sub(byte_perm(codes[j], 0x64646464u, 0x4140), offset);
        w[2 * j + 1] = h2_sub(byte_perm(codes[j], 0x64646464u, 0x4342), offset);
    }
}

template <int CENTRE>
DEVICE void h2_scale(const u32 (&codes)[2], u32 scale, u32 (&w)[4]) {
    h2_of_codes<CENTRE>(codes, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_mul(w[j], scale);
}

template <int CENTRE>
DEVICE void h2_affine(const u32 (&codes)[2], u32 scale, u32 shift, u32 (&w)[4]) {
    h2_of_codes<CENTRE>(codes, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_fma(w[j], scale, shift);
}

// Whole words around the bytes, of which none but those with wanted bytes is read.
DEVICE void load_bytes8(const u8* p, u32 (&words)[2]) {
    const u64 address = reinterpret_cast<u64>(p);
    const u32* aligned = reinterpret_cast<const u32*>(address - address % 4);
    const u32 shift = static_cast<u32>(address % 4) * 8;
    const u32 third = shift ? aligned[2] : 0;
    words[0] = static_cast<u32>((static_cast<u64>(aligned[1]) << 32 | aligned[0]) >> shift);
    words[1] = static_cast<u32>((static_cast<u64>(third) << 32 | aligned[1]) >> shift);
}

// The two halves of a word as floats.
DEVICE float low_half(u32 pair) { return f16_bits_to_f32(static_cast<u16>(pair & 0xFFFF)); }
DEVICE float high_half(u32 pair) { return f16_bits_to_f32(static_cast<u16>(pair >> 16)); }
