// Products of few rows with a weight in oneDNN's packed layout, which is read in place and once.
//
// The layout is [out / block][in / 2][block][2]: a word has two elements of a row of the weight, and a block's rows are
// side by side. Both sizes are filled up with zeros. A word is multiplied with two elements of a row of x, and the sums
// of some rows and columns stay in registers. Sums are float32 in the order of in_features, so that a result does not
// depend on the number of rows.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "claims.h"
#include "elements.h"
#include "packed_linear.h"
#include "products.h"
#include "replay.h"

namespace {

constexpr int64_t kAhead = 4096;               // bytes to prefetch ahead in a stream that is read once
constexpr int64_t kNearPanelBytes = 16 << 10;  // of weights that stay in a core's first cache for two passes
constexpr int64_t kPanelBytes = 128 << 10;     // of weights that stay in a core's second cache for more passes
constexpr int64_t kLine = 64;                  // bytes of a cache line
constexpr int64_t kSerialBytes = 128 << 10;    // of weights, up to which starting threads costs more than it gains

// The arithmetic of words. kColumns is the number of words in a register.
#ifdef __AVX512BF16__
struct Words {
    using Element = bfloat16;
    using Sums = Lanes;
    using Column = __m512bh;
    using Pair = __m512bh;
    static constexpr int kColumns = kLanes, kMostVectors = 4, kMostSums = 24;
    static Column column(const uint32_t* from) { return load<Column>(from); }
    static Pair pair(const bfloat16* from) { return Pair(_mm512_set1_epi32(load<int32_t>(from))); }
    static void add(Sums& sums, const Pair& x, const Column& weight) {
        sums = Sums(_mm512_dpbf16_ps(__m512(sums), x, weight));
    }
};
#else
#if defined(__AVX512F__)
constexpr int kWord = 16, kMostVectorsOfWords = 4, kMostSumsOfWords = 16;
#elif defined(__AVX__)
constexpr int kWord = 8, kMostVectorsOfWords = 2, kMostSumsOfWords = 8;
#else
constexpr int kWord = 4, kMostVectorsOfWords = 4, kMostSumsOfWords = 8;
#endif
struct Words {
    using Element = float;
    using Sums = float __attribute__((vector_size(kWord * 4)));
    using Bits = uint32_t __attribute__((vector_size(kWord * 4)));
    struct Column {
        Sums first, second;
    };
    struct Pair {
        Sums first, second;
    };
    static constexpr int kColumns = kWord, kMostVectors = kMostVectorsOfWords, kMostSums = kMostSumsOfWords;
    static Column column(const uint32_t* from) {
        const Bits bits = load<Bits>(from);
        return {Sums(bits << 16), Sums(bits & 0xffff0000u)};
    }
    static Pair pair(const float* from) { return {Sums{} + from[0], Sums{} + from[1]}; }
    static void add(Sums& sums, const Pair& x, const Column& weight) {
        sums += x.first * weight.first;
        sums += x.second * weight.second;
    }
};
#endif

// sums[r * stride + c] (+)= x[r] . column c, for R rows and V registers of columns. Ahead: the weights that lie kAhead are
// fetched into the core's first cache. An iteration also fetches `step` bytes of `next` into its second cache.
template <bool Ahead, int R, int V>
void multiply(const uint32_t* weight, int64_t block, const Words::Element* x, int64_t x_stride, int64_t pairs,
              float* sums, int64_t stride, bool add, const char* next, int64_t step) {
    constexpr int kColumns = Words::kColumns;
    Words::Sums held[R][V] = {};
    if (add)
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) held[r][v] = load<Words::Sums>(sums + r * stride + v * kColumns);
    for (int64_t i = 0; i < pairs; i++, weight += block, x += 2, next += step) {
        Words::Column columns[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            if (Ahead && v * kColumns * 4 % kLine == 0)
                __builtin_prefetch(reinterpret_cast<const char*>(weight + v * kColumns) + kAhead);
            columns[v] = Words::column(weight + v * kColumns);
        }
        for (int64_t line = 0; line < step; line += kLine) __builtin_prefetch(next + line, 0, 2);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const Words::Pair pair = Words::pair(x + r * x_stride);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) Words::add(held[r][v], pair, columns[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) std::memcpy(sums + r * stride + v * kColumns, &held[r][v], sizeof(Words::Sums));
}

template <bool Ahead, int V, int R = Words::kMostSums / V>
void multiply_rows(int64_t rows, const uint32_t* weight, int64_t block, const Words::Element* x, int64_t x_stride,
                   int64_t pairs, float* sums, int64_t stride, bool add, const char* next, int64_t step) {
    if constexpr (R > 1)
        if (rows < R)
            return multiply_rows<Ahead, V, R - 1>(rows, weight, block, x, x_stride, pairs, sums, stride, add, next, step);
    multiply<Ahead, R, V>(weight, block, x, x_stride, pairs, sums, stride, add, next, step);
}

// A unit is V registers of columns. Its rows are multiplied in passes over a panel of the weight at a time. If the unit
// is a block, so that panels follow one another in memory, the passes fetch the panel after the next, or the next one if
// panels are large, each a share.
template <int V>
void multiply_units(const PackedProduct& product, const Words::Element* x, int64_t x_stride) {
    constexpr int64_t kUnit = V * Words::kColumns, kMost = Words::kMostSums / V;
    const int64_t block = product.block, in_block = block / kUnit, units = (product.out + kUnit - 1) / kUnit;
    const int64_t passes = (product.rows + kMost - 1) / kMost, at_once = (product.rows + passes - 1) / passes;
    const int64_t bytes = passes > 2 ? kPanelBytes : kNearPanelBytes, distance = passes > 2 ? 1 : 2;
    const int64_t most_pairs = passes > 1 ? std::max<int64_t>(16, bytes / (4 * block)) : product.pairs;
    const int64_t panels = (product.pairs + most_pairs - 1) / most_pairs;
    const int64_t panel = (product.pairs + panels - 1) / panels;  // pairs at a time
    const bool streams = passes > 1 && kUnit == block;
    const int64_t step = streams ? up((4 * kUnit + passes - 1) / passes, kLine) : 0;  // a pass's share of a pair
    const bool parallel = product.out * product.pairs * 4 > kSerialBytes;
    Claims claims(units, parallel ? omp_get_max_threads() : 1);
    const auto weight_of = [&](int64_t unit) {
        return product.weight + unit / in_block * product.block_pairs * block + unit % in_block * kUnit;
    };
#pragma omp parallel if (parallel)
    {
        std::vector<float> sums(product.rows * kUnit);
        claims.run([&](int64_t unit, int64_t following) {
            const uint32_t *weight = weight_of(unit), *beyond = weight_of(following);
            for (int64_t first = 0; first < product.pairs; first += panel) {
                const int64_t count = std::min(panel, product.pairs - first), target = first + distance * panel;
                const uint32_t* next = target < product.pairs ? weight + target * block
                                                              : beyond + (target - product.pairs) * block;
                for (int64_t row = 0, fetched = 0; row < product.rows; row += at_once, fetched += step) {
                    const auto run = streams || row > 0 ? multiply_rows<false, V> : multiply_rows<true, V>;
                    run(std::min(at_once, product.rows - row), weight + first * block, block,
                        x + row * x_stride + 2 * first, x_stride, count, sums.data() + row * kUnit, kUnit, first > 0,
                        reinterpret_cast<const char*>(next) + fetched * count, fetched < 4 * kUnit ? step : 0);
                }
            }
            product.write(sums.data(), kUnit, unit * kUnit, std::min(kUnit, product.out - unit * kUnit));
        });
    }
}

void multiply_words(const PackedProduct& product) {
    thread_local std::vector<Words::Element> copies;
    const Words::Element* x = nullptr;
    int64_t stride = product.x_stride;
    if constexpr (std::is_same_v<Words::Element, bfloat16>)
        if (product.width % 2 == 0) x = reinterpret_cast<const Words::Element*>(product.x);
    if (!x) {
        stride = 2 * product.pairs;
        copies.assign(product.rows * stride, Words::Element(0.0f));
        for (int64_t row = 0; row < product.rows; row++)
            std::copy_n(product.x + row * product.x_stride, product.width, copies.data() + row * stride);
        x = copies.data();
    }
    // A whole block is one stream of memory. Where blocks do not suffice for all threads, they are divided.
    const int64_t vectors = product.block / Words::kColumns, blocks = (product.out + product.block - 1) / product.block;
    if (Words::kMostVectors == 4 && vectors % 4 == 0 && blocks >= omp_get_max_threads())
        multiply_units<std::min(4, Words::kMostVectors)>(product, x, stride);
    else if (vectors % 2 == 0)
        multiply_units<2>(product, x, stride);
    else
        multiply_units<1>(product, x, stride);
}

}  // namespace

