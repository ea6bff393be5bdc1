// What AVX-512 brings to vector.h.
#pragma once

#include <immintrin.h>

#include "elements.h"

constexpr int kLanes = 16, kRegisters = 32;
#define HAL_AVX512
#define HAL_WIDENS

inline __m512 widened(const bfloat16* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512 widened(const float16* from) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline void narrowed(__m512 values, float16* to) {
    const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

#define HAL_INTEGERS
using Register = __m512i;

// Adds the products of 16-bit integers, two to a lane of the sum.
inline __m512i add_products(__m512i sum, __m512i left, __m512i right) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, left, right);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(left, right));
#endif
}

// Returns one of four floats in each lane.
inline __m512 spread_four(const float* four, __m512i lanes) {
    return _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_loadu_ps(four)));
}

// Returns the entries of a table of 32 that the last five bits of 16-bit integers name.
inline __m512i entries(const int16_t* table, __m512i indices) {
    return _mm512_permutexvar_epi16(indices, _mm512_loadu_si512(table));
}
