// tile_wgmma_cuda: the instructions of sm_90a.
#pragma once

// One block to a multiprocessor, unless the kernel says otherwise: registers move from one part of its warps to another.
#if !defined(KERNEL_MIN_BLOCKS)
#undef KERNEL
#define KERNEL(max_threads) extern "C" __global__ void __launch_bounds__(max_threads, 1)
#endif

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// A factor at `address`: `leading` bytes lie between its panels, 1024 between groups of eight rows.
DEVICE u64 wgmma_factor(u32 address, u32 leading) {
    return (u64)(address >> 4 & 0x3FFF) | (u64)(leading >> 4 & 0x3FFF) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// The factor that begins so many bytes behind this one, multiples of 16.
DEVICE u64 wgmma_factor_behind(u64 factor, u32 bytes) { return factor + (bytes >> 4); }

// Before the first product, and after registers that products use were written otherwise.
DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Until all groups but the last N are done.
template <int N>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

// Keeps the compiler from moving uses of a sum across a wait.
template <int N>
DEVICE void wgmma_pin(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i]) : : "memory");
}

#define WGMMA_C4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define WGMMA_C16(c, i) WGMMA_C4(c, i), WGMMA_C4(c, i + 4), WGMMA_C4(c, i + 8), WGMMA_C4(c, i + 12)
#define WGMMA_C32(c) WGMMA_C16(c, 0), WGMMA_C16(c, 16)
#define WGMMA_C64(c) WGMMA_C16(c, 0), WGMMA_C16(c, 16), WGMMA_C16(c, 32), WGMMA_C16(c, 48)
#define WGMMA_R32                                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define WGMMA_R64                                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "  \
    "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

#define WGMMA_T0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_T1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_T2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_T3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_T4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_T5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_T6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_T7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// `sums`: N / 2 of them, whose names are `text`; the operands behind them are a, b and add.
#define WGMMA_COLUMNS(n, text, at_a, at_b, at_add, ...)                                                       \
    asm volatile("{.reg .pred add; setp.ne.b32 add, %" at_add ", 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" text "}, %" at_a ", %" at_b         \
                 ", add, 1, 1, 0, 0;}"                                                                        \
                 : __VA_ARGS__                                                                                \
                 : "l"(a), "l"(b), "r"((int)add))

template <int N>
DEVICE void wgmma_columns(float* c, u64 a, u64 b, bool add) {
    static_assert(N % 32 == 0 && N > 0 && N <= 256, "there is no product of this width here");
    if constexpr (N == 32) {
        WGMMA_COLUMNS("32", WGMMA_T0, "16", "17", "18", WGMMA_C16(c, 0));
    } else if constexpr (N == 64) {
        WGMMA_COLUMNS("64", WGMMA_T0 ", " WGMMA_T1, "32", "33", "34", WGMMA_C16(c, 0), WGMMA_C16(c, 16));
    } else if constexpr (N == 96) {
        WGMMA_COLUMNS("96",
                      WGMMA_T0 ", " WGMMA_T1 ", " WGMMA_T2,
                      "48", "49", "50",
                      WGMMA_C16(c, 0), WGMMA_C16(c, 16), WGMMA_C16(c, 32));
    } else if constexpr (N == 128) {
        WGMMA_COLUMNS("128",
                      WGMMA_T0 ", " WGMMA_T1 ", " WGMMA_T2 ", " WGMMA_T3,
                      "64", "65", "66",
                      WGMMA_C16(c, 0), WGMMA_C16(c, 16), WGMMA_C16(c, 32), WGMMA_C16(c, 48));
    } else if constexpr (N == 160) {
        WGMMA_COLUMNS("160",
                      WGMMA_T0 ", " WGMMA_T1 ", " WGMMA_T2 ", " WGMMA_T3 ", " WGMMA_T4,
                      "80", "81", "82",
                      WGMMA_C16(c, 0), WGMMA_C16(c, 16), WGMMA_C16(c, 32), WGMMA_C16(c, 48),
                      WGMMA_C16(c, 64));
    } else if constexpr (N == 192) {
        WGMMA_COLUMNS("192",
                      WGMMA_T0 ", " WGMMA_T1 ", " WGMMA_T2 ", " WGMMA_T3 ", " WGMMA_T4 ", " WGMMA_T5,
                      "96", "97", "98",
                      WGMMA_C16(c, 0), WGMMA_C16(c, 16), WGMMA_C16(c, 32), WGMMA_C16(c, 48),
                      WGMMA_C16(c, 64), WGMMA_C16(c, 80));
    } else if constexpr (N == 224) {
        WGMMA_COLUMNS("224",
                      WGMMA_T0 ", " WGMMA_T1 ", " WGMMA_T2 ", " WGMMA_T3 ", " WGMMA_T4 ", " WGMMA_T5 ", " WGMMA_T6,
                      "112", "113", "114",
                      WGMMA_C16(c, 0), WGMMA_C16(c, 16), WGMMA_C16(c, 32), WGMMA_C16(c, 48),
                      WGMMA_C16(c, 64), WGMMA_C16(c, 80), WGMMA_C16(c, 96));
    } else if constexpr (N == 256) {
        WGMMA_COLUMNS("256",
                      WGMMA_T0 ", " WGMMA_T1 ", " WGMMA_T2 ", " WGMMA_T3 ", " WGMMA_T4 ", " WGMMA_T5 ", " WGMMA_T6 ", " WGMMA_T7,
                      "128", "129", "130",
                      WGMMA_C16(c, 0), WGMMA_C16(c, 16), WGMMA_C16(c, 32), WGMMA_C16(c, 48),
                      WGMMA_C16(c, 64), WGMMA_C16(c, 80), WGMMA_C16(c, 96), WGMMA_C16(c, 112));
    }
}

