// Attention of few queries over a paged cache, as in decode steps.
//
// A key or value is read from memory once, for all query heads that share it. Scores are float32; the result is rounded
// once.
#include "attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "products.h"

namespace {

constexpr int kTile = 16;  // positions at a time

// A cache's rows of one key head at kTile positions, and those to prefetch.
template <class T>
struct Tile {
    const T* base;
    const int64_t *at, *ahead;  // in elements from `base`
};

// scores[m * stride + r] = rows[r] . queries[m], for M queries, packed in groups of kRows. A reduction of 16 vectors
// takes as long for fewer, so fewer queries take more rows at a time.
template <class T, int M>
inline void dots(const Tile<T>& tile, const Operand<T>* queries, int64_t dim, float* scores, int64_t stride) {
    using P = Product<T>;
    constexpr int kAtOnce = kTile / M;
    for (int first = 0; first < kTile; first += kAtOnce) {
        Lanes sums[kTile] = {};
        for (int64_t i = 0; i < dim; i += P::kStep) {
            typename P::Vector right[M];
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) right[m] = load<typename P::Vector>(queries + i * kRows + m * P::kStep);
#pragma GCC unroll 16
            for (int r = 0; r < kAtOnce; r++) {
                __builtin_prefetch(tile.base + tile.ahead[first + r] + i);
                const auto left = P::widened(tile.base + tile.at[first + r] + i);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) P::add(sums[m * kAtOnce + r], left, right[m]);
            }
        }
        float found[kTile];
        const Lanes totals = sums_of(sums);
        std::memcpy(found, &totals, sizeof(found));
        for (int m = 0; m < M; m++)
            std::memcpy(scores + m * stride + first, found + m * kAtOnce, kAtOnce * sizeof(float));
    }
}

// sums[m * dim + i] += weights[m * stride + r] * rows[r][i], for kVectors vectors from i on.
template <class T, int M, int kVectors>
inline void weigh(const Tile<T>& tile, int64_t rows, const float* weights, int64_t stride, int64_t i, int64_t dim,
                  float* sums) {
    Lanes held[M * kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < M * kVectors; v++) held[v] = load<Lanes>(sums + v / kVectors * dim + i + v % kVectors * kLanes);
    for (int64_t r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            __builtin_prefetch(tile.base + tile.ahead[r] + i + v * kLanes);
            const Lanes row = wide(tile.base + tile.at[r] + i + v * kLanes);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) held[m * kVectors + v] += weights[m * stride + r] * row;
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < M * kVectors; v++)
        std::memcpy(sums + v / kVectors * dim + i + v % kVectors * kLanes, &held[v], sizeof(Lanes));
}

template <class T, int M>
inline void accumulate(const Tile<T>& tile, int64_t rows, const float* weights, int64_t stride, int64_t dim,
                       float* sums) {
    constexpr int kVectors = M == 4 ? 2 : 4;
    int64_t i = 0;
    for (; i + kVectors * kLanes <= dim; i += kVectors * kLanes)
        weigh<T, M, kVectors>(tile, rows, weights, stride, i, dim, sums);
    for (; i < dim; i += kLanes) weigh<T, M, 1>(tile, rows, weights, stride, i, dim, sums);
}

// Runs body(head, constant M) for every M heads of a group of kRows, with M 4, 2 or 1.
template <class Body>
inline void by_heads(int64_t heads, Body body) {
    int64_t head = 0;
    for (; head + 4 <= heads; head += 4) body(head, std::integral_constant<int, 4>{});
    if (heads & 2) body(head, std::integral_constant<int, 2>{}), head += 2;
    if (heads & 1) body(head, std::integral_constant<int, 1>{});
}

inline void softmax(const Shape& shape, int64_t head, float* line, int64_t count) {
    float largest = shape.sinks ? shape.sinks[head] : -std::numeric_limits<float>::infinity(), total = 0;
    adjust(shape, line, count);
    for (int64_t i = 0; i < count; i++) largest = line[i] < largest ? largest : line[i];  // this order keeps a NaN
    for (int64_t i = 0; i < count; i++) line[i] = exponential(line[i] - largest);
    for (int64_t i = 0; i < count; i++) total += line[i];
    if (shape.sinks) total += exponential(shape.sinks[head] - largest);
    for (int64_t i = 0; i < count; i++) line[i] /= total;
}

