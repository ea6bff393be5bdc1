// Weights of 8 or 4 bits in groups, as the kernels of weight_only*.cpp and embedding.cpp read them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "elements.h"
#include "products.h"

// The scales or zero points of the rows of a weight.
struct Factors {
    const void* values;  // or null
    int dtype;           // a Dtype, or one of those below
    int64_t groups;
    static constexpr int kInt8 = 3, kExponent = 4, kFloat8 = 5;

    // Writes those of a row in float32.
    void read(int64_t row, float* to) const {
        switch (dtype) {
            case kFloat32:
                return copy(static_cast<const float*>(values) + row * groups, to);
            case kBFloat16:
                return copy(static_cast<const bfloat16*>(values) + row * groups, to);
            case kFloat16:
                return copy(static_cast<const float16*>(values) + row * groups, to);
            case kExponent:
                for (int64_t i = 0; i < groups; i++)
                    to[i] = half_power(static_cast<const uint8_t*>(values)[row * groups + i]);
                return;
            case kFloat8: {  // and a second scale, which multiplies those of the row
                const uint8_t* from = static_cast<const uint8_t*>(values) + row * (groups + sizeof(float));
                const float half = 0.5f * load<float>(from + groups);
                for (int64_t i = 0; i < groups; i++) to[i] = float8(from[i]) * half;
                return;
            }
            default:
                return copy(static_cast<const int8_t*>(values) + row * groups, to);
        }
    }

    static float float8(uint8_t number) {
        const uint32_t size = number & 127, bits = (size << 20) + (120u << 23);
        if (size == 127) return std::numeric_limits<float>::quiet_NaN();
        const float found = size < 8 ? float(size) * 0x1p-9f : load<float>(&bits);
        return number & 128 ? -found : found;
    }

    // Returns 2 to the power of an exponent of e8m0 - 128: half of its meaning, since kTwice has twice the numbers.
    static float half_power(uint8_t exponent) {
        if (exponent == 255) return std::numeric_limits<float>::quiet_NaN();
        const uint32_t bits = exponent > 1 ? uint32_t(exponent - 1) << 23 : 0x200000u << exponent;
        return load<float>(&bits);
    }

    // Returns those of the rows from `row` on.
    Factors from(int64_t row) const {
        constexpr int kBytes[] = {4, 2, 2, 1, 1, 1};
        const int64_t row_bytes = groups * kBytes[dtype] + (dtype == kFloat8 ? sizeof(float) : 0);
        return {values ? static_cast<const char*>(values) + row * row_bytes : nullptr, dtype, groups};
    }

  private:
    template <class T>
    void copy(const T* from, float* to) const {
        int64_t i = 0;
#ifdef HAL_AVX512
        if constexpr (sizeof(T) == 2)  // which the compiler would convert one by one
            for (; i < groups; i += kLanes) {
                const int64_t left = groups - i;
                const __mmask16 there = left < kLanes ? (1u << left) - 1 : 0xffff;
                T values[kLanes];
                _mm256_storeu_epi16(values, _mm256_maskz_loadu_epi16(there, from + i));
                _mm512_mask_storeu_ps(to + i, there, __m512(wide(values)));
            }
#endif
        for (; i < groups; i++) to[i] = float(from[i]);
    }
};

// What a weight holds, as the bindings say it.
enum Numbers { kBytes, kNibbles, kFloat4 };

inline constexpr int bits_of(int numbers) { return numbers == kBytes ? 8 : 4; }

// Twice the numbers of float4 (e2m1), by their bits.
constexpr int16_t kTwice[32] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                                0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct WeightOnly {
    const uint8_t* weight;
    Factors scales, zeros;
    const void* bias;  // or null
    int wide_bias, numbers;
    int64_t rows, width, out, group;

    int64_t row_bytes() const { return width * bits_of(numbers) / 8; }

    template <class T>
    float bias_of(int64_t column) const {
        if (!bias) return 0.0f;
        return wide_bias ? static_cast<const float*>(bias)[column] : float(static_cast<const T*>(bias)[column]);
    }
};

// Returns an element of a row.
inline float number_of(const uint8_t* row, int64_t i, int kind) {
    if (kind == kBytes) return int8_t(row[i]);
    const int bits = row[i / 2] >> i % 2 * 4 & 15;
    return kind == kFloat4 ? kTwice[bits] : (bits ^ 8) - 8;
}

// Returns kLanes elements of a row from `first` on, which is even.
inline Lanes numbers_of(const uint8_t* row, int64_t first, int kind) {
#ifdef HAL_AVX512
    const auto wide = [](__m128i bytes) { return Lanes(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))); };
    if (kind == kBytes) return wide(load<__m128i>(row + first));
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + first / 2)), nibble = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(packed, nibble), high = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    const __m128i table = kind == kFloat4 ? _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
                                          : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return wide(_mm_shuffle_epi8(table, _mm_unpacklo_epi8(low, high)));