// `sums` as in WGMMA_COLUMNS; a in registers.
#define WGMMA_HELD(n, text, a0, a1, a2, a3, at_b, at_add, ...)                                                 \
    asm volatile("{.reg .pred add; setp.ne.b32 add, %" at_add ", 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" text "}, {%" a0 ", %" a1 ", %" a2     \
                 ", %" a3 "}, %" at_b ", add, 1, 1, 0;}"                                                       \
                 : __VA_ARGS__                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))

template <int N>
DEVICE void wgmma_held(float* c, const u32* a, u64 b, bool add) {
    static_assert(N == 16 || N == 32 || N == 64 || N == 128, "there is no product of this width here");
    if constexpr (N == 16) {
        WGMMA_HELD("16", "%0, %1, %2, %3, %4, %5, %6, %7", "8", "9", "10", "11", "12", "13", WGMMA_C4(c, 0), WGMMA_C4(c, 4));
    } else if constexpr (N == 32) {
        WGMMA_HELD("32", WGMMA_T0, "16", "17", "18", "19", "20", "21", WGMMA_C16(c, 0));
    } else if constexpr (N == 64) {
        WGMMA_HELD("64", WGMMA_T0 ", " WGMMA_T1, "32", "33", "34", "35", "36", "37", WGMMA_C16(c, 0), WGMMA_C16(c, 16));
    } else {
        WGMMA_HELD("128",
                   WGMMA_T0 ", " WGMMA_T1 ", " WGMMA_T2 ", " WGMMA_T3,
                   "64", "65", "66", "67", "68", "69",
                   WGMMA_C16(c, 0), WGMMA_C16(c, 16), WGMMA_C16(c, 32), WGMMA_C16(c, 48));
    }
}

// Keeps the compiler from computing factors behind wgmma_begin, where they would wait for all products before.
template <int N>
DEVICE void wgmma_ready(u32 (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(a[i / 4][i % 4]) : : "memory");
}

template <int N>
DEVICE void wgmma_rows(float* c, const u32* a, u64 b) {
    static_assert(N == 64 || N == 128, "there is no product of this width here");
    if constexpr (N == 64) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " WGMMA_R32
                     ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                     : WGMMA_C32(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " WGMMA_R64
                     ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                     : WGMMA_C64(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}

// Keeps the compiler from computing ahead, in more registers, what follows from a value.
DEVICE void forget_origin(u32& value) { asm volatile("" : "+r"(value)); }

// Registers of a thread of this warpgroup from here on; all four warps come here.
template <int N>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N));
}
template <int N>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N));
}

// What this thread wrote to shared memory, or saw arrive there, becomes visible to the products behind this; signals that it
// made ready, to bulk copies.
DEVICE void fence_products() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

DEVICE void signal_init(Signal* signal, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(signal)), "r"(arrivals) : "memory");
}

DEVICE void signal_arrive(Signal* signal) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(signal)) : "memory");
}

DEVICE void signal_wait(Signal* signal, u32 phase) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}"
        :
        : "r"(shared_address(signal)), "r"(phase)
        : "memory");
}

// Arrives once all copies that this thread has begun by now are in place.
DEVICE void signal_arrive_behind_copies(Signal* signal) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(shared_address(signal)) : "memory");
}

// An arrival, behind which the phase still waits for so many bytes.
DEVICE void signal_expect(Signal* signal, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(signal)), "r"(bytes)
                 : "memory");
}

// Begins to copy a multiple of 16 bytes, which the signal has to expect.
DEVICE void bulk_copy(Signal* signal, u32 shared, const void* global, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(shared), "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(signal))
                 : "memory");
}

// async_copy16, or 16 zero bytes; the address must be good in either case.
DEVICE void async_copy16_or_zeros(u32 shared, const void* global, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared), "l"(global), "r"(wanted ? 16 : 0)
                 : "memory");
}

// The same of 4 bytes.
DEVICE void async_copy4_or_zeros(u32 shared, const void* global, bool wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(shared), "l"(global), "r"(wanted ? 4 : 0)
                 : "memory");
}

// Barriers of a part of the block, by number: some wait, others only arrive.
DEVICE void part_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
DEVICE void part_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
