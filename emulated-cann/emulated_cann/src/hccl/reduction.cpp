#include "hccl/reduction.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#pragma GCC optimize("O3")

namespace emulator {

namespace {

constexpr size_t block = 1024;  // elements that are converted at a time

// Integers are added and multiplied as unsigned ones, because signed overflow is undefined in C++.
template <class T>
T combined(T a, T b, HcclReduceOp reduction) {
    if (reduction == HCCL_REDUCE_MAX) return std::max(a, b);
    if (reduction == HCCL_REDUCE_MIN) return std::min(a, b);
    if constexpr (std::is_integral_v<T>) {
        auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
        return static_cast<T>(reduction == HCCL_REDUCE_SUM ? x + y : x * y);
    } else {
        return reduction == HCCL_REDUCE_SUM ? a + b : a * b;
    }
}

template <class T>
void combine(T* sum, const T* next, size_t count, HcclReduceOp reduction) {
    auto loop = [&](auto known) {
        for (size_t i = 0; i < count; ++i) sum[i] = combined(sum[i], next[i], decltype(known)::value);
    };
    switch (reduction) {
        case HCCL_REDUCE_SUM: return loop(std::integral_constant<HcclReduceOp, HCCL_REDUCE_SUM>());
        case HCCL_REDUCE_PROD: return loop(std::integral_constant<HcclReduceOp, HCCL_REDUCE_PROD>());
        case HCCL_REDUCE_MAX: return loop(std::integral_constant<HcclReduceOp, HCCL_REDUCE_MAX>());
        default: return loop(std::integral_constant<HcclReduceOp, HCCL_REDUCE_MIN>());
    }
}

struct Half {
#ifdef __aarch64__
    using Stored = __fp16;  // GCC before 13 has no _Float16 in C++ there
#else
    using Stored = _Float16;
#endif
    static void plain_widen(float* out, const Stored* in, size_t count) {
        for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
    }
    static void plain_narrow(Stored* out, const float* in, size_t count) {
        for (size_t i = 0; i < count; ++i) out[i] = static_cast<Stored>(in[i]);
    }
#ifdef __x86_64__
    // Without the processor's instructions, each conversion is a function call.
    [[gnu::target("avx,f16c")]] static void fast_widen(float* out, const Stored* in, size_t count) {
        size_t i = 0;
        for (; i + 8 <= count; i += 8) {
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
        }
        plain_widen(out + i, in + i, count - i);
    }
    [[gnu::target("avx,f16c")]] static void fast_narrow(Stored* out, const float* in, size_t count) {
        size_t i = 0;
        for (; i + 8 <= count; i += 8) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
        }
        plain_narrow(out + i, in + i, count - i);
    }
    static bool is_fast() {
        static const bool known = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
        return known;
    }
    static void widen(float* out, const Stored* in, size_t count) {
        is_fast() ? fast_widen(out, in, count) : plain_widen(out, in, count);
    }
    static void narrow(Stored* out, const float* in, size_t count) {
        is_fast() ? fast_narrow(out, in, count) : plain_narrow(out, in, count);
    }
#else
    static void widen(float* out, const Stored* in, size_t count) { plain_widen(out, in, count); }
    static void narrow(Stored* out, const float* in, size_t count) { plain_narrow(out, in, count); }
#endif
};

struct BFloat16 {
    using Stored = uint16_t;
    static void widen(float* out, const Stored* in, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            uint32_t bits = uint32_t{in[i]} << 16;
            std::memcpy(out + i, &bits, sizeof(bits));
        }
    }
    static void narrow(Stored* out, const float* in, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            uint32_t bits;
            std::memcpy(&bits, in + i, sizeof(bits));
            uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
            bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
            out[i] = static_cast<uint16_t>(is_nan ? 0x7FC0 : rounded);
        }
    }
};

template <class Format>
void reduce_wide(void* out, const std::vector<const char*>& from, size_t count, HcclReduceOp reduction) {
    using Stored = typename Format::Stored;
    float sum[block], next[block];
    for (size_t begin = 0; begin < count; begin += block) {
        size_t size = std::min(block, count - begin);
        for (size_t each = 0; each < from.size(); ++each) {
            Format::widen(each ? next : sum, reinterpret_cast<const Stored*>(from[each]) + begin, size);
            if (each) combine(sum, next, size, reduction);
        }
        Format::narrow(static_cast<Stored*>(out) + begin, sum, size);
    }
}

template <class T>
void reduce_as(void* out, const std::vector<const char*>& from, size_t count, HcclReduceOp reduction) {
    T sum[block];
    for (size_t begin = 0; begin < count; begin += block) {
        size_t size = std::min(block, count - begin);
        std::memcpy(sum, reinterpret_cast<const T*>(from[0]) + begin, size * sizeof(T));
        for (size_t each = 1; each < from.size(); ++each) {
            combine(sum, reinterpret_cast<const T*>(from[each]) + begin, size, reduction);
        }
        std::memcpy(static_cast<T*>(out) + begin, sum, size * sizeof(T));
    }
}

}  // namespace

void reduce(void* out, const std::vector<const char*>& from, size_t count, uint32_t dtype, HcclReduceOp reduction) {
    switch (dtype) {
        case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t>(out, from, count, reduction);
        case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t>(out, from, count, reduction);
        case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t>(out, from, count, reduction);
        case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t>(out, from, count, reduction);
        case HCCL_DATA_TYPE_UINT64: return reduce_as<uint64_t>(out, from, count, reduction);
        case HCCL_DATA_TYPE_FP32: return reduce_as<float>(out, from, count, reduction);
        case HCCL_DATA_TYPE_FP64: return reduce_as<double>(out, from, count, reduction);
        case HCCL_DATA_TYPE_FP16: return reduce_wide<Half>(out, from, count, reduction);
        default: return reduce_wide<BFloat16>(out, from, count, reduction);
    }
}

}  // namespace emulator
