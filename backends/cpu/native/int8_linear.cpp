// Quantization of rows to int8, and projections of few such rows, which read a weight of int8 once. Sums are exact.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "claims.h"
#include "elements.h"
#include "products.h"
#include "replay.h"

namespace {

constexpr int64_t kSerialNumbers = 1 << 17;  // of a weight, up to which starting threads costs more than it gains
constexpr int64_t kUnit = 16;                // rows of the weight at a time
constexpr int kMostRows = 8;                 // of x at a time
constexpr int64_t kAheadBytes = 4096;        // of the weight to prefetch ahead

using Sums = int32_t __attribute__((vector_size(64)));

// Rounds x / divisor + offset to int8.
template <class T>
void round_row(const T* x, int64_t width, float divisor, float offset, int8_t* to) {
    for (int64_t i = 0; i < width; i++) {
        const float value = std::nearbyint(float(x[i]) / divisor + offset);
        to[i] = int8_t(int32_t(std::min(std::max(value, -128.0f), 127.0f)));
    }
}

// Quantizes a row with a scale of its own, which it returns.
template <class T>
float quantize_row(const T* x, int64_t width, int8_t* to) {
    uint32_t largest = 0;  // sizes are in the order of their bits, and what is not finite comes last
    for (int64_t i = 0; i < width; i++) {
        const float value = x[i];
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        largest = std::max(largest, bits & 0x7fffffffu);
    }
    const float scale = load<float>(&largest) / 127.0f;
    if (largest >= 0x7f800000u)
        std::fill_n(to, width, int8_t(0));
    else
        round_row(x, width, scale == 0 ? 1.0f : scale, 0.0f, to);
    return scale;
}

struct Int8Product {
    const int8_t *x, *weight;
    const float* x_scales;  // of rows, or null
    const float* scales;    // of columns
    const int32_t* add;     // of columns, to the sums, or null
    const void* bias;       // of columns, or null
    int wide_bias;
    int64_t rows, width, out;
};

#ifdef __AVX512VNNI__
// Writes the sums of each lane of a row of the weight times R rows of x to held[r * kUnit]. The weight is taken as
// w + 128.
template <int R>
void multiply(const int8_t* weight, const int8_t* x, int64_t width, Sums* held) {
    const __m512i shift = _mm512_set1_epi8(int8_t(0x80));
    __m512i sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 64 <= width; i += 64) {
        __builtin_prefetch(weight + i + kAheadBytes);
        const __m512i numbers = _mm512_xor_si512(load<__m512i>(weight + i), shift);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = _mm512_dpbusd_epi32(sums[r], numbers, load<__m512i>(x + r * width + i));
    }
    if (i < width) {
        const __mmask64 there = (__mmask64(1) << (width - i)) - 1;
        const __m512i numbers = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, weight + i), shift);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            sums[r] = _mm512_dpbusd_epi32(sums[r], numbers, _mm512_maskz_loadu_epi8(there, x + r * width + i));
    }
    for (int r = 0; r < R; r++) held[r * kUnit] = Sums(sums[r]);
}
constexpr int32_t kShift = 128;
#elif defined(HAL_INTEGERS)
template <int R>
void multiply(const int8_t* weight, const int8_t* x, int64_t width, Sums* held) {
    constexpr int64_t kStep = 2 * kLanes;
    using Bytes = int8_t __attribute__((vector_size(kStep)));
    Ints sums[R] = {};
    int64_t i = 0;
    for (; i + kStep <= width; i += kStep) {
        if (i % 64 == 0) __builtin_prefetch(weight + i + kAheadBytes);
        const Shorts numbers = __builtin_convertvector(load<Bytes>(weight + i), Shorts);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            sums[r] = dot(sums[r], numbers, __builtin_convertvector(load<Bytes>(x + r * width + i), Shorts));
    }
    for (int r = 0; r < R; r++) {
        for (int64_t at = i; at < width; at++) sums[r][0] += int32_t(weight[at]) * x[r * width + at];
        std::memcpy(&held[r * kUnit], &sums[r], sizeof(Ints));
    }
}
constexpr int32_t kShift = 0;
#else
template <int R>
void multiply(const int8_t* weight, const int8_t* x, int64_t width, Sums* held) {
    for (int r = 0; r < R; r++) {
        int32_t sum = 0;
        for (int64_t i = 0; i < width; i++) sum += int32_t(weight[i]) * x[r * width + i];
        held[r * kUnit] = Sums{sum};
    }
}
constexpr int32_t kShift = 0;
#endif