// What a thread reuses.
template <class T>
struct Scratch {
    std::vector<const T*> heads;
    std::vector<Operand<T>> queries;
    std::vector<float> scores, sums;
    std::vector<int64_t> rows;
    std::vector<T> copies;  // of a tile, whose rows are filled up to whole vectors
};

// Attends with one query token over the key heads from `first` to `last`. The heads that share a key head read a tile
// of its rows from the CPU cache.
template <class T>
void attend(const Shape& shape, const Span& span, const T* query, const T* keys, const T* values, const int32_t* blocks,
            int64_t first, int64_t last, T* output, Scratch<T>& scratch) {
    constexpr int64_t kStep = Product<T>::kStep;
    const int64_t group = shape.heads / shape.kv_heads, dim = shape.head_dim, whole = (dim + kStep - 1) / kStep * kStep;
    const int64_t count = span.end - span.begin, stride = (count + kTile - 1) / kTile * kTile;
    const int64_t padded = (group + kRows - 1) / kRows * kRows;
    scratch.heads.clear();
    for (int64_t kv_head = first; kv_head < last; kv_head++)
        for (int64_t head = 0; head < padded; head++)
            scratch.heads.push_back(query + (kv_head * group + std::min(head, group - 1)) * shape.query_head_stride);
    const int64_t packed = pack<T>(scratch.heads.data(), scratch.heads.size(), dim, scratch.queries);
    scratch.scores.resize((last - first) * group * stride);
    scratch.sums.assign((last - first) * group * whole, 0.0f);
    // Past the end, the last position again, so that every tile is whole and has one to prefetch.
    scratch.rows.resize(stride + kTile);
    for (int64_t index = 0; index < stride + kTile; index++) {
        const int64_t position = span.begin + std::min(index, count - 1);
        const int64_t block = blocks[position / shape.block_size], place = position % shape.block_size;
        scratch.rows[index] = (block * shape.block_size + place) * shape.kv_heads * dim;
    }
    int64_t in_copies[kTile];
    scratch.copies.assign(whole == dim ? 0 : kTile * whole, T(0.0f));
    for (int r = 0; r < kTile; r++) in_copies[r] = r * whole;
    auto tile_of = [&](const T* cache, int64_t index, int64_t kv_head) -> Tile<T> {
        const T* base = cache + kv_head * dim;
        const int64_t* at = scratch.rows.data() + index;
        if (whole == dim) return {base, at, at + kTile};
        for (int r = 0; r < kTile; r++) std::copy_n(base + at[r], dim, scratch.copies.data() + in_copies[r]);
        return {scratch.copies.data(), in_copies, in_copies};
    };
    // The heads of a position are contiguous, so this order reads memory sequentially.
    for (int64_t index = 0; index < count; index += kTile)
        for (int64_t kv_head = 0; kv_head < last - first; kv_head++) {
            const Tile<T> tile = tile_of(keys, index, first + kv_head);
            by_heads(group, [&](int64_t head, auto heads) {
                const int64_t place = kv_head * padded + head;
                dots<T, heads>(tile, scratch.queries.data() + place / kRows * packed + place % kRows * kStep, whole,
                               scratch.scores.data() + (kv_head * group + head) * stride + index, stride);
            });
        }
    for (int64_t head = 0; head < (last - first) * group; head++)
        softmax(shape, first * group + head, scratch.scores.data() + head * stride, count);
    for (int64_t index = 0; index < count; index += kTile)
        for (int64_t kv_head = 0; kv_head < last - first; kv_head++) {
            const Tile<T> tile = tile_of(values, index, first + kv_head);
            by_heads(group, [&](int64_t head, auto heads) {
                const int64_t place = kv_head * group + head;
                accumulate<T, heads>(tile, std::min<int64_t>(kTile, count - index),
                                     scratch.scores.data() + place * stride + index, stride, whole,
                                     scratch.sums.data() + place * whole);
            });
        }
    for (int64_t head = 0; head < (last - first) * group; head++)
        for (int64_t i = 0; i < dim; i++) output[head * dim + i] = T(scratch.sums[head * whole + i]);
}

