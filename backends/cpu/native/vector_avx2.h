// What AVX2, with FMA and F16C, brings to vector.h.
#pragma once

#include <immintrin.h>

#include "elements.h"

constexpr int kLanes = 8, kRegisters = 16;
#define HAL_AVX2
#define HAL_WIDENS

// The compiler widens each half of these alone.
inline __m256 widened(const bfloat16* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

inline __m256 widened(const float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline void narrowed(__m256 values, float16* to) {
    const __m128i halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}

#define HAL_INTEGERS
using Register = __m256i;

// Adds the products of 16-bit integers, two to a lane of the sum.
inline __m256i add_products(__m256i sum, __m256i left, __m256i right) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(sum, left, right);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(left, right));
#endif
}

// Returns one of four floats in each lane.
inline __m256 spread_four(const float* four, __m256i lanes) {
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(four)), lanes);
}

// Returns the entries of a table of 16 bytes, as 16-bit integers, that the last four bits of 16-bit integers name.
inline __m256i entries(const int16_t* table, __m256i indices) {
    const __m128i bytes = _mm_packs_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)),
                                          _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 8)));
    // An index of 128 gives 0 below the entry, whose sign a shift then extends.
    const __m256i low = _mm256_slli_epi16(_mm256_and_si256(indices, _mm256_set1_epi16(15)), 8);
    const __m256i found = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), _mm256_or_si256(low, _mm256_set1_epi16(128)));
    return _mm256_srai_epi16(found, 8);
}

// Returns 8 numbers of 8 bits.
inline __m256 bytes_of(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
