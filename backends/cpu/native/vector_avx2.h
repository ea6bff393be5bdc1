// What AVX2, with FMA and F16C, brings to vector.h.
#pragma once

#include <immintrin.h>

#include "elements.h"

constexpr int kLanes = 8, kRegisters = 16;
#define HAL_CONVERTS_HALVES

inline __m256 widened(const float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline void narrowed(__m256 values, float16* to) {
    const __m128i halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}
