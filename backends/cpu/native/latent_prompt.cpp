// Latent attention with its projections, in the cheaper of two forms for each sequence.
//
// Absorbed, queries are projected to the latent, all heads attend to the cached rows, and the results are projected to
// values. Expanded, each head's keys and values are projected from the latents once for all queries, a part of the
// positions at a time, and each head attends to its own.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "elements.h"
#include "head_linear.h"
#include "replay.h"

extern "C" int64_t attend_selected(const void*, const void*, const void*, const void*, const int32_t*, const int32_t*,
                                   const int32_t*, const int32_t*, void*, int, int64_t, int64_t, int64_t, int64_t,
                                   int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                   float);

namespace {

constexpr int64_t kExpandedBytes = 32 << 20;  // of expanded keys and values at a time

struct Sizes {
    int64_t heads, nope, rope, rank, value, num_blocks, block_size, max_blocks;
    int64_t query_stride, query_head_stride, rope_stride, rope_head_stride;  // in elements
    int64_t key_head_stride, value_head_stride;
    float scale;

    // Whether a head's products are fewer in the expanded form.
    bool expands(int64_t queries, int64_t length) const {
        const int64_t pairs = queries * length - queries * (queries - 1) / 2, projection = (nope + value) * rank;
        return pairs * (nope + rope + value) + length * projection < pairs * (2 * rank + rope) + queries * projection;
    }
};

template <class T>
struct Tensors {
    const T *query, *query_rope, *latents, *ropes, *key_weight, *value_weight;
    T* output;
};

template <class T>
std::unique_ptr<T[]> unfilled(int64_t count) {
    return std::unique_ptr<T[]>(new T[count]);
}

// Attends from `tokens` tokens of some sequences.
template <class T>
void attend_absorbed(const Sizes& sizes, const Tensors<T>& given, int dtype, const int32_t* table, const int32_t* starts,
                     const int32_t* lengths, int64_t sequences, int64_t tokens) {
    const int64_t heads = sizes.heads, rank = sizes.rank, first = starts[0], row = heads * rank;
    const auto query = unfilled<T>(tokens * row), attended = unfilled<T>(tokens * row);
    std::vector<int32_t> own(starts, starts + sequences + 1);
    for (int32_t& each : own) each -= int32_t(first);
    head_linear<T>({tokens, heads, sizes.nope, rank, sizes.query_stride, sizes.query_head_stride, sizes.key_head_stride,
                    false, row, rank},
                   given.query + first * sizes.query_stride, given.key_weight, query.get());
    attend_selected(query.get(), given.query_rope + first * sizes.rope_stride, given.latents, given.ropes, nullptr,
                    table, own.data(), lengths, attended.get(), dtype, sequences, tokens, heads, rank, sizes.rope,
                    sizes.num_blocks, sizes.block_size, sizes.max_blocks, 0, row, rank, sizes.rope_stride,
                    sizes.rope_head_stride, sizes.scale);
    head_linear<T>({tokens, heads, rank, sizes.value, row, rank, sizes.value_head_stride, true, heads * sizes.value,
                    sizes.value},
                   attended.get(), given.value_weight, given.output + first * heads * sizes.value);
}

// Attends from the tokens of one sequence, whose latents and keys are copied in order.
template <class T>
void attend_expanded(const Sizes& sizes, const Tensors<T>& given, const int32_t* blocks, int32_t first, int32_t tokens,
                     int32_t length) {
    const int64_t heads = sizes.heads, nope = sizes.nope, rope = sizes.rope, rank = sizes.rank, value = sizes.value;
    const int64_t width = nope + rope, row_bytes = heads * (width + value) * int64_t(sizeof(T));
    const int64_t parts = (length * row_bytes + kExpandedBytes - 1) / kExpandedBytes, most = (length + parts - 1) / parts;
    const auto query = unfilled<T>(tokens * heads * width), keys = unfilled<T>(most * heads * width);
    const auto values = unfilled<T>(most * heads * value), latents = unfilled<T>(most * rank);
#pragma omp parallel for
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            T* to = query.get() + (token * heads + head) * width;
            to = std::copy_n(given.query + (first + token) * sizes.query_stride + head * sizes.query_head_stride, nope, to);
            std::copy_n(given.query_rope + (first + token) * sizes.rope_stride + head * sizes.rope_head_stride, rope, to);
        }
    const int32_t starts[] = {0, tokens};
    const Shape shape{1, tokens, heads, heads, width, value, 0, 0, heads * width, width, sizes.scale, 0, 1,
                      int64_t(1) << 62, -1, nullptr, heads * width, width, heads * value, value};
    std::vector<RowSums> carried;
    for (int64_t begin = 0; begin < length; begin += most) {
        const int64_t count = std::min<int64_t>(most, length - begin);
#pragma omp parallel for
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = begin + i, slot = blocks[at / sizes.block_size] * sizes.block_size + at % sizes.block_size;
            std::copy_n(given.latents + slot * rank, rank, latents.get() + i * rank);
            for (int64_t head = 0; head < heads; head++)
                std::copy_n(given.ropes + slot * rope, rope, keys.get() + (i * heads + head) * width + nope);
        }
        head_linear<T>({count, heads, rank, nope, rank, 0, sizes.key_head_stride, true, heads * width, width},
                       latents.get(), given.key_weight, keys.get());
        head_linear<T>({count, heads, rank, value, rank, 0, sizes.value_head_stride, true, heads * value, value},
                       latents.get(), given.value_weight, values.get());
        attend_prompts(shape, query.get(), Pages<T>{keys.get(), nullptr, 0, width}, Pages<T>{values.get(), nullptr, 0, value},
                       nullptr, starts, &length, given.output + first * heads * value, {begin, begin + count}, &carried);
    }
}

}  // namespace

