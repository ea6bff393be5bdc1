// What SSE4 and NEON bring to vector.h: registers of 128 bits. The rest of SSE before that is the compiler's.
#pragma once

#include "elements.h"

#if defined(__aarch64__)
#include <arm_neon.h>
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
constexpr int kLanes = 4;

#if defined(__aarch64__) || defined(__SSE4_1__)
#define HAL_INTEGERS
using Register = int32_t __attribute__((vector_size(16)));

// Adds the products of 16-bit integers, two to a lane of the sum.
inline Register add_products(Register sum, Register left, Register right) {
#if defined(__aarch64__)
    const int16x8_t a = vreinterpretq_s16_s32(int32x4_t(left)), b = vreinterpretq_s16_s32(int32x4_t(right));
    const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b)), high = vmull_high_s16(a, b);
    return sum + Register(vpaddq_s32(low, high));
#else
    using Halves = int16_t __attribute__((vector_size(16)));
    return sum + Register(__builtin_ia32_pmaddwd128(Halves(left), Halves(right)));
#endif
}

// Returns one of four floats in each lane.
inline Register spread_four(const float* four, Register lanes) {
    Register held;
    __builtin_memcpy(&held, four, sizeof(held));
    return __builtin_shuffle(held, lanes);
}

// Returns the entries of a table of 16 bytes, as 16-bit integers, that the last four bits of 16-bit integers name.
inline Register entries(const int16_t* table, Register indices) {
    using Bytes = uint8_t __attribute__((vector_size(16)));
    using Halves = int16_t __attribute__((vector_size(16)));
    Bytes bytes;
    for (int i = 0; i < 16; i++) bytes[i] = uint8_t(table[i]);
    const Bytes found = __builtin_shuffle(bytes, Bytes(Halves(indices) & 15));
    return Register(Halves(found) << 8 >> 8);
}
#endif
