// The element types of tensors. They are read as float32 and rounded to nearest even when written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

struct bfloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    bfloat16() = default;
    bfloat16(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, 4);
        uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
        bits = (wide & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;  // a NaN must not round to infinity
    }
};
#ifdef __aarch64__
using float16 = __fp16;  // GCC before 13 has no _Float16 in C++ there
#else
using float16 = _Float16;
#endif

// e**x to 2 units in the last place, 0 below e**-87 and infinity above e**88. Compilers vectorise this form, unlike the
// library's. The polynomial is that of Cephes' expf.
inline float exponential(float argument) {
    float x = argument > 88.0f ? 88.0f : argument;
    x = x < -87.0f ? -87.0f : x;
    float power = std::floor(x * 1.44269504f + 0.5f);
    float rest = std::fma(power, -0.693359375f, x);  // two steps that a compiler must not merge
    rest = std::fma(power, 2.12194440e-4f, rest);
    float y = 1.9875691500e-4f;
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    int32_t bits = (int32_t(power) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    y = argument > 88.0f ? std::numeric_limits<float>::infinity() : y * scale;
    return argument < -87.0f ? 0.0f : y;
}

// tanh, to 4 units in the last place. Compilers vectorise this form, too. The polynomial is that of Cephes' tanhf.
inline float hyperbolic_tangent(float x) {
    const float size = std::fabs(x), square = x * x;
    float y = -5.70498872745e-3f;
    y = y * square + 2.06390887954e-2f;
    y = y * square - 5.37397155531e-2f;
    y = y * square + 1.33314422036e-1f;
    y = y * square - 3.33332819422e-1f;
    const float near = y * square * x + x, far = std::copysign(1.0f - 2.0f / (exponential(2.0f * size) + 1.0f), x);
    return size < 0.625f ? near : far;
}

// A vector whose first element starts a cache line. What crosses lines is loaded in two parts.
template <class T>
struct OnLines {
    using value_type = T;
    OnLines() = default;
    template <class U>
    OnLines(const OnLines<U>&) {}
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
    void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t{64}); }
    bool operator==(const OnLines&) const { return true; }
    bool operator!=(const OnLines&) const { return false; }
};
template <class T>
using Buffer = std::vector<T, OnLines<T>>;

constexpr int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The bindings' codes of dtypes.
enum Dtype : int { kFloat32, kBFloat16, kFloat16 };

// Runs `body(T{})` for the element type T of `dtype`.
template <class Body>
void with_type(int dtype, Body body) {
    switch (dtype) {
        case kFloat32:
            return body(float{});
        case kBFloat16:
            return body(bfloat16{});
        case kFloat16:
            return body(float16{});
    }
}