void PackedProduct::write(const float* sums, int64_t stride, int64_t first, int64_t count) const {
    for (int64_t row = 0; row < rows; row++) {
        const float* from = sums + row * stride;
        bfloat16* to = y + row * out + first;
        if (bias)
            for (int64_t i = 0; i < count; i++) to[i] = bfloat16(from[i] + float(bias[first + i]));
        else
            for (int64_t i = 0; i < count; i++) to[i] = bfloat16(from[i]);
    }
}

// Multiplies rows of x, whose elements have unit stride, with a packed weight. The bias may be null.
extern "C" void packed_linear(const void* x, const void* weight, const void* bias, void* y, int64_t rows, int64_t width,
                              int64_t out, int64_t block, int64_t x_stride) {
    const int64_t pairs = (width + 1) / 2, block_pairs = (width + kInBlock - 1) / kInBlock * (kInBlock / 2);
    const PackedProduct product{static_cast<const bfloat16*>(x), static_cast<const uint32_t*>(weight),
                                static_cast<const bfloat16*>(bias), static_cast<bfloat16*>(y), rows, width, out, block,
                                x_stride, pairs, block_pairs};
    if (!multiply_tiles(product)) multiply_words(product);
}

// Returns the rows of a block in a packed weight, whose elements are those of `plain`, [out, width]; or 0 if the layout
// is another one, or if the elements fit two.
extern "C" int64_t packed_block(const uint16_t* plain, const uint16_t* packed, int64_t out, int64_t width,
                                int64_t bytes) {
    const int64_t in = (width + kInBlock - 1) / kInBlock * kInBlock;
    int64_t found = 0;
    for (const int64_t block : {16, 32, 48, 64}) {
        if ((out + block - 1) / block * block * in * 2 != bytes) continue;
        int64_t wrong = 0;
#pragma omp parallel for reduction(+ : wrong)
        for (int64_t row = 0; row < out; row++) {
            const uint16_t* from = packed + row / block * block * in + row % block * 2;
            for (int64_t i = 0; i < width && !wrong; i++)
                wrong += from[i / 2 * block * 2 + i % 2] != plain[row * width + i];
        }
        if (wrong) continue;
        if (found) return 0;
        found = block;
    }
    return found;
}

REPLAYABLE(packed_linear)
