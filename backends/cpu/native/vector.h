// Vectors of as many floats as a register of the processor holds. What instruction sets bring of their own has a file for
// each size of registers: HAL_WIDENS says that it widens and narrows 16-bit floats, HAL_INTEGERS that it adds products of
// 16-bit integers. Everything else, and the slower form without these, is written with the compiler's vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "elements.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "vector_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vector_avx2.h"
#else
#include "vector_128.h"
#endif

using Lanes = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

#ifdef HAL_INTEGERS
using Shorts = int16_t __attribute__((vector_size(4 * kLanes)));
inline Ints dot(Ints sum, Shorts left, Shorts right) {
    return Ints(add_products(Register(sum), Register(left), Register(right)));
}
// Returns the entries of a table that has 16 twice, by the last four bits.
inline Shorts lookup(const int16_t* table, Shorts indices) { return Shorts(entries(table, Register(indices))); }
#endif

template <class V, class T>
inline V load(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

// Where the compiler's assembly keeps a vector that it reads and writes.
#if defined(__x86_64__)
#define IN_REGISTER "+v"
#elif defined(__aarch64__)
#define IN_REGISTER "+w"
#else
#define IN_REGISTER "+m"
#endif

// Has the compiler compute a vector here and hold it, where it would read it anew or merge it with what follows.
template <class V>
inline void keep(V& vector) {
    asm("" : IN_REGISTER(vector));
}

// Adds products to sums that stay where they are: given the choice, GCC 12 overwrites a factor and spills the sum.
template <class V>
inline void add_product(V& sum, V left, V right) {
#if defined(HAL_AVX2)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(left), "xm"(right));
#else
    sum += left * right;
    keep(sum);
#endif
}

// Returns kLanes elements in float32.
template <class T>
inline Lanes wide(const T* from) {
    using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
    if constexpr (std::is_same_v<T, float>) return load<Lanes>(from);
#ifdef HAL_WIDENS
    if constexpr (sizeof(T) == 2) return Lanes(widened(from));
#endif
    if constexpr (std::is_same_v<T, bfloat16>) return Lanes(__builtin_convertvector(load<Halves>(from), Words) << 16);
#ifndef __aarch64__
    if constexpr (std::is_same_v<T, float16>) {
        // The exponent and fraction of a float16 are those of a float32 of 2**-112 times its size.
        const Words bits = __builtin_convertvector(load<Halves>(from), Words), size = (bits & 0x7fff) << 13;
        const Words wide = Words(Lanes(size) * 0x1p112f), special = size >= 0x0f800000 ? Words{} + 0x7f800000 : Words{};
        return Lanes(wide | special | (bits & 0x8000) << 16);
    }
#endif
    Lanes values;
    for (int i = 0; i < kLanes; i++) values[i] = float(from[i]);
    return values;
}

// Rounds kLanes elements to nearest even.
template <class T>
inline void narrow(Lanes values, T* to) {
    using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
    if constexpr (std::is_same_v<T, bfloat16>) {
        const Words bits = Words(values), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const Words kept = (bits & 0x7fffffff) > 0x7f800000 ? Words{} + 0x7fc0 : rounded;  // a NaN is no infinity
        const Halves halves = __builtin_convertvector(kept, Halves);
        std::memcpy(to, &halves, sizeof(halves));
        return;
    }
#ifdef HAL_WIDENS
    if constexpr (std::is_same_v<T, float16>) return narrowed(values, to);
#endif
    for (int i = 0; i < kLanes; i++) to[i] = T(values[i]);
}

// Returns the sum of each of kLanes vectors, the sum of vector i in lane i.
template <class V>
inline V sums_of(const V* v) {
    constexpr int kCount = sizeof(V) / sizeof(v[0][0]);
    if constexpr (kCount == 16) {
        V pairs[8], fours[4], eights[2];
        for (int i = 0; i < 8; i++) {
            const V &a = v[2 * i], &b = v[2 * i + 1];
            pairs[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                       __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
        }
        for (int i = 0; i < 4; i++) {
            const V &a = pairs[2 * i], &b = pairs[2 * i + 1];
            fours[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                       __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
        for (int i = 0; i < 2; i++) {
            const V &a = fours[2 * i], &b = fours[2 * i + 1];
            eights[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                        __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
        const V &a = eights[0], &b = eights[1];
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    } else if constexpr (kCount == 8) {
        V pairs[4], fours[2];
        for (int i = 0; i < 4; i++) {
            const V &a = v[2 * i], &b = v[2 * i + 1];
            pairs[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
                       __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
        }
        for (int i = 0; i < 2; i++) {
            const V &a = pairs[2 * i], &b = pairs[2 * i + 1];
            fours[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
                       __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
        }
        return __builtin_shufflevector(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
    } else {
        V pairs[2];
        for (int i = 0; i < 2; i++) {
            const V &a = v[2 * i], &b = v[2 * i + 1];
            pairs[i] = __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
        }
        return __builtin_shufflevector(pairs[0], pairs[1], 0, 1, 4, 5) +
               __builtin_shufflevector(pairs[0], pairs[1], 2, 3, 6, 7);
    }
}

// Writes the sum of each of Count vectors, a multiple of kLanes.
template <int Count>
inline void write_sums(const Lanes* v, float* to) {
    for (int i = 0; i < Count; i += kLanes) {
        const Lanes sums = sums_of(v + i);
        std::memcpy(to + i, &sums, sizeof(sums));
    }
}

// Transposes kLanes by kLanes elements of 4 bytes, in passes that exchange ever smaller blocks.
template <class V>
inline void transpose(V* v) {
    constexpr int kCount = sizeof(V) / sizeof(v[0][0]);
    if constexpr (kCount == 16) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const V a = v[i], b = v[i + 8];
            v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
            v[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const int i = j / 4 * 8 + j % 4;
            const V a = v[i], b = v[i + 4];
            v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            v[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const int i = j / 2 * 4 + j % 2;
            const V a = v[i], b = v[i + 2];
            v[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            v[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) {
            const V a = v[i], b = v[i + 1];
            v[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
            v[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
        }
    } else if constexpr (kCount == 8) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const V a = v[i], b = v[i + 4];
            v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
            v[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const int i = j / 2 * 4 + j % 2;
            const V a = v[i], b = v[i + 2];
            v[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
            v[i + 2] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) {
            const V a = v[i], b = v[i + 1];
            v[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
            v[i + 1] = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
        }
    } else {
        for (int i = 0; i < 2; i++) {
            const V a = v[i], b = v[i + 2];
            v[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5), v[i + 2] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
        }
        for (int i = 0; i < 4; i += 2) {
            const V a = v[i], b = v[i + 1];
            v[i] = __builtin_shufflevector(a, b, 0, 4, 2, 6), v[i + 1] = __builtin_shufflevector(a, b, 1, 5, 3, 7);
        }
    }
}
