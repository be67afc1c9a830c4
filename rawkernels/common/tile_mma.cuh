// tile_mma: two mma.sync m16n8k16, columns 0-7 and 8-15; operands come by ldmatrix.
//
// With g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
//   A   registers 0-3   rows g, g + 8, g, g + 8; k 2t, 2t + 1 in the first two, 2t + 8, 2t + 9 in the others
//   B   registers 0-1   column g; k 2t, 2t + 1, then 2t + 8, 2t + 9
//   C   elements 0-3    row g, columns 2t, 2t + 1; row g + 8, columns 2t, 2t + 1
// ldmatrix gives each lane that element pair of four 8x8 blocks whose rows begin at the addresses of lanes 0-7, 8-15,
// 16-23 and 24-31.
#pragma once

static_assert(WARP_SIZE == 32, "mma.sync runs on warps of 32");

constexpr int TILE_C_ELEMENTS = 8;

struct FragA {
    u32 r[4];
};

struct FragB {
    u32 r[4];  // two registers for columns 0-7, two for columns 8-15
};

struct FragC {
    float x[TILE_C_ELEMENTS];
};

#if defined(PYLLM_CUDA)
DEVICE void ldmatrix_x4(u32 (&r)[4], const f16* row) {
    const u32 address = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same, each 8x8 block transposed.
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const f16* row) {
    const u32 address = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

DEVICE void mma_m16n8k16(float* c, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// Blocks in the order of A's registers: k advances behind rows.
DEVICE void tile_load_a(FragA& a, const f16* smem, int ld) {
    const int lane = LANE();
    ldmatrix_x4(a.r, smem + lane % 16 * ld + lane / 16 * 8);
}

// Blocks in the order of B's registers: columns advance behind k.
DEVICE void tile_load_b(FragB& b, const f16* smem, int ld) {
    const int lane = LANE();
    ldmatrix_x4(b.r, smem + (lane % 8 + lane / 16 * 8) * ld + lane / 8 % 2 * 8);
}

// The same blocks from rows k: k advances behind columns.
DEVICE void tile_load_b_rows(FragB& b, const f16* smem, int ld) {
    const int lane = LANE();
    ldmatrix_x4_trans(b.r, smem + lane % 16 * ld + lane / 16 * 8);
}

DEVICE void tile_mma(FragC& c, const FragA& a, const FragB& b) {
    mma_m16n8k16(c.x, a.r, b.r);
    mma_m16n8k16(c.x + 4, a.r, b.r + 2);
}

DEVICE int tile_c_row(int i) { return LANE() / 4 + i / 2 % 2 * 8; }
DEVICE int tile_c_col(int i) { return LANE() % 4 * 2 + i % 2 + i / 4 * 8; }

constexpr int TILE_ROWS = 2;
DEVICE int tile_row_of(int slot) { return LANE() / 4 + slot * 8; }
DEVICE constexpr int tile_c_slot(int i) { return i / 2 % 2; }

DEVICE float tile_row_max(float x) {
    x = fmaxf(x, shfl_xor(x, 1));
    return fmaxf(x, shfl_xor(x, 2));
}

DEVICE float tile_row_sum(float x) {
    x += shfl_xor(x, 1);
    return x + shfl_xor(x, 2);
}

// The columns of C lie where A has its k.
DEVICE void tile_c_to_a(FragA& a, const FragC& c) {
#pragma unroll
    for (int i = 0; i < 4; i++) a.r[i] = h2_pack(c.x[2 * i], c.x[2 * i + 1]);
}

DEVICE void tile_add_halves(FragC& c) {
#pragma unroll
    for (int i = 0; i < TILE_C_ELEMENTS; i += 4) {
        c.x[i] = c.x[i + 2] = c.x[i] + c.x[i + 2];
        c.x[i + 1] = c.x[i + 3] = c.x[i + 1] + c.x[i + 3];
    }
}

DEVICE void tile_settle(FragC&) {}
