// Products of few rows with a weight in its plain layout, [out, width], which is read in place and once.
#include <omp.h>

#include <algorithm>

#include "claims.h"
#include "elements.h"
#include "products.h"
#include "replay.h"

namespace {

template <class T>
void multiply(const T* x, const T* weight, const T* bias, T* y, int64_t rows, int64_t width, int64_t out,
              int64_t x_stride) {
    for (int64_t row = 0; row < rows; row += kOthers) {
        const int64_t taken = std::min(kOthers, rows - row);
        const T* others[kOthers];
        for (int64_t i = 0; i < taken; i++) others[i] = x + (row + i) * x_stride;
        const bool parallel = out * width > 1 << 16;
        Claims claims((out + kBlock - 1) / kBlock, parallel ? omp_get_max_threads() : 1);
#pragma omp parallel if (parallel)
        {
            Multiplication<T> multiplication;
            multiplication.pack_others(others, taken, width);
            float sums[kOthers * kBlock];
            claims.run([&](int64_t block, int64_t following) {
                const int64_t first = block * kBlock, count = std::min(kBlock, out - first);
                multiplication.run(weight + first * width, count, sums, weight + following * kBlock * width);
                for (int64_t i = 0; i < taken; i++)
                    for (int64_t c = 0; c < count; c++) {
                        const float sum = sums[i * kBlock + c];
                        y[(row + i) * out + first + c] = T(bias ? sum + float(bias[first + c]) : sum);
                    }
            });
        }
    }
}

}  // namespace

// Multiplies rows of x, whose elements have unit stride, with a weight. The bias may be null.
extern "C" void plain_linear(const void* x, const void* weight, const void* bias, void* y, int dtype, int64_t rows,
                             int64_t width, int64_t out, int64_t x_stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        multiply(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias),
                 static_cast<T*>(y), rows, width, out, x_stride);
    });
}

REPLAYABLE(plain_linear)
