// What AVX-512 brings to vector.h.
#pragma once

#include <immintrin.h>

#include "elements.h"

constexpr int kLanes = 16, kRegisters = 32;
#define HAL_CONVERTS_HALVES

inline __m512 widened(const float16* from) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline void narrowed(__m512 values, float16* to) {
    const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
