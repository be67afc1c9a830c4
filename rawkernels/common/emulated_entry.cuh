// emulated_entry: what the loader of emulated kernels calls. Appended by it behind the kernel's own text.
//
// PYLLM_EMULATED_ENTRY(kernel, max_threads) exports, for one kernel:
//   pyllm_run(arguments)     calls it with the values at these addresses
//   pyllm_bind(emulation)    gives it its surroundings
//   pyllm_signature()        three characters per parameter: C pointer to const, P pointer, V value; then i, u, f, h or x
//                            (integer, unsigned, float, f16, anything else) and the size in bytes, 0 where unknown
//   pyllm_max_threads()
//   pyllm_shared_range(&begin, &end)   its SHARED variables
#pragma once

#include "common/platform.cuh"

template <typename T>
struct pyllm_kind {
    static constexpr char letter = 'x';
};
#define PYLLM_KIND(type, character)                     \
    template <>                                         \
    struct pyllm_kind<type> {                           \
        static constexpr char letter = character;       \
    };
PYLLM_KIND(i8, 'i')
PYLLM_KIND(i16, 'i')
PYLLM_KIND(i32, 'i')
PYLLM_KIND(i64, 'i')
PYLLM_KIND(u8, 'u')
PYLLM_KIND(u16, 'u')
PYLLM_KIND(u32, 'u')
PYLLM_KIND(u64, 'u')
PYLLM_KIND(float, 'f')
PYLLM_KIND(double, 'f')
PYLLM_KIND(f16, 'h')
#undef PYLLM_KIND

constexpr char pyllm_digit(unsigned long size) { return (char)('0' + (size < 9 ? size : 9)); }

template <typename T>
struct pyllm_parameter {
    static constexpr char access = 'V', letter = pyllm_kind<T>::letter, size = pyllm_digit(sizeof(T));
};
template <typename T>
struct pyllm_parameter<T*> {
    static constexpr char access = 'P', letter = pyllm_kind<T>::letter, size = pyllm_digit(sizeof(T));
};
template <typename T>
struct pyllm_parameter<const T*> {
    static constexpr char access = 'C', letter = pyllm_kind<T>::letter, size = pyllm_digit(sizeof(T));
};
template <>
struct pyllm_parameter<void*> {
    static constexpr char access = 'P', letter = 'x', size = '0';
};
template <>
struct pyllm_parameter<const void*> {
    static constexpr char access = 'C', letter = 'x', size = '0';
};

template <int... I>
struct pyllm_indices {};
template <int N, int... I>
struct pyllm_make_indices : pyllm_make_indices<N - 1, N - 1, I...> {};
template <int... I>
struct pyllm_make_indices<0, I...> {
    typedef pyllm_indices<I...> type;
};

template <typename... T>
struct pyllm_text {
    char characters[3 * sizeof...(T) + 1];
};

template <typename... T>
constexpr pyllm_text<T...> pyllm_signature_of(void (*)(T...)) {
    pyllm_text<T...> text = {};
    int at = 0;
    const char all[][3] = {
        {pyllm_parameter<T>::access, pyllm_parameter<T>::letter, pyllm_parameter<T>::size}..., {0, 0, 0}};
    for (unsigned i = 0; i < sizeof...(T); i++) {
        for (int j = 0; j < 3; j++) text.characters[at++] = all[i][j];
    }
    return text;
}

template <typename... T, int... I>
inline void pyllm_call_with(void (*kernel)(T...), void** arguments, pyllm_indices<I...>) {
    kernel(*(T*)arguments[I]...);
}

template <typename... T>
inline void pyllm_call(void (*kernel)(T...), void** arguments) {
    pyllm_call_with(kernel, arguments, typename pyllm_make_indices<sizeof...(T)>::type());
}

extern "C" {
extern char __start_pyllm_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_pyllm_shared[] __attribute__((weak, visibility("hidden")));
}

#define PYLLM_EMULATED_ENTRY(kernel, max_threads)                                                                 \
    extern "C" {                                                                                                  \
    int pyllm_max_threads() { return (max_threads); }                                                             \
    const char* pyllm_signature() {                                                                               \
        static constexpr auto text = pyllm_signature_of(kernel);                                                  \
        return text.characters;                                                                                   \
    }                                                                                                             \
    void pyllm_run(void** arguments) { pyllm_call(kernel, arguments); }                                           \
    void pyllm_bind(Emulation* emulation) { pyllm_emulation = emulation; }                                        \
    void pyllm_shared_range(char** begin, char** end) { *begin = __start_pyllm_shared, *end = __stop_pyllm_shared; }    \
    }