template <class T>
void attend_few(const Shape& shape, const T* query, const T* keys, const T* values, const int32_t* block_table,
                const int32_t* starts, const int32_t* lengths, T* output) {
    const int64_t group = shape.heads / shape.kv_heads;
    // A thread takes a whole token if there are enough tokens, otherwise some key heads of a token.
    const int64_t threads = omp_get_max_threads();
    const int64_t parts = std::min(shape.kv_heads, shape.tokens >= 4 * threads ? 1 : threads);
    const int64_t taken = (shape.kv_heads + parts - 1) / parts;
#pragma omp parallel
    {
        Scratch<T> scratch;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t token = 0; token < shape.tokens; token++)
            for (int64_t first = 0; first < shape.kv_heads; first += taken) {
                const int64_t last = std::min(first + taken, shape.kv_heads);
                const int64_t sequence =
                    std::upper_bound(starts + 1, starts + shape.sequences + 1, int32_t(token)) - (starts + 1);
                if (sequence < shape.sequences && shape.many(starts, lengths, sequence)) continue;
                const Span span =
                    sequence < shape.sequences
                        ? visible(shape, lengths[sequence] - starts[sequence + 1] + token, lengths[sequence])
                        : Span{0, 0};
                T* result = output + (token * shape.heads + first * group) * shape.head_dim;
                if (span.begin == span.end) {
                    std::fill(result, result + (last - first) * group * shape.head_dim, T(0.0f));
                    continue;
                }
                attend(shape, span, query + token * shape.query_stride, keys, values,
                       block_table + sequence * shape.max_blocks, first, last, result, scratch);
            }
    }
}

}  // namespace

// Returns 0, or 1 + the index of a sequence whose length or blocks are outside the block table or the cache.
extern "C" int64_t paged_attention(const void* query, const void* keys, const void* values, const int32_t* block_table,
                                   const int32_t* starts, const int32_t* lengths, const void* sinks, void* output,
                                   int dtype,
                                   int64_t sequences, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                   int64_t num_blocks, int64_t block_size, int64_t max_blocks, int64_t query_stride,
                                   int64_t query_head_stride, float scale, float softcap, int causal, int64_t window,
                                   int64_t work) {
    Shape shape{sequences, tokens,     heads,        kv_heads,          head_dim,
                block_size, max_blocks, query_stride, query_head_stride, scale,
                softcap,   causal,     window,       work,              nullptr};
    std::vector<float> wide;
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
        const int64_t used = (lengths[sequence] + block_size - 1) / block_size;
        const int32_t* blocks = block_table + sequence * max_blocks;
        if (lengths[sequence] < 0 || used > max_blocks) return sequence + 1;
        for (int64_t index = 0; index < used; index++)
            if (blocks[index] < 0 || blocks[index] >= num_blocks) return sequence + 1;
    }
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        if (sinks) {
            const T* given = static_cast<const T*>(sinks);
            wide.assign(given, given + heads);
            shape.sinks = wide.data();
        }
        auto run = [&](auto attend) {
            attend(shape, static_cast<const T*>(query), static_cast<const T*>(keys), static_cast<const T*>(values),
                   block_table, starts, lengths, static_cast<T*>(output));
        };
        run(attend_few<T>);
        run(attend_prompts<T>);
    });
    return 0;
}

// Copies each token's key and value into its slot. Returns 0, or 1 + the index of a token whose slot is outside the
// cache.
extern "C" int64_t store_kv_cache(const char* key, const char* value, char* key_cache, char* value_cache,
                                  const int32_t* slots, int64_t tokens, int64_t num_slots, int64_t row_bytes,
                                  int64_t key_stride_bytes, int64_t value_stride_bytes) {
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] < 0 || slots[token] >= num_slots) return token + 1;
    for (int64_t token = 0; token < tokens; token++) {
        std::memcpy(key_cache + slots[token] * row_bytes, key + token * key_stride_bytes, row_bytes);
        std::memcpy(value_cache + slots[token] * row_bytes, value + token * value_stride_bytes, row_bytes);
    }
    return 0;
}
