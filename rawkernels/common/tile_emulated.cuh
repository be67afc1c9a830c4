// tile_emulated: the matrix instructions of all vendors, lane by lane.
//
// Each lane shows its registers to the warp and computes the elements of the result that the instruction leaves with it,
// from the lanes in which the instruction expects the factors. So a kernel whose fragments are laid out wrongly gets wrong
// numbers here too. Products are exact in float32; sums run in the order of k.
#pragma once

// Shows a lane's registers; the instruction needs the whole warp.
DEVICE const u8* pyllm_show_tile(int kind, const void* registers, int bytes) {
    u64 lanes;
    const u8* const slots = pyllm_exchange(kind, registers, bytes, lanes);
    if (lanes != ~(u64)0 >> (64 - WARP_SIZE)) pyllm_emulation->fail(FAULT_EXCHANGE);
    return slots;
}

DEVICE const float* pyllm_shown_floats(const u8* slots, int lane) {
    return reinterpret_cast<const float*>(slots + lane * EXCHANGE_BYTES);
}

// Registers as the floats that they hold: converted once by their owner, not by every reader.
DEVICE void pyllm_unpack(float* values, const void* registers, int count) {
    for (int i = 0; i < count; i++) {
        u16 bits;
        __builtin_memcpy(&bits, (const u8*)registers + 2 * i, sizeof(bits));
        values[i] = f16_bits_to_f32(bits);
    }
}

// ldmatrix.m8n8.x4: lane 8i + j gives the address of row j of block i; lane l gets elements 2(l % 4) and the next of row
// l / 4 of each block.
DEVICE void ldmatrix_x4(u32 (&r)[4], const f16* row) {
    tile_check_source(row);
    const u8* const slots = pyllm_show_tile(EXCHANGE_TILE_LOAD, &row, sizeof(row));
    const int lane = pyllm_emulation->lane;
    for (int block = 0; block < 4; block++) {
        const f16* source;
        __builtin_memcpy(&source, slots + (8 * block + lane / 4) * EXCHANGE_BYTES, sizeof(source));
        __builtin_memcpy(&r[block], source + lane % 4 * 2, sizeof(u32));
    }
}

// ldmatrix.m8n8.x4.trans: elements 2(l % 4) and the next of column l / 4 of each block
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const f16* row) {
    tile_check_source(row);
    const u8* const slots = pyllm_show_tile(EXCHANGE_TILE_LOAD, &row, sizeof(row));
    const int lane = pyllm_emulation->lane;
    for (int block = 0; block < 4; block++) {
        for (int half = 0; half < 2; half++) {
            const f16* source;
            __builtin_memcpy(&source, slots + (8 * block + lane % 4 * 2 + half) * EXCHANGE_BYTES, sizeof(source));
            __builtin_memcpy((u8*)&r[block] + 2 * half, source + lane / 4, sizeof(u16));
        }
    }
}

// mma.m16n8k16.row.col
DEVICE void mma_m16n8k16(float* c, const u32* a, const u32* b) {
    float registers[12];  // 8 of A, 4 of B
    pyllm_unpack(registers, a, 8);
    pyllm_unpack(registers + 8, b, 4);
    const u8* const slots = pyllm_show_tile(EXCHANGE_TILE, registers, sizeof(registers));
    const int lane = pyllm_emulation->lane;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8;
        const int column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const int owner = k % 8 / 2;  // of both factors, within their group of four lanes
            const float* const of_row = pyllm_shown_floats(slots, row % 8 * 4 + owner);
            const float* const of_column = pyllm_shown_floats(slots, column * 4 + owner);
            c[i] += of_row[k / 8 * 4 + row / 8 * 2 + k % 2] * of_column[8 + k / 8 * 2 + k % 2];
        }
    }
}

// mma.m16n8k32 (words = 2) and m16n8k16 (words = 1) of signed bytes: a word of four k for each of rows g and g + 8, then, for
// the further 16 k, the next two.
DEVICE void pyllm_mma_s8(i32 (&c)[4], const u32* a, const u32* b, int words) {
    u32 registers[6] = {};
    for (int i = 0; i < 2 * words; i++) registers[i] = a[i];
    for (int i = 0; i < words; i++) registers[4 + i] = b[i];
    const u8* const slots = pyllm_show_tile(EXCHANGE_TILE, registers, sizeof(registers));
    const int lane = pyllm_emulation->lane;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8;
        const int column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16 * words; k++) {
            const int owner = k % 16 / 4;  // of both factors, within their group of four lanes
            const u8* const of_row = slots + (row % 8 * 4 + owner) * EXCHANGE_BYTES;
            const u8* const of_column = slots + (column * 4 + owner) * EXCHANGE_BYTES + 16;
            c[i] += static_cast<i8>(of_row[(k / 16 * 2 + row / 8) * 4 + k % 4]) *
                    static_cast<i8>(of_column[k / 16 * 4 + k % 4]);
        }
    }
}

DEVICE void mma_m16n8k32_s8(i32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { pyllm_mma_s8(c, a, b, 2); }
DEVICE void mma_m16n8k16_s8(i32 (&c)[4], const u32 (&a)[2], u32 b) { pyllm_mma_s8(c, a, &b, 1); }

// v_wmma_f32_16x16x16_f16, waves of 32. Lanes 16-31 must repeat lanes 0-15: where they do not, the result is NaN.
DEVICE void wmma_16x16x16(float (&c)[8], const u32x4 (&a)[2], const u32x4 (&b)[2]) {
    float registers[32];  // 16 of A, 16 of B
    pyllm_unpack(registers, a, 16);
    pyllm_unpack(registers + 16, b, 16);
    const u8* const slots = pyllm_show_tile(EXCHANGE_TILE, registers, sizeof(registers));
    const int lane = pyllm_emulation->lane;
    const bool repeated = !__builtin_memcmp(slots + lane * EXCHANGE_BYTES, slots + (lane ^ 16) * EXCHANGE_BYTES, 128);
    const float* const of_column = pyllm_shown_floats(slots, lane % 16) + 16;
    for (int i = 0; i < 8; i++) {
        const float* const of_row = pyllm_shown_floats(slots, 2 * i + lane / 16);
        for (int k = 0; k < 16; k++) c[i] += of_row[k] * of_column[k];
        if (!repeated) c[i] = __builtin_nanf("");
    }
}

// v_mfma_f32_16x16x16_f16, waves of 64
DEVICE void mfma_16x16x16(float (&c)[4], u64 a, u64 b) {
    float registers[8];  // 4 of A, 4 of B
    pyllm_unpack(registers, &a, 4);
    pyllm_unpack(registers + 4, &b, 4);
    const u8* const slots = pyllm_show_tile(EXCHANGE_TILE, registers, sizeof(registers));
    const int lane = pyllm_emulation->lane;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 16 * 4 + i;
        for (int k = 0; k < 16; k++) {
            const float* const of_row = pyllm_shown_floats(slots, k / 4 * 16 + row);
            const float* const of_column = pyllm_shown_floats(slots, k / 4 * 16 + lane % 16);
            c[i] += of_row[k % 4] * of_column[4 + k % 4];
        }
    }
}
