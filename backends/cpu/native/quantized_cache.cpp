// Writes to a paged cache in 8 bits, with a scale for each token and head.
#include <cmath>
#include <cstdint>

#include "elements.h"
#include "replay.h"

namespace {

// Rounds to float8 (e4m3), to nearest even. Sizes beyond 448 become 448.
inline uint8_t float8_of(float value) {
    const float size = std::fabs(value);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint8_t sign = bits >> 24 & 0x80;
    if (!(size <= 448)) return sign | (size > 448 ? 0x7e : 0x7f);
    if (size < 0x1p-6f) return sign | uint8_t(std::nearbyint(size * 0x1p9f));
    bits &= 0x7fffffff;
    return sign | uint8_t((bits + 0x7ffff + (bits >> 20 & 1) >> 20) - (120 << 3));
}

inline uint8_t int8_of(float value) {
    const float rounded = std::nearbyint(value);
    return uint8_t(int8_t(rounded < -128 ? -128.0f : rounded <= 127 ? rounded : 127.0f));  // a NaN becomes 127
}

// Quantizes a head, and returns its scale: the one given, or else that of its largest element.
template <class T>
float quantize(const T* from, int64_t dim, int float8, const float* given, uint8_t* to) {
    float largest = 0;
    for (int64_t i = 0; !given && i < dim; i++) {
        const float size = std::fabs(float(from[i]));
        largest = size <= largest || largest != largest ? largest : size;  // keeps a NaN
    }
    const float scale = given ? *given : largest / (float8 ? 448 : 127), divisor = scale == 0 ? 1.0f : scale;
    if (float8)
        for (int64_t i = 0; i < dim; i++) to[i] = float8_of(float(from[i]) / divisor);
    else
        for (int64_t i = 0; i < dim; i++) to[i] = int8_of(float(from[i]) / divisor);
    return scale;
}

// Keys or values, and their part of the cache.
template <class T>
struct Half {
    const T* from;
    int64_t stride, head_stride;
    const float* given;  // a scale for each head, or null
    uint8_t* numbers;
    float* scales;

    void store(int64_t token, int64_t slot, int64_t heads, int64_t dim, int float8) const {
        for (int64_t head = 0; head < heads; head++)
            scales[slot * heads + head] =
                quantize(from + token * stride + head * head_stride, dim, float8, given ? given + head : nullptr,
                         numbers + (slot * heads + head) * dim);
    }
};

}  // namespace

// Returns 0, or 1 + the index of a token whose slot is outside the cache. Strides are in elements.
extern "C" int64_t store_quantized_kv_cache(const void* key, const void* value, const float* key_scale,
                                            const float* value_scale, void* keys, void* values, float* key_scales,
                                            float* value_scales, const int32_t* slots, int dtype, int float8,
                                            int64_t tokens, int64_t num_slots, int64_t heads, int64_t dim,
                                            int64_t key_stride, int64_t key_head_stride, int64_t value_stride,
                                            int64_t value_head_stride) {
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] < 0 || slots[token] >= num_slots) return token + 1;
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const Half<T> first{static_cast<const T*>(key), key_stride,           key_head_stride,
                            key_scale,                  static_cast<uint8_t*>(keys), key_scales};
        const Half<T> second{static_cast<const T*>(value), value_stride,                 value_head_stride,
                             value_scale,                  static_cast<uint8_t*>(values), value_scales};
#pragma omp parallel for if (tokens * heads * dim > 1 << 15)
        for (int64_t token = 0; token < tokens; token++) {
            first.store(token, slots[token], heads, dim, float8);
            second.store(token, slots[token], heads, dim, float8);
        }
    });
    return 0;
}

REPLAYABLE(store_quantized_kv_cache)
