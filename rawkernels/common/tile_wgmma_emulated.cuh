// tile_wgmma_emulated: what tile_wgmma.cuh lists, for the host. Each product is done at once, each lane computing the elements
// that the instruction leaves with it; factors are read where the instruction reads them, so tiles that are laid out wrongly
// give wrong numbers here too. Addresses of shared memory count from the dynamic part's first byte.
//
// A thread that waits for another part of the block gives way in a ballot, so whole warps come to all of these together.
#pragma once
#include "common/tile.cuh"

DEVICE u32 shared_address(const void* pointer) { return (u32)((const u8*)pointer - pyllm_emulation->dynamic_shared); }

DEVICE u64 wgmma_factor(u32 address, u32 leading) { return (u64)address | (u64)leading << 32; }
DEVICE u64 wgmma_factor_behind(u64 factor, u32 bytes) { return factor + bytes; }
DEVICE void wgmma_begin() {}
DEVICE void wgmma_commit() {}
template <int N>
DEVICE void wgmma_wait() {}
template <int N>
DEVICE void wgmma_pin(float (&c)[N]) {
    (void)c;
}
template <int N>
DEVICE void wgmma_ready(u32 (&a)[N][4]) {
    (void)a;
}

// The hardware's 128-byte swizzle works on the bits of the address.
DEVICE float pyllm_element(u32 address) {
    const u32 place = address ^ (address >> 3 & 0x70);
    u16 bits;
    __builtin_memcpy(&bits, pyllm_emulation->dynamic_shared + place, sizeof(bits));
    return f16_bits_to_f32(bits);
}

DEVICE void pyllm_unpack_rows(float (&values)[16], u64 factor, int row) {
    for (int k = 0; k < 16; k++) values[k] = pyllm_element((u32)factor + row / 8 * 1024 + row % 8 * 128 + k * 2);
}

template <int N>
DEVICE void wgmma_columns(float* c, u64 a, u64 b, bool add) {
    const int lane = pyllm_emulation->lane;
    const int first = (int)threadIdx.x / WARP_SIZE % 4 * 16 + lane / 4;
    float rows[2][16];
    for (int r = 0; r < 2; r++) pyllm_unpack_rows(rows[r], a, first + 8 * r);
    for (int i = 0; i < N / 2; i++) {
        float column[16];
        pyllm_unpack_rows(column, b, i / 4 * 8 + lane % 4 * 2 + i % 2);
        if (!add) c[i] = 0;
        for (int k = 0; k < 16; k++) c[i] += rows[i / 2 % 2][k] * column[k];
    }
}

// Of a factor in registers, the two rows of which a lane computes products.
DEVICE void pyllm_rows_of_lanes(float (&rows)[2][16], const u32* a) {
    float mine[8];
    pyllm_unpack(mine, a, 8);
    const u8* const slots = pyllm_show_tile(EXCHANGE_TILE, mine, sizeof(mine));
    for (int r = 0; r < 2; r++) {
        for (int k = 0; k < 16; k++) {
            rows[r][k] = pyllm_shown_floats(slots, pyllm_emulation->lane / 4 * 4 + k % 8 / 2)[k / 8 * 4 + r * 2 + k % 2];
        }
    }
}

template <int N>
DEVICE void wgmma_held(float* c, const u32* a, u64 b, bool add) {
    float rows[2][16];
    pyllm_rows_of_lanes(rows, a);
    for (int i = 0; i < N / 2; i++) {
        float column[16];
        pyllm_unpack_rows(column, b, i / 4 * 8 + pyllm_emulation->lane % 4 * 2 + i % 2);
        if (!add) c[i] = 0;
        for (int k = 0; k < 16; k++) c[i] += rows[i / 2 % 2][k] * column[k];
    }
}

template <int N>
DEVICE void wgmma_rows(float* c, const u32* a, u64 b) {
    const int lane = pyllm_emulation->lane;
    float rows[2][16];
    pyllm_rows_of_lanes(rows, a);
    for (int i = 0; i < N / 2; i++) {
        const int n = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const u32 first = (u32)b + n / PANEL * (u32)(b >> 32) + n % PANEL * 2;
        for (int k = 0; k < 16; k++) {
            c[i] += rows[i / 2 % 2][k] * pyllm_element(first + k / 8 * 1024 + k % 8 * 128);
        }
    }
}

DEVICE void forget_origin(u32& value) { (void)value; }
template <int N>
DEVICE void fewer_registers() {}
template <int N>
DEVICE void more_registers() {}
DEVICE void fence_products() {}

// Arrivals that complete a phase, those that are missing, and the parity of the present phase.
DEVICE u64 pyllm_signal(u64 all, u64 missing, u64 parity) { return all | missing << 16 | parity << 32; }

DEVICE void signal_init(Signal* signal, u32 arrivals) { signal->state = pyllm_signal(arrivals, arrivals, 0); }

DEVICE void signal_arrive(Signal* signal) {
    const u64 all = signal->state & 0xFFFF;
    const u64 missing = (signal->state >> 16 & 0xFFFF) - 1;
    const u64 parity = signal->state >> 32;
    signal->state = missing ? pyllm_signal(all, missing, parity) : pyllm_signal(all, all, parity ^ 1);
}

// Copies that follow at once are done before another thread runs.
DEVICE void signal_expect(Signal* signal, u32 bytes) { (void)bytes, signal_arrive(signal); }

DEVICE void bulk_copy(Signal* signal, u32 shared, const void* global, u32 bytes) {
    (void)signal;
    __builtin_memcpy(pyllm_emulation->dynamic_shared + shared, global, bytes);
}

DEVICE void signal_wait(Signal* signal, u32 phase) {
    while (ballot(signal->state >> 32 == phase)) {
    }
}

DEVICE void signal_arrive_behind_copies(Signal* signal) {
    async_commit();
    async_wait<0>();
    signal_arrive(signal);
}

DEVICE void async_copy16_or_zeros(u32 shared, const void* global, bool wanted) {
    u8* const target = pyllm_emulation->dynamic_shared + shared;
    if (wanted) {
        async_copy16(target, global);
    } else {
        __builtin_memset(target, 0, 16);
    }
}

DEVICE void async_copy4_or_zeros(u32 shared, const void* global, bool wanted) {
    u8* const target = pyllm_emulation->dynamic_shared + shared;
    if (wanted) {
        __builtin_memcpy(target, global, 4);
    } else {
        __builtin_memset(target, 0, 4);
    }
}

SHARED i32 pyllm_part_arrivals[16];  // so far, less one: a block finds -1

DEVICE void part_arrive(int number, int threads) { (void)threads, pyllm_part_arrivals[number]++; }

DEVICE void part_barrier(int number, int threads) {
    const i32 before = ++pyllm_part_arrivals[number];
    const i32 last = before / threads * threads + threads - 1;
    while (ballot(pyllm_part_arrivals[number] < last)) {
    }
}