#else
    if (kind == kBytes) {
#ifdef HAL_AVX2
        return Lanes(bytes_of(row + first));
#endif
        using Bytes = int8_t __attribute__((vector_size(kLanes)));
        return __builtin_convertvector(load<Bytes>(row + first), Lanes);
    }
    Ints shifts;
    for (int i = 0; i < kLanes; i++) shifts[i] = 4 * i;
    int32_t packed = 0;
    std::memcpy(&packed, row + first / 2, kLanes / 2);
    const Ints bits = Ints(Words{} + uint32_t(packed)) >> shifts & 15;
    if (kind == kNibbles) return __builtin_convertvector((bits ^ 8) - 8, Lanes);
    float numbers[kLanes];
    for (int i = 0; i < kLanes; i++) numbers[i] = kTwice[bits[i]];
    return load<Lanes>(numbers);
#endif
}

// Writes a row of the weight in T. The scales and zero points are those of its groups.
template <class T>
void widen(const WeightOnly& given, int64_t row, const float* scales, const float* zeros, T* to) {
    const uint8_t* from = given.weight + row * given.row_bytes();
    for (int64_t group = 0, first = 0; first < given.width; group++, first += given.group) {
        const int64_t end = std::min(first + given.group, given.width);
        const float scale = scales[group], zero = zeros ? zeros[group] : 0.0f;
        int64_t i = first;
        for (; i % 2 == 0 && i + kLanes <= end; i += kLanes) {
            const Lanes values = (numbers_of(from, i, given.numbers) - zero) * scale;
            if constexpr (Product<T>::kStep == 2 * kLanes)
                Product<T>::round(values, to + i);
            else
                narrow(values, to + i);
        }
        for (; i < end; i++) to[i] = T((number_of(from, i, given.numbers) - zero) * scale);
    }
}

// Whether a register's lanes belong to at most four groups, each of whole lanes. Columns and tiles take these groups, too.
inline bool spreads(int64_t width, int64_t group, int numbers) {
    return group >= width || group == 32 || group == 64 || group % 128 == 0 || (group == 16 && numbers == kBytes);
}

constexpr int64_t kSerial = 1 << 17;  // elements of a weight, up to which starting threads costs more than it gains
constexpr int64_t kSmallestGroup = 16;
constexpr int64_t kBlockOfX = 128;  // elements of x with one scale
constexpr float kMost = 32512;      // the largest 16-bit integer that is used
constexpr float kLeast = 0x1p-112;  // a block whose elements are no larger is taken as zeros, so that no factor is infinite

// Rounds up to kBlockOfX elements of x to 16-bit integers, filled up with zeros, and returns their scale. Elements that
// are not all finite give zeros and NaN, which makes all results of the row NaN.
template <class T>
inline float round_block(const T* x, int64_t count, int32_t* q) {
    constexpr int kVectors = kBlockOfX / kLanes;
    T filled[kBlockOfX];
    if (count < kBlockOfX) {
        std::fill(std::copy_n(x, count, filled), filled + kBlockOfX, T(0.0f));
        x = filled;
    }
    Lanes values[kVectors];
    Ints most = {};  // sizes are in the order of their bits, and what is not finite comes last
    for (int i = 0; i < kVectors; i++) {
        values[i] = wide(x + i * kLanes);
        const Ints size = Ints(values[i]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int32_t largest = 0;
    for (int lane = 0; lane < kLanes; lane++) largest = std::max(largest, most[lane]);
    const float size = load<float>(&largest), factor = size > kLeast ? kMost / size : 0.0f;
    if (largest >= 0x7f800000) {
        std::fill_n(q, kBlockOfX, 0);
        return std::numeric_limits<float>::quiet_NaN();
    }
    for (int i = 0; i < kVectors; i++) {
        const Lanes scaled = values[i] * factor;
        for (int lane = 0; lane < kLanes; lane++) q[i * kLanes + lane] = int32_t(std::nearbyint(scaled[lane]));
    }
    return size / kMost;
}

// Adds those of a block, from element `first` of x on, to the sums of its groups, `apart` floats from one another.
inline void add_to_groups(const int32_t* q, int64_t first, int64_t count, float scale, int64_t group, float* sums,
                          int64_t apart) {
    for (int64_t i = 0; i < count; i += kSmallestGroup) {
        int32_t sum = 0;
        for (int64_t j = 0; j < kSmallestGroup; j++) sum += q[i + j];
        sums[(first + i) / group * apart] += scale * float(sum);
    }
}

// Multiplies with AMX and returns true, or returns false where the processor or the system does not have it.
template <class T>
bool multiply_tiles(const WeightOnly& given, const T* x, int64_t stride, T* y);

#ifdef __AVX512VNNI__
// Multiplies more than a few rows of x.
template <class T>
void multiply_columns(const WeightOnly& given, const T* x, int64_t stride, T* y);
#endif
