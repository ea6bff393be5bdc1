// Norms, rotary embedding and activation, each in one pass over its rows.
#include <cmath>

#include "elements.h"

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements; for fewer, starting threads costs more than it gains

// Rows of `width` elements with unit stride; row (i, j) begins at i * outer + j * inner.
struct Rows {
    int64_t count, heads, width, outer, inner;
    int64_t operator()(int64_t row) const { return row / heads * outer + row % heads * inner; }
};

template <class T>
void normalise(const T* x, const T* weight, T* __restrict y, int64_t width, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < width; i++) sum += float(x[i]) * float(x[i]);
    float scale = 1.0f / std::sqrt(sum / float(width) + eps);
    for (int64_t i = 0; i < width; i++) y[i] = T(float(x[i]) * scale * float(weight[i]));
}

template <class T>
void rotate(const T* x, const T* cos, const T* sin, T* __restrict y, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        y[i] = T(first * float(cos[i]) - second * float(sin[i]));
        y[half + i] = T(second * float(cos[half + i]) + first * float(sin[half + i]));
    }
}

template <class T>
void rotate_rows(const T* x, const T* cos, const T* sin, T* y, Rows rows) {
#pragma omp parallel for if (rows.count * rows.width > kGrain)
    for (int64_t row = 0; row < rows.count; row++) {
        int64_t angle = row / rows.heads * rows.width;
        rotate(x + rows(row), cos + angle, sin + angle, y + row * rows.width, rows.width);
    }
}

}  // namespace

extern "C" void rms_norm(const void* x, const void* weight, void* y, int dtype, int64_t count, int64_t heads,
                         int64_t width, int64_t outer, int64_t inner, float eps) {
    Rows rows{count, heads, width, outer, inner};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++)
            normalise(static_cast<const T*>(x) + rows(row), static_cast<const T*>(weight),
                      static_cast<T*>(y) + row * width, width, eps);
    });
}

// The sum is rounded before the norm reads it. All contiguous.
extern "C" void add_rms_norm(const void* x, const void* residual, const void* weight, void* y, void* sum, int dtype,
                             int64_t count, int64_t width, float eps) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++) {
            const T *left = static_cast<const T*>(x) + row * width,
                    *right = static_cast<const T*>(residual) + row * width;
            T* hidden = static_cast<T*>(sum) + row * width;
            for (int64_t i = 0; i < width; i++) hidden[i] = T(float(left[i]) + float(right[i]));
            normalise(hidden, static_cast<const T*>(weight), static_cast<T*>(y) + row * width, width, eps);
        }
    });
}

extern "C" void rotary_embedding(const void* query, const void* key, const void* cos, const void* sin, void* new_query,
                                 void* new_key, int dtype, int64_t tokens, int64_t heads, int64_t kv_heads,
                                 int64_t head_dim, int64_t query_outer, int64_t query_inner, int64_t key_outer,
                                 int64_t key_inner) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const T *c = static_cast<const T*>(cos), *s = static_cast<const T*>(sin);
        rotate_rows(static_cast<const T*>(query), c, s, static_cast<T*>(new_query),
                    Rows{tokens * heads, heads, head_dim, query_outer, query_inner});
        rotate_rows(static_cast<const T*>(key), c, s, static_cast<T*>(new_key),
                    Rows{tokens * kv_heads, kv_heads, head_dim, key_outer, key_inner});
    });
}

extern "C" void silu_and_mul(const void* x, void* y, int dtype, int64_t count, int64_t width) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for if (count * width > kGrain)
        for (int64_t row = 0; row < count; row++) {
            const T *gate = static_cast<const T*>(x) + row * 2 * width, *up = gate + width;
            T* __restrict result = static_cast<T*>(y) + row * width;
            for (int64_t i = 0; i < width; i++) {
                float g = gate[i];
                result[i] = T(g / (1.0f + exponential(-g)) * float(up[i]));
            }
        }
    });
}
