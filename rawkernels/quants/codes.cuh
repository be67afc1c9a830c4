// codes: what block formats share. Eight weights are eight code bytes in two words, natural order, low byte first.
//
// float_of_code(word, j, centre)          byte j of a word minus centre, exactly
// h2_of_codes<CENTRE>(codes, w)           code - CENTRE for all eight, exactly, as four f16 pairs
// h2_scale<CENTRE>(codes, scale, w)       (code - CENTRE) scale, rounded once; a float scale is rounded to f16 before
// scaled_values<CENTRE>(codes, scale, w)  the same as float, exact but for the last rounding
// load_bytes(p, words)                    8 N bytes at any address, as N pairs of words
// load_words(p, words), load_pairs(p, words)   the same where they are aligned to 4 or 8 bytes
// load_nibbles(p, i, words)               nibbles i to i + 8 N - 1 of 16 bytes at any address: first all low ones
// load_aligned_nibbles(p, i, words)       the same where they are aligned to 4 bytes
// take_bits(words, shift, mask), add_bits(words, others, shift)
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

template <int CENTRE>
DEVICE void scaled_values(const u32 (&codes)[2], float scale, float* w) {
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = scale * float_of_code(codes[j / 4], j % 4, CENTRE);
}

template <int CENTRE>
DEVICE void scaled_values(const u32 (&codes)[2], u16 scale, float* w) {
    scaled_values<CENTRE>(codes, f16_bits_to_f32(scale), w);
}

// Whole words around the bytes, of which none but those with wanted bytes is read.
template <int N>
DEVICE void load_bytes(const u8* p, u32 (&words)[N][2]) {
    const u64 address = reinterpret_cast<u64>(p);
    const u32* const aligned = reinterpret_cast<const u32*>(p - address % 4);
    const u32 shift = static_cast<u32>(address % 4) * 8;
    u32 word = aligned[0];
#pragma unroll
    for (int j = 0; j < 2 * N; j++) {
        const u32 next = j + 1 < 2 * N || shift ? aligned[j + 1] : 0;
        words[j / 2][j % 2] = static_cast<u32>((static_cast<u64>(next) << 32 | word) >> shift);
        word = next;
    }
}

template <int N>
DEVICE void load_words(const u8* p, u32 (&words)[N][2]) {
#pragma unroll
    for (int j = 0; j < 2 * N; j++) words[j / 2][j % 2] = reinterpret_cast<const u32*>(p)[j];
}

template <int N>
DEVICE void load_pairs(const u8* p, u32 (&words)[N][2]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        const u64 pair = reinterpret_cast<const u64*>(p)[j];
        words[j][0] = static_cast<u32>(pair);
        words[j][1] = static_cast<u32>(pair >> 32);
    }
}

template <int N>
DEVICE void take_bits(u32 (&words)[N][2], u32 shift, u32 mask) {
#pragma unroll
    for (int j = 0; j < 2 * N; j++) words[j / 2][j % 2] = words[j / 2][j % 2] >> shift & mask;
}

template <int N>
DEVICE void add_bits(u32 (&words)[N][2], const u32 (&others)[N][2], u32 shift) {
#pragma unroll
    for (int j = 0; j < 2 * N; j++) words[j / 2][j % 2] |= others[j / 2][j % 2] << shift;
}

template <int M, int N>
DEVICE void split_nibbles(const u32 (&bytes)[M][2], u32 i, u32 (&words)[N][2]) {
#pragma unroll
    for (int j = 0; j < 2 * N; j++) {
        words[j / 2][j % 2] = bytes[j / 2 % M][j % 2] >> (i / 16 + j / 4) * 4 & 0x0F0F0F0Fu;
    }
}

template <int N>
DEVICE void load_nibbles(const u8* p, u32 i, u32 (&words)[N][2]) {
    u32 bytes[N < 2 ? N : 2][2];
    load_bytes(p + i % 16, bytes);
    split_nibbles(bytes, i, words);
}

template <int N>
DEVICE void load_aligned_nibbles(const u8* p, u32 i, u32 (&words)[N][2]) {
    u32 bytes[N < 2 ? N : 2][2];
    load_words(p + i % 16, bytes);
    split_nibbles(bytes, i, words);
}

DEVICE u32 load_word(const u8* p) {
    const u16* halves = reinterpret_cast<const u16*>(p);
    return halves[0] | static_cast<u32>(halves[1]) << 16;
}

DEVICE u32 spread_bits(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }
