// Penalties and masks of logits, each in one pass over its rows. Every sum and product is rounded, as the references do:
// so a row has the same bits in any batch and on any device.
#if defined(__clang__)
#pragma clang fp reassociate(off) contract(off)
#else
#pragma GCC optimize("no-associative-math", "fp-contract=off")
#endif
#include <algorithm>
#include <cstring>

#include "elements.h"
#include "products.h"
#include "replay.h"

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements; for fewer, starting threads costs more than it gains

template <class T>
void widen(const T* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Lanes values = wide(from + i);
        std::memcpy(to + i, &values, sizeof(values));
    }
    for (; i < count; i++) to[i] = from[i];
}

// Changes the logits y in place.
void penalize_row(float* __restrict y, const int32_t* counts, const uint8_t* prompted, int64_t width, float repetition,
                  float frequency, float presence) {
    for (int64_t i = 0; i < width; i++) {
        const float value = y[i], divided = value / repetition, multiplied = value * repetition;
        const float repeated = value > 0 ? divided : multiplied;
        const float seen = (counts[i] > 0) | (prompted[i] != 0) ? repeated : value;
        const float counted = seen - frequency * float(counts[i]);
        y[i] = counted - presence * (counts[i] > 0 ? 1.0f : 0.0f);
    }
}

// Copies the bits of elements, or those of negative infinity.
template <class Bits>
void mask_row(const Bits* x, const uint32_t* allowed, Bits* __restrict y, int64_t width, Bits infinity) {
    for (int64_t start = 0; start < width; start += 32) {
        const uint32_t word = allowed[start / 32];
        const int64_t count = std::min<int64_t>(32, width - start);
        if (word == 0) {
            std::fill_n(y + start, count, infinity);
        } else if (word == UINT32_MAX) {
            std::memcpy(y + start, x + start, count * sizeof(Bits));
        } else {
            for (int64_t i = 0; i < count; i++) y[start + i] = word >> i & 1 ? x[start + i] : infinity;
        }
    }
}

template <class Bits>
void mask_rows(const void* x, const int32_t* allowed, void* y, int64_t count, int64_t width, int64_t stride,
               Bits infinity) {
    const int64_t words = (width + 31) / 32;
#pragma omp parallel for if (count * width > kGrain)
    for (int64_t row = 0; row < count; row++)
        mask_row(static_cast<const Bits*>(x) + row * stride, reinterpret_cast<const uint32_t*>(allowed) + row * words,
                 static_cast<Bits*>(y) + row * width, width, infinity);
}

}  // namespace

// Rows of `logits` are `stride` elements apart; all else is contiguous.
extern "C" void penalize(const void* logits, const int32_t* counts, const uint8_t* prompted, const float* repetition,
                         const float* frequency, const float* presence, float* y, int dtype, int64_t count,
                         int64_t width, int64_t stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++) {
            widen(static_cast<const T*>(logits) + row * stride, y + row * width, width);
            penalize_row(y + row * width, counts + row * width, prompted + row * width, width, repetition[row],
                         frequency[row], presence[row]);
        }
    });
}

extern "C" void mask_logits(const void* logits, const int32_t* allowed, void* y, int dtype, int64_t count,
                            int64_t width, int64_t stride) {
    switch (dtype) {
        case kFloat32:
            return mask_rows<uint32_t>(logits, allowed, y, count, width, stride, 0xff800000);
        case kBFloat16:
            return mask_rows<uint16_t>(logits, allowed, y, count, width, stride, 0xff80);
        case kFloat16:
            return mask_rows<uint16_t>(logits, allowed, y, count, width, stride, 0xfc00);
    }
}

REPLAYABLE(penalize)
REPLAYABLE(mask_logits)