template <int R = kMostRows>
void multiply_rows(int64_t rows, const int8_t* weight, const int8_t* x, int64_t width, Sums* held) {
    if constexpr (R > 1)
        if (rows < R) return multiply_rows<R - 1>(rows, weight, x, width, held);
    multiply<R>(weight, x, width, held);
}

// Keeps the compiler from merging what is computed before with what is computed after, which would round otherwise.
inline void in_order(float* values) { asm volatile("" : : "r"(values) : "memory"); }

template <class T>
void run(const Int8Product& given, T* y) {
    // What the shift of the weight adds to the sums of each row.
    std::vector<int32_t> shifts(given.rows);
    for (int64_t row = 0; kShift && row < given.rows; row++) {
        int32_t sum = 0;
        for (int64_t i = 0; i < given.width; i++) sum += given.x[row * given.width + i];
        shifts[row] = kShift * sum;
    }
    const bool parallel = given.out * given.width > kSerialNumbers;
    Claims claims((given.out + kUnit - 1) / kUnit, parallel ? omp_get_max_threads() : 1);
#pragma omp parallel if (parallel)
    claims.run([&](int64_t unit, int64_t) {
        const int64_t begin = unit * kUnit, taken = std::min(kUnit, given.out - begin);
        for (int64_t first = 0; first < given.rows; first += kMostRows) {
            const int64_t count = std::min<int64_t>(kMostRows, given.rows - first);
            Sums held[kMostRows * kUnit] = {};
            for (int64_t i = 0; i < taken; i++)
                multiply_rows(count, given.weight + (begin + i) * given.width, given.x + first * given.width, given.width,
                              held + i);
            for (int64_t r = 0; r < count; r++) {
                const Sums sums = sums_of(held + r * kUnit);
                float values[kUnit];
                for (int64_t i = 0; i < taken; i++) {
                    const int32_t sum = sums[i] - shifts[first + r] + (given.add ? given.add[begin + i] : 0);
                    values[i] = float(sum) * given.scales[begin + i];
                }
                in_order(values);
                if (given.x_scales)
                    for (int64_t i = 0; i < taken; i++) values[i] *= given.x_scales[first + r];
                in_order(values);
                for (int64_t i = 0; i < taken && given.bias; i++)
                    values[i] += given.wide_bias ? static_cast<const float*>(given.bias)[begin + i]
                                                 : float(static_cast<const T*>(given.bias)[begin + i]);
                for (int64_t i = 0; i < taken; i++) y[(first + r) * given.out + begin + i] = T(values[i]);
            }
        }
    });
}

}  // namespace

// Rounds x / scale + offset to int8; the offset may be null.
extern "C" void quantize(const void* x, const float* scale, const int32_t* offset, int8_t* y, int dtype, int64_t rows,
                         int64_t width) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const T* from = static_cast<const T*>(x);
#pragma omp parallel for if (rows * width > kSerialNumbers)
        for (int64_t row = 0; row < rows; row++)
            round_row(from + row * width, width, *scale, offset ? float(*offset) : 0.0f, y + row * width);
    });
}

// Quantizes each row with a scale of its own.
extern "C" void dynamic_quantize(const void* x, int8_t* y, float* scales, int dtype, int64_t rows, int64_t width) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const T* from = static_cast<const T*>(x);
#pragma omp parallel for if (rows * width > kSerialNumbers)
        for (int64_t row = 0; row < rows; row++)
            scales[row] = quantize_row(from + row * width, width, y + row * width);
    });
}

// Multiplies rows of int8 with a weight of int8: (sums + add) * scales * x_scales + bias, in this order. All contiguous;
// `add`, the scales of x and the bias may be null.
extern "C" void int8_linear(const int8_t* x, const float* x_scales, const int8_t* weight, const float* scales,
                            const int32_t* add, const void* bias, void* y, int dtype, int wide_bias, int64_t rows,
                            int64_t width, int64_t out) {
    const Int8Product given{x, weight, x_scales, scales, add, bias, wide_bias, rows, width, out};
    with_type(dtype, [&](auto type) { run(given, static_cast<decltype(type)*>(y)); });
}

REPLAYABLE(dynamic_quantize)
REPLAYABLE(int8_linear)
REPLAYABLE(quantize)
