// Attention of decode steps over a paged cache.
//
// A key or value is read from memory once, for all query heads that share it. Scores are float32; the result is rounded
// once.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "elements.h"

namespace {

struct Shape {
    int64_t sequences, tokens, heads, kv_heads, head_dim, block_size, max_blocks;
    int64_t query_stride, query_head_stride;  // in elements
    float scale;
    int causal;
    int64_t window;  // NO_WINDOW, which exceeds any position, for none
};

struct Span {
    int64_t sequence, begin, end;  // the positions that a token sees
};

Span visible(const Shape& shape, const int32_t* starts, const int32_t* lengths, int64_t token) {
    int64_t sequence = std::upper_bound(starts + 1, starts + shape.sequences + 1, int32_t(token)) - (starts + 1);
    if (sequence == shape.sequences) return {0, 0, 0};
    int64_t length = lengths[sequence], position = length - starts[sequence + 1] + token;
    int64_t end = shape.causal ? std::min(position + 1, length) : length;
    int64_t begin = std::max<int64_t>(0, position - shape.window + 1);
    return {sequence, begin, std::max(begin, end)};
}

constexpr int64_t kAhead = 8;  // prefetch distance in rows
constexpr int kBlock = 4;      // rows widened together, then read by every head of a group from the CPU cache

// dots[r] = left . rows[r]
inline void dot(const float* left, const float* rows, int64_t dim, float* dots) {
    float a = 0, b = 0, c = 0, d = 0;
    for (int64_t i = 0; i < dim; i++) {
        a += left[i] * rows[i];
        b += left[i] * rows[dim + i];
        c += left[i] * rows[2 * dim + i];
        d += left[i] * rows[3 * dim + i];
    }
    dots[0] = a, dots[1] = b, dots[2] = c, dots[3] = d;
}

// sum += weights[r] * rows[r]
inline void accumulate(float* __restrict sum, const float* rows, int64_t dim, const float* weights) {
    const float a = weights[0], b = weights[1], c = weights[2], d = weights[3];
    for (int64_t i = 0; i < dim; i++)
        sum[i] += a * rows[i] + b * rows[dim + i] + c * rows[2 * dim + i] + d * rows[3 * dim + i];
}

inline void softmax(float* line, int64_t count) {
    float largest = -std::numeric_limits<float>::infinity(), total = 0;
    for (int64_t i = 0; i < count; i++) largest = line[i] < largest ? largest : line[i];  // this order keeps a NaN
    for (int64_t i = 0; i < count; i++) line[i] = exponential(line[i] - largest);
    for (int64_t i = 0; i < count; i++) total += line[i];
    for (int64_t i = 0; i < count; i++) line[i] /= total;
}

// Attends with one query token over the key heads from `first` to `last`. All heads that share a key head read its
// widened rows.
template <class T>
void attend(const Shape& shape, const Span& span, const T* query, const T* keys, const T* values, const int32_t* blocks,
            int64_t first, int64_t last, T* output, std::vector<float>& scratch, std::vector<int64_t>& slots) {
    const int64_t group = shape.heads / shape.kv_heads, heads = (last - first) * group, dim = shape.head_dim;
    const int64_t count = span.end - span.begin, padded = (count + kBlock - 1) / kBlock * kBlock;
    scratch.assign(heads * (2 * dim + padded) + kBlock * dim, 0.0f);
    float *wide = scratch.data(), *sums = wide + heads * dim, *rows = sums + heads * dim, *scores = rows + kBlock * dim;
    // Padded, so that every row has one to prefetch. Blocks of an engine are seldom contiguous.
    slots.resize(count + kAhead);
    for (int64_t index = 0, position = span.begin; index < count; index++, position++)
        slots[index] = int64_t(blocks[position / shape.block_size]) * shape.block_size + position % shape.block_size;
    std::fill(slots.begin() + count, slots.end(), slots[count - 1]);
    auto widen = [&](const T* cache, int64_t index, int64_t kv_head) {
        const int64_t filled = std::min<int64_t>(kBlock, count - index);
        std::fill(rows + filled * dim, rows + kBlock * dim, 0.0f);
        for (int64_t r = 0; r < filled; r++) {
            const T* row = cache + (slots[index + r] * shape.kv_heads + kv_head) * dim;
            const T* later = cache + (slots[index + r + kAhead] * shape.kv_heads + kv_head) * dim;
            for (int64_t i = 0; i < dim; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(later + i);
            for (int64_t i = 0; i < dim; i++) rows[r * dim + i] = row[i];
        }
    };
    for (int64_t head = 0; head < heads; head++)
        for (int64_t i = 0; i < dim; i++)
            wide[head * dim + i] = float(query[(first * group + head) * shape.query_head_stride + i]) * shape.scale;
    // The heads of a row are contiguous, so this order reads memory sequentially.
    for (int64_t index = 0; index < count; index += kBlock)
        for (int64_t head = 0; head < heads; head++) {
            if (head % group == 0) widen(keys, index, first + head / group);
            dot(wide + head * dim, rows, dim, scores + head * padded + index);
        }
    for (int64_t head = 0; head < heads; head++) {
        softmax(scores + head * padded, count);
        std::fill(scores + head * padded + count, scores + (head + 1) * padded, 0.0f);
    }
    for (int64_t index = 0; index < count; index += kBlock)
        for (int64_t head = 0; head < heads; head++) {
            if (head % group == 0) widen(values, index, first + head / group);
            accumulate(sums + head * dim, rows, dim, scores + head * padded + index);
        }
    for (int64_t i = 0; i < heads * dim; i++) output[i] = T(sums[i]);
}

template <class T>
void attend_all(const Shape& shape, const T* query, const T* keys, const T* values, const int32_t* block_table,
                const int32_t* starts, const int32_t* lengths, T* output) {
    const int64_t group = shape.heads / shape.kv_heads;
    // A thread takes a whole token if there are enough tokens, otherwise some key heads of a token.
    const int64_t threads = omp_get_max_threads();
    const int64_t parts = std::min(shape.kv_heads, shape.tokens >= 4 * threads ? 1 : threads);
    const int64_t taken = (shape.kv_heads + parts - 1) / parts;
#pragma omp parallel
    {
        std::vector<float> scratch;
        std::vector<int64_t> slots;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t token = 0; token < shape.tokens; token++)
            for (int64_t first = 0; first < shape.kv_heads; first += taken) {
                const int64_t last = std::min(first + taken, shape.kv_heads);
                const Span span = visible(shape, starts, lengths, token);
                T* result = output + (token * shape.heads + first * group) * shape.head_dim;
                if (span.begin == span.end) {
                    std::fill(result, result + (last - first) * group * shape.head_dim, T(0.0f));
                    continue;
                }
                attend(shape, span, query + token * shape.query_stride, keys, values,
                       block_table + span.sequence * shape.max_blocks, first, last, result, scratch, slots);
            }
    }
}

}  // namespace

// Returns 0, or 1 + the index of a sequence whose length or blocks are outside the block table or the cache.
extern "C" int64_t paged_attention(const void* query, const void* keys, const void* values, const int32_t* block_table,
                                   const int32_t* starts, const int32_t* lengths, void* output, int dtype,
                                   int64_t sequences, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                   int64_t num_blocks, int64_t block_size, int64_t max_blocks, int64_t query_stride,
                                   int64_t query_head_stride, float scale, int causal, int64_t window) {
    Shape shape{sequences,         tokens, heads,  kv_heads, head_dim, block_size, max_blocks, query_stride,
                query_head_stride, scale,  causal, window};
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
        const int64_t used = (lengths[sequence] + block_size - 1) / block_size;
        const int32_t* blocks = block_table + sequence * max_blocks;
        if (lengths[sequence] < 0 || used > max_blocks) return sequence + 1;
        for (int64_t index = 0; index < used; index++)
            if (blocks[index] < 0 || blocks[index] >= num_blocks) return sequence + 1;
    }
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        attend_all(shape, static_cast<const T*>(query), static_cast<const T*>(keys), static_cast<const T*>(values),
                   block_table, starts, lengths, static_cast<T*>(output));
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
