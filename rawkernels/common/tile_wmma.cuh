// tile_wmma: one v_wmma_f32_16x16x16_f16 in waves of 32 (RDNA 3 and 3.5).
//
// With r = lane % 16: A holds row r and B column r, all 16 k, the same in lanes r and r + 16. C element i is row
// 2i + lane / 16, column r. (RDNA3 ISA, "Wave Matrix Multiply Accumulate".) RDNA 4 has another layout.
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

DEVICE void tile_mma(FragC& c, const FragA& a, const FragB& b) { wmma_16x16x16(c.x, a.k, b.k); }

DEVICE int tile_c_row(int i) { return 2 * i + LANE() / 16; }
DEVICE int tile_c_col(int i) { return (void)i, LANE() % 16; }