// Returns 0, or 1 + the index of a sequence whose length or blocks are outside the block table or the cache.
extern "C" int64_t multi_head_latent_attention(
    const void* query, const void* query_rope, const void* latents, const void* ropes, const void* key_weight,
    const void* value_weight, const int32_t* table, const int32_t* starts, const int32_t* lengths, void* output,
    int dtype, int64_t sequences, int64_t tokens, int64_t heads, int64_t nope, int64_t rope, int64_t rank, int64_t value,
    int64_t num_blocks, int64_t block_size, int64_t max_blocks, int64_t query_stride, int64_t query_head_stride,
    int64_t rope_stride, int64_t rope_head_stride, int64_t key_head_stride, int64_t value_head_stride, float scale) {
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
        const int64_t used = (lengths[sequence] + block_size - 1) / block_size;
        const int32_t* blocks = table + sequence * max_blocks;
        if (lengths[sequence] < 0 || used > max_blocks) return sequence + 1;
        for (int64_t index = 0; index < used; index++)
            if (blocks[index] < 0 || blocks[index] >= num_blocks) return sequence + 1;
    }
    const Sizes sizes{heads, nope, rope, rank, value, num_blocks, block_size, max_blocks, query_stride,
                      query_head_stride, rope_stride, rope_head_stride, key_head_stride, value_head_stride, scale};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const Tensors<T> given{static_cast<const T*>(query), static_cast<const T*>(query_rope),
                               static_cast<const T*>(latents), static_cast<const T*>(ropes),
                               static_cast<const T*>(key_weight), static_cast<const T*>(value_weight),
                               static_cast<T*>(output)};
        auto expands = [&](int64_t sequence) {
            const int64_t queries = starts[sequence + 1] - starts[sequence];
            return queries > 0 && queries <= lengths[sequence] && sizes.expands(queries, lengths[sequence]);
        };
        for (int64_t sequence = 0; sequence < sequences || starts[sequence] < tokens;) {
            if (sequence < sequences && expands(sequence)) {
                attend_expanded(sizes, given, table + sequence * max_blocks, starts[sequence],
                                starts[sequence + 1] - starts[sequence], lengths[sequence]);
                sequence++;
                continue;
            }
            int64_t end = sequence;
            while (end < sequences && !expands(end)) end++;
            const int64_t last = end < sequences ? starts[end] : tokens;  // and what is past the last sequence
            attend_absorbed(sizes, given, dtype, table + sequence * max_blocks, starts + sequence, lengths + sequence,
                            end - sequence, last - starts[sequence]);
            sequence = end;
            if (last == tokens) break;
        }
    });
    return 0;
}

REPLAYABLE(multi_head_latent_attention)
