// codes: what block formats share. Eight weights are eight code bytes in two words, natural order, low byte first.
//
// float_of_code(word, j, centre)          byte j of a word minus centre, exactly
// h2_of_codes<CENTRE>(codes, w)           code - CENTRE for all eight, exactly, as four f16 pairs
// h2_scale<CENTRE>(codes, scale, w)       (code - CENTRE) scale, rounded once; a float scale is rounded to f16 before
// load_bytes8(p, words)                   eight bytes at any address
// load_word(p)                            four bytes at an even address
// spread_bits(bits)                       four bits, one in each byte
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

// The same divided by 64, so that scales can be held times 64: small ones would be subnormal numbers of f16.
constexpr float H2_UP = 64.0f;

template <int CENTRE>
DEVICE void h2_of_codes_down(const u32 (&codes)[2], u32 (&w)[4]) {
    static_assert(CENTRE >= 0 && CENTRE < 1024, "16 + CENTRE / 64 is exact");
    constexpr u32 down = 0x24002400u;                                  // 2^-6
    constexpr u32 offset = (0xCC00u + CENTRE) * 0x10001u;              // -(1024 + CENTRE) 2^-6
#pragma unroll
    for (int j = 0; j < 2; j++) {
        w[2 * j] = h2_fma(byte_perm(codes[j], 0x64646464u, 0x4140), down, offset);
        w[2 * j + 1] = h2_fma(byte_perm(codes[j], 0x64646464u, 0x4342), down, offset);
    }
}

template <int CENTRE>
DEVICE void h2_scale(const u32 (&codes)[2], u16 scale, u32 (&w)[4]) {
    h2_of_codes<CENTRE>(codes, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_mul(w[j], h2_splat(scale));
}

template <int CENTRE>
DEVICE void h2_scale(const u32 (&codes)[2], float scale, u32 (&w)[4]) {
    const u32 pair = h2_pack(H2_UP * scale, H2_UP * scale);
    h2_of_codes_down<CENTRE>(codes, w);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = h2_mul(w[j], pair);
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

DEVICE u32 load_word(const u8* p) {
    const u16* halves = reinterpret_cast<const u16*>(p);
    return halves[0] | static_cast<u32>(halves[1]) << 16;
}

DEVICE u32 spread_bits(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// The two halves of a word as floats.
DEVICE float low_half(u32 pair) { return f16_bits_to_f32(static_cast<u16>(pair & 0xFFFF)); }
DEVICE float high_half(u32 pair) { return f16_bits_to_f32(static_cast<u16>(pair >> 16)); }
