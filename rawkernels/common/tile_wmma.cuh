// tile_wmma: one v_wmma_f32_16x16x16_f16 in waves of 32 (RDNA 3 and 3.5).
//
// With r = lane % 16: A holds row r and B column r, all 16 k, the same in lanes r and r + 16. The instruction leaves
// element i of row 2i + lane / 16, column r. (RDNA3 ISA, "Wave Matrix Multiply Accumulate".) It is given B as its rows, so
// that a lane has elements of one row of C: row r, column 2i + lane / 16. RDNA 4 has another layout.
#pragma once

static_assert(WARP_SIZE == 32, "this WMMA layout is that of waves of 32");
#if defined(__GFX12__)
#error "RDNA 4 has another fragment layout than RDNA 3"
#endif

constexpr int TILE_C_ELEMENTS = 8;

struct FragA {
    u32x4 k[2];  // k 0-7 and 8-15
};

struct FragB {
    u32x4 k[2];
};

struct FragC {
    float x[TILE_C_ELEMENTS];
};

#if defined(PYLLM_HIP)
typedef _Float16 wmma_operand __attribute__((ext_vector_type(16)));
typedef float wmma_result __attribute__((ext_vector_type(8)));

DEVICE void wmma_16x16x16(float (&c)[8], const u32x4 (&a)[2], const u32x4 (&b)[2]) {
    wmma_result sum;
    __builtin_memcpy(&sum, c, sizeof(sum));
    wmma_operand rows, columns;
    __builtin_memcpy(&rows, a, sizeof(rows));
    __builtin_memcpy(&columns, b, sizeof(columns));
    sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(rows, columns, sum);
    __builtin_memcpy(c, &sum, sizeof(sum));
}
#endif

DEVICE void tile_load_a(FragA& a, const f16* smem, int ld) {
    const f16* const row = smem + LANE() % 16 * ld;
    a.k[0] = load16(row);
    a.k[1] = load16(row + 8);
}

DEVICE void tile_load_b(FragB& b, const f16* smem, int ld) {
    const f16* const column = smem + LANE() % 16 * ld;
    b.k[0] = load16(column);
    b.k[1] = load16(column + 8);
}

// Column r gathered from rows k.
DEVICE void tile_load_b_rows(FragB& b, const f16* smem, int ld) {
    const f16* const column = smem + LANE() % 16;
    u32 words[8];
#pragma unroll
    for (int i = 0; i < 8; i++) words[i] = column[2 * i * ld].bits | (u32)column[(2 * i + 1) * ld].bits << 16;
    b.k[0] = u32x4{words[0], words[1], words[2], words[3]};
    b.k[1] = u32x4{words[4], words[5], words[6], words[7]};
}

DEVICE void tile_mma(FragC& c, const FragA& a, const FragB& b) { wmma_16x16x16(c.x, b.k, a.k); }

DEVICE int tile_c_row(int i) { return (void)i, LANE() % 16; }
DEVICE int tile_c_col(int i) { return 2 * i + LANE() / 16; }

constexpr int TILE_ROWS = 1;
DEVICE int tile_row_of(int slot) { return (void)slot, LANE() % 16; }
DEVICE constexpr int tile_c_slot(int i) { return (void)i, 0; }

DEVICE float tile_row_max(float x) { return fmaxf(x, shfl_xor(x, 16)); }
DEVICE float tile_row_sum(float x) { return x + shfl_xor(x, 16); }

// Lanes 0-15 have the even columns, the others the odd ones; both need all.
DEVICE void tile_c_to_a(FragA& a, const FragC& c) {
    const bool odd = LANE() >= 16;
    u32 words[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 mine = h2_pack(c.x[2 * i], c.x[2 * i + 1]);
        const u32 other = shfl_xor(mine, 16);
        words[2 * i] = byte_perm(odd ? other : mine, odd ? mine : other, 0x5410);
        words[2 * i + 1] = byte_perm(odd ? other : mine, odd ? mine : other, 0x7632);
    }
    a.k[0] = u32x4{words[0], words[1], words[2], words[3]};
    a.k[1] = u32x4{words[4], words[5], words[6], words[7]};
}

DEVICE void tile_add_halves(FragC& c) {
#pragma unroll
    for (int i = 0; i < TILE_C_ELEMENTS; i++) c.x[i] += shfl_xor(c.x[i], 8);
}

DEVICE void tile_settle(FragC& c) {
#if defined(PYLLM_HIP)
#pragma unroll
    for (int i = 0; i < TILE_C_ELEMENTS; i++) asm volatile("" : "+v"(c.x[i]) : : "memory");
#else
    (void)c;
#endif
}
