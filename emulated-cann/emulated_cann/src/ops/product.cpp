#include "product.h"

#include <ATen/Parallel.h>

#include <atomic>

#include "numeric.h"

#ifdef __x86_64__
#include <immintrin.h>
#define ON_AVX2 [[gnu::target_clones("avx2", "default")]]
#else
#define ON_AVX2
#endif

#pragma GCC push_options
#pragma GCC optimize("O3")

namespace emulator {

namespace {

constexpr int64_t kFewRows = 16;        // of more, ATen's product in float32 is faster
constexpr int64_t kChunk = 1 << 17;     // elements of the matrix that a thread takes at a time
constexpr int64_t kAlone = kChunk * 3;  // of a smaller matrix, one thread is faster

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));

// The sums of four sets of lanes do not depend on the instruction set, since contraction is off.
ON_AVX2 void dot_rows(const float* column, const float* rows, int64_t count, int64_t inner, float* out, int64_t step) {
    for (int64_t row = 0; row < count; ++row, rows += inner) {
        Lanes sums[4] = {};
        int64_t i = 0;
        for (; i + 32 <= inner; i += 32) {
            // Named, because `auto` would drop the alignment.
            const Lanes *a = reinterpret_cast<const Lanes*>(column + i), *b = reinterpret_cast<const Lanes*>(rows + i);
            sums[0] += a[0] * b[0];
            sums[1] += a[1] * b[1];
            sums[2] += a[2] * b[2];
            sums[3] += a[3] * b[3];
        }
        Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        float sum = ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
        for (; i < inner; ++i) sum += column[i] * rows[i];
        out[row * step] = sum;
    }
}

ON_AVX2 void widen_all(const at::BFloat16* from, float* to, int64_t count) {
    auto* bits = reinterpret_cast<const uint16_t*>(from);
    auto* wide = reinterpret_cast<uint32_t*>(to);
    for (int64_t i = 0; i < count; ++i) wide[i] = uint32_t{bits[i]} << 16;
}

#ifdef __x86_64__
[[gnu::target("avx2,f16c")]] int64_t widen_eights(const at::Half* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    return i;
}
const bool converts = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif

void widen_all(const at::Half* from, float* to, int64_t count) {
    int64_t i = 0;
#ifdef __x86_64__
    if (converts) i = widen_eights(from, to, count);
#endif
    for (; i < count; ++i) to[i] = from[i];
}

// Work that threads take in parts. A thread of ATen's pool that comes late finds nothing left, and nobody waits for it.
struct Shared {
    std::function<void(int64_t)> part;
    int64_t parts;
    std::atomic<int64_t> next{0}, done{0};
    void help() {
        for (int64_t i; (i = next++) < parts;) {
            part(i);
            ++done;
            done.notify_one();
        }
    }
};

void run_parts(int64_t parts, bool alone, std::function<void(int64_t)> part) {
    auto shared = std::make_shared<Shared>(std::move(part), parts);
    if (!alone)
        for (int i = 1; i < at::get_num_interop_threads() && i < parts; ++i) at::launch([shared] { shared->help(); });
    shared->help();
    for (int64_t done; (done = shared->done) < parts;) shared->done.wait(done);
}

template <class T>
void multiply(const at::Tensor& rows, const at::Tensor& matrix, const at::Tensor& out) {
    int64_t inner = matrix.size(0), columns = matrix.size(1), stride = matrix.stride(1), count = rows.size(0);
    auto* weights = static_cast<const T*>(matrix.const_data_ptr());
    auto* given = rows.const_data_ptr<float>();
    auto* results = out.mutable_data_ptr<float>();
    int64_t share = std::max<int64_t>(kChunk / inner, 1);
    run_parts((columns + share - 1) / share, inner * columns < kAlone, [=](int64_t part) {
        thread_local std::vector<float> column;
        column.resize(inner);
        for (int64_t i = part * share, end = std::min(columns, i + share); i < end; ++i) {
            widen_all(weights + i * stride, column.data(), inner);
            dot_rows(column.data(), given, count, inner, results + i, columns);
        }
    });
}

}  // namespace

at::Tensor wide_product(const at::Tensor& left, const at::Tensor& right) {
    auto dtype = right.scalar_type();
    bool fits = left.scalar_type() == dtype && at::isReducedFloatingType(dtype) && left.dim() > 0 && right.dim() == 2 &&
                right.stride(0) == 1 && right.numel() > 0 && left.size(-1) == right.size(0) &&
                left.numel() <= kFewRows * right.size(0) && left.numel() > 0;
    if (!fits) return at::matmul(widen(left), widen(right));
    auto shape = left.sizes().vec();
    shape.back() = right.size(1);
    auto rows = widen(left).reshape({-1, right.size(0)}).contiguous();
    auto out = at::empty({rows.size(0), right.size(1)}, rows.options());
    dtype == at::kHalf ? multiply<at::Half>(rows, right, out) : multiply<at::BFloat16>(rows, right, out);
    return out.view(shape);
}

}  // namespace emulator

#pragma GCC pop_options
