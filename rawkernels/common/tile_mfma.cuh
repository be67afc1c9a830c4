// tile_mfma: one v_mfma_f32_16x16x16_f16 in waves of 64 (CDNA).
//
// With r = lane % 16 and g = lane / 16: A holds row r and B column r, k 4g to 4g + 3. The instruction leaves element i of
// row 4g + i, column r. (CDNA3 ISA, "Matrix Arithmetic Instructions".) It is given B as its rows, so that a lane has
// elements of one row of C, row r, columns 4g + i: where an A has its k.
#pragma once

static_assert(WARP_SIZE == 64, "MFMA runs on waves of 64");

constexpr int TILE_C_ELEMENTS = 4;

struct FragA {
    u64 k;  // four f16
};

struct FragB {
    u64 k;
};

struct FragC {
    float x[TILE_C_ELEMENTS];
};

#if defined(PYLLM_HIP)
typedef _Float16 mfma_operand __attribute__((ext_vector_type(4)));
typedef float mfma_result __attribute__((ext_vector_type(4)));

DEVICE void mfma_16x16x16(float (&c)[4], u64 a, u64 b) {
    mfma_result sum;
    __builtin_memcpy(&sum, c, sizeof(sum));
    sum = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(mfma_operand, a),
                                                __builtin_bit_cast(mfma_operand, b), sum, 0, 0, 0);
    __builtin_memcpy(c, &sum, sizeof(sum));
}
#endif

DEVICE u64 mfma_load(const f16* smem, int ld) {
    const int lane = LANE();
    tile_check_source(smem + lane % 16 * ld);
    return *reinterpret_cast<const u64*>(smem + lane % 16 * ld + lane / 16 * 4);
}

DEVICE void tile_load_a(FragA& a, const f16* smem, int ld) { a.k = mfma_load(smem, ld); }
DEVICE void tile_load_b(FragB& b, const f16* smem, int ld) { b.k = mfma_load(smem, ld); }

// Column r gathered from rows k.
DEVICE void tile_load_b_rows(FragB& b, const f16* smem, int ld) {
    const f16* const column = smem + LANE() / 16 * 4 * ld + LANE() % 16;
    u64 k = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) k |= (u64)column[i * ld].bits << 16 * i;
    b.k = k;
}

DEVICE void tile_mma(FragC& c, const FragA& a, const FragB& b) { mfma_16x16x16(c.x, b.k, a.k); }

DEVICE int tile_c_row(int i) { return (void)i, LANE() % 16; }
DEVICE int tile_c_col(int i) { return LANE() / 16 * 4 + i; }

constexpr int TILE_ROWS = 1;
DEVICE int tile_row_of(int slot) { return (void)slot, LANE() % 16; }
DEVICE constexpr int tile_c_slot(int i) { return (void)i, 0; }

DEVICE float tile_row_max(float x) {
    x = fmaxf(x, shfl_xor(x, 16));
    return fmaxf(x, shfl_xor(x, 32));
}

DEVICE float tile_row_sum(float x) {
    x += shfl_xor(x, 16);
    return x + shfl_xor(x, 32);
}

DEVICE void tile_c_to_a(FragA& a, const FragC& c) {
    a.k = h2_pack(c.x[0], c.x[1]) | (u64)h2_pack(c.x[2], c.x[3]) << 32;
}

DEVICE void tile_add_halves(FragC& c) {
#pragma unroll
    for (int i = 0; i < TILE_C_ELEMENTS; i++) c.x[i] += shfl_xor(c.x[i], 8);
}

DEVICE void tile_settle(FragC&) {}
