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
#include "replay.h"

namespace {

constexpr int kTile = 16;         // positions at a time at most
constexpr int kHeld = kRegisters >= 32 ? 16 : 8;  // sums of scores in registers
constexpr int kHeads = 4;         // query heads of a key head at a time
constexpr int64_t kOfValues = 8;  // positions of values at a time: those to prefetch fit a core's first cache
constexpr int64_t kPiece = 1024;  // positions of a sequence that a thread takes; a longer sequence uses several threads
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// A cache's rows of one key head at up to kTile positions, and those to prefetch.
template <class T>
struct Tile {
    const T* base;
    const int64_t *at, *ahead;  // in elements from `base`
};

// scores[m * stride + r] = rows[r] . queries[m], for M queries, packed in groups of kHeads, and kSteps steps of a row; 0
// for any number. A reduction of kHeld vectors takes as long for fewer, so fewer queries take more rows at a time.
template <class T, int M, int kSteps>
inline void dots(const Tile<T>& tile, int64_t rows, const Operand<T>* queries, int64_t dim, float* scores,
                 int64_t stride) {
    using P = Product<T>;
    constexpr int kAtOnce = kHeld / M;
    const int64_t steps = kSteps ? kSteps : dim / kTaken<T>;
    for (int64_t first = 0; first < rows; first += kAtOnce) {
        Lanes sums[kHeld] = {};
#pragma GCC unroll 16
        for (int r = 0; r < kAtOnce; r++) {
            const T *row = tile.base + tile.at[first + r], *ahead = tile.base + tile.ahead[first + r];
#pragma GCC unroll 8
            for (int64_t step = 0; step < steps; step++) {
                if (step * kTaken<T> * sizeof(T) % 64 == 0) __builtin_prefetch(ahead + step * kTaken<T>, 0, 2);
#pragma GCC unroll 2
                for (int part = 0; part < kParts<T>; part++) {
                    const auto left = part_of(row + step * kTaken<T>, part);
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++)
                        P::add(sums[m * kAtOnce + r], left,
                               load<typename P::Vector>(queries + ((step * kParts<T> + part) * kHeads + m) * P::kStep));
                }
            }
        }
        float found[kHeld];
        write_sums<kHeld>(sums, found);
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
            if (v * kLanes * sizeof(T) % 64 == 0) __builtin_prefetch(tile.base + tile.ahead[r] + i + v * kLanes, 0, 2);
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

// Runs body(head, constant M) for every M heads of a group of kHeads, with M 4, 2 or 1.
template <class Body>
inline void by_heads(int64_t heads, Body body) {
    int64_t head = 0;
    for (; head + 4 <= heads; head += 4) body(head, std::integral_constant<int, 4>{});
    if (heads & 2) body(head, std::integral_constant<int, 2>{}), head += 2;
    if (heads & 1) body(head, std::integral_constant<int, 1>{});
}

// What a piece of a sequence gives a head: sums of values, the weights of which are relative to the largest score.
struct Partial {
    float largest, total;
};

// Replaces scores with weights, up to a whole tile. The sink counts in the first piece.
inline Partial weights_of(const Shape& shape, int64_t head, bool first, float* line, int64_t count) {
    const bool sink = shape.sinks && first;
    const int64_t whole = up(count, kTile);
    adjust(shape, line, count);
    std::fill(line + count, line + whole, kLowest);
    Lanes most = Lanes{} + (sink ? shape.sinks[head] : kLowest), sums = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
        const Lanes scores = load<Lanes>(line + i);
        most = scores > most ? scores : most;
    }
    float largest = most[0], total = 0;
    for (int lane = 1; lane < kLanes; lane++) largest = std::max(largest, most[lane]);
    const float base = largest == kLowest ? 0.0f : largest;  // -inf less -inf would be NaN
    for (int64_t i = 0; i < whole; i++) line[i] = exponential(line[i] - base);
    for (int64_t i = 0; i < whole; i += kLanes) sums += load<Lanes>(line + i);
    for (int lane = 0; lane < kLanes; lane++) total += sums[lane];
    if (sink) total += exponential(shape.sinks[head] - base);
    return {largest, total};  // a NaN among the scores is one in the total
}

// What a thread reuses.
template <class T>
struct Scratch {
    std::vector<const T*> heads;
    Buffer<Operand<T>> queries;
    std::vector<float> scores;
    std::vector<int64_t> rows;
    std::vector<T> copies;  // of a tile, whose rows are filled up to whole vectors, or widened
};

// Some positions of a token's sequence for the key heads from `first` to `last`.
struct Piece {
    int64_t token, sequence, first, last;
    Span span;
    bool starts, alone;  // whether it is the token's first piece, and the only one
};

// Attends with one query token over a piece. The heads that share a key head read a tile of its rows from the CPU
// cache. Writes `whole` sums and a Partial for each head.
template <class T>
void attend(const Shape& shape, const Piece& piece, const T* query, const Pages<T>& keys, const Pages<T>& values,
            const int32_t* blocks, float* sums, Partial* partials, Scratch<T>& scratch) {
    const int64_t group = shape.heads / shape.kv_heads, dim = shape.head_dim, whole = up(dim, kTaken<T>);
    const int64_t count = piece.span.end - piece.span.begin, stride = up(count, kTile), padded = up(group, kHeads);
    const int64_t kv_heads = piece.last - piece.first;
    scratch.heads.clear();
    for (int64_t kv_head = piece.first; kv_head < piece.last; kv_head++)
        for (int64_t head = 0; head < padded; head++)
            scratch.heads.push_back(query + (kv_head * group + std::min(head, group - 1)) * shape.query_head_stride);
    const int64_t packed = kHeads * whole;
    scratch.queries.resize(scratch.heads.size() / kHeads * packed);
    for (size_t head = 0; head < scratch.heads.size(); head += kHeads)
        pack<T>(scratch.heads.data() + head, kHeads, dim, scratch.queries.data() + head / kHeads * packed);
    scratch.scores.resize(kv_heads * group * stride);
    std::fill(sums, sums + kv_heads * group * whole, 0.0f);
    // Past the end, the last position again, so that every tile is whole and has one to prefetch.
    scratch.rows.resize(stride + kTile);
    for (int64_t index = 0; index < stride + kTile; index++) {
        const int64_t position = piece.span.begin + std::min(index, count - 1);
        const int64_t block = blocks[position / shape.block_size], place = position % shape.block_size;
        scratch.rows[index] = (block * shape.block_size + place) * shape.kv_heads * dim;
    }
    int64_t in_copies[kTile];
    scratch.copies.assign(whole == dim && !keys.scales ? 0 : kTile * whole, T(0.0f));
    for (int r = 0; r < kTile; r++) in_copies[r] = r * whole;
    auto tile_of = [&](const Pages<T>& cache, int64_t index, int64_t rows, int64_t kv_head) -> Tile<T> {
        const int64_t* at = scratch.rows.data() + index;
        T* copies = scratch.copies.data();
        if (cache.scales) {
            const char* numbers = static_cast<const char*>(cache.numbers) + kv_head * dim;
            for (int r = 0; r < rows; r++) {
                for (int64_t i = 0; i < dim; i += 64) __builtin_prefetch(numbers + at[r + rows] + i);
                cache.widen(at[r] + kv_head * dim, copies + in_copies[r]);
            }
            return {copies, in_copies, in_copies};
        }
        const T* base = static_cast<const T*>(cache.numbers) + kv_head * dim;
        if (whole == dim) return {base, at, at + rows};
        for (int r = 0; r < rows; r++) std::copy_n(base + at[r], dim, copies + in_copies[r]);
        return {copies, in_copies, in_copies};
    };
    // The heads of a position are contiguous, so this order reads memory almost sequentially.
    const int64_t of_keys = group % 4 == 0 ? 4 : group % 2 == 0 ? 8 : kTile;  // what a reduction of M heads takes
    for (int64_t index = 0; index < count; index += of_keys)
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            const Tile<T> tile = tile_of(keys, index, of_keys, piece.first + kv_head);
            by_heads(group, [&](int64_t head, auto heads) {
                const int64_t place = kv_head * padded + head;
                const Operand<T>* queries =
                    scratch.queries.data() + place / kHeads * packed + place % kHeads * Product<T>::kStep;
                float* scores = scratch.scores.data() + (kv_head * group + head) * stride + index;
                switch (whole / kTaken<T>) {
                    case 2:
                        return dots<T, heads, 2>(tile, of_keys, queries, whole, scores, stride);
                    case 4:
                        return dots<T, heads, 4>(tile, of_keys, queries, whole, scores, stride);
                    case 8:
                        return dots<T, heads, 8>(tile, of_keys, queries, whole, scores, stride);
                    default:
                        return dots<T, heads, 0>(tile, of_keys, queries, whole, scores, stride);
                }
            });
        }
    for (int64_t head = 0; head < kv_heads * group; head++)
        partials[head] = weights_of(shape, piece.first * group + head, piece.starts,
                                    scratch.scores.data() + head * stride, count);
    for (int64_t index = 0; index < count; index += kOfValues)
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            const Tile<T> tile = tile_of(values, index, kOfValues, piece.first + kv_head);
            by_heads(group, [&](int64_t head, auto heads) {
                const int64_t place = kv_head * group + head;
                accumulate<T, heads>(tile, std::min(kOfValues, count - index),
                                     scratch.scores.data() + place * stride + index, stride, whole, sums + place * whole);
            });
        }
}

// Writes a head's result from the pieces of its sequence, `apart` floats and `heads` partials from one another.
template <class T>
void write(const Partial* partials, int64_t heads, const float* sums, int64_t apart, int64_t pieces, int64_t dim,
           T* output, float* row) {
    float largest = kLowest, total = 0;
    for (int64_t i = 0; i < pieces; i++)
        largest = partials[i * heads].largest < largest ? largest : partials[i * heads].largest;
    std::fill(row, row + dim, 0.0f);
    for (int64_t i = 0; i < pieces; i++) {
        const Partial& partial = partials[i * heads];
        const float factor = partial.largest == largest ? 1.0f : exponential(partial.largest - largest);
        total += factor * partial.total;
        for (int64_t d = 0; d < dim; d++) row[d] += factor * sums[i * apart + d];
    }
    const float share = 1.0f / total;
    for (int64_t d = 0; d < dim; d++) output[d] = T(row[d] * share);
}

template <class T>
void attend_few(const Shape& shape, const T* query, const Pages<T>& keys, const Pages<T>& values,
                const int32_t* block_table, const int32_t* starts, const int32_t* lengths, T* output) {
    const int64_t group = shape.heads / shape.kv_heads, dim = shape.head_dim, whole = up(dim, kTaken<T>);
    // A thread takes all key heads of a piece if there are enough pieces, otherwise some.
    const int64_t threads = omp_get_max_threads();
    const int64_t parts = std::min(shape.kv_heads, shape.tokens >= 4 * threads ? 1 : threads);
    const int64_t taken = (shape.kv_heads + parts - 1) / parts;
    std::vector<Piece> pieces;
    for (int64_t token = 0, sequence = 0; token < shape.tokens; token++) {
        while (sequence < shape.sequences && starts[sequence + 1] <= token) sequence++;
        T* row = output + token * shape.heads * dim;
        Span span{0, 0};
        if (sequence < shape.sequences) {
            if (shape.many(starts, lengths, sequence)) continue;
            span = visible(shape, lengths[sequence] - starts[sequence + 1] + token, lengths[sequence]);
        }
        if (span.begin == span.end) std::fill(row, row + shape.heads * dim, T(0.0f));
        const bool alone = span.end - span.begin <= kPiece;
        for (int64_t first = 0; first < shape.kv_heads; first += taken)
            for (int64_t begin = span.begin; begin < span.end; begin += kPiece)
                pieces.push_back({token, sequence, first, std::min(first + taken, shape.kv_heads),
                                  {begin, std::min(begin + kPiece, span.end)}, begin == span.begin, alone});
    }
    // Pieces of a sequence leave their sums until all are there.
    const int64_t heads = taken * group;
    const bool several = std::any_of(pieces.begin(), pieces.end(), [](const Piece& piece) { return !piece.alone; });
    std::vector<float> sums(several ? pieces.size() * heads * whole : 0);
    std::vector<Partial> partials(several ? pieces.size() * heads : 0);
#pragma omp parallel if (pieces.size() > 1)
    {
        thread_local Scratch<T> scratch;
        thread_local std::vector<float> own, row;
        thread_local std::vector<Partial> own_partials;
        own.resize(heads * whole), row.resize(dim), own_partials.resize(heads);
        auto result = [&](const Piece& piece) {
            return output + (piece.token * shape.heads + piece.first * group) * dim;
        };
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < pieces.size(); i++) {
            const Piece& piece = pieces[i];
            float* to = piece.alone ? own.data() : sums.data() + i * heads * whole;
            Partial* parts_of = piece.alone ? own_partials.data() : partials.data() + i * heads;
            attend(shape, piece, query + piece.token * shape.query_stride, keys, values,
                   block_table + piece.sequence * shape.max_blocks, to, parts_of, scratch);
            for (int64_t head = 0; piece.alone && head < (piece.last - piece.first) * group; head++)
                write(parts_of + head, heads, to + head * whole, 0, 1, dim, result(piece) + head * dim, row.data());
        }
        if (several) {
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < pieces.size(); i++) {
                const Piece& piece = pieces[i];
                if (piece.alone || !piece.starts) continue;
                size_t end = i + 1;
                while (end < pieces.size() && !pieces[end].starts) end++;
                for (int64_t head = 0; head < (piece.last - piece.first) * group; head++)
                    write(partials.data() + i * heads + head, heads, sums.data() + (i * heads + head) * whole,
                          heads * whole, int64_t(end - i), dim, result(piece) + head * dim, row.data());
            }
        }
    }
}

}  // namespace

// Returns 0, or 1 + the index of a sequence whose length or blocks are outside the block table or the cache. The scales
// of a quantized cache, of float8 or int8, are null for another one.
extern "C" int64_t paged_attention(const void* query, const void* keys, const void* values, const int32_t* block_table,
                                   const int32_t* starts, const int32_t* lengths, const void* sinks, void* output,
                                   int dtype,
                                   int64_t sequences, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                   int64_t num_blocks, int64_t block_size, int64_t max_blocks, int64_t query_stride,
                                   int64_t query_head_stride, float scale, float softcap, int causal, int64_t window,
                                   int64_t work, const float* key_scales, const float* value_scales, int float8) {
    Shape shape{sequences,  tokens,     heads,        kv_heads,          head_dim, head_dim,
                block_size, max_blocks, query_stride, query_head_stride, scale,    softcap,
                causal,     window,     work,         nullptr,           kv_heads * head_dim, head_dim,
                kv_heads * head_dim, head_dim};
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
            attend(shape, static_cast<const T*>(query), Pages<T>{keys, key_scales, float8, head_dim},
                   Pages<T>{values, value_scales, float8, head_dim}, block_table, starts, lengths,
                   static_cast<T*>(output));
        };
        run(attend_few<T>);
        run([](const auto&... given) { attend_prompts<T>(given...); });
    });
    return 0;
}

// Attends within sequences without a cache. Returns 0, or 1 + the index of a sequence that is not within the tokens.
extern "C" int64_t packed_attention(const void* query, const void* keys, const void* values, const int32_t* starts,
                                    void* output, int dtype, int64_t sequences, int64_t tokens, int64_t heads,
                                    int64_t kv_heads, int64_t head_dim, int64_t query_stride,
                                    int64_t query_head_stride, int64_t key_stride, int64_t key_head_stride,
                                    int64_t value_stride, int64_t value_head_stride, float scale, int causal) {
    std::vector<int32_t> lengths(sequences);
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
        const int32_t start = starts[sequence], end = starts[sequence + 1];
        if ((sequence == 0 && start != 0) || end < start || end > tokens) return sequence + 1;
        lengths[sequence] = end - start;
    }
    constexpr int64_t kNoWindow = int64_t(1) << 62, kAll = -1;
    const Shape shape{sequences, tokens, heads, kv_heads, head_dim, head_dim, 0, 0, query_stride, query_head_stride, scale,
                      0, causal, kNoWindow, kAll, nullptr, key_stride, key_head_stride, value_stride,
                      value_head_stride};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        T* rows = static_cast<T*>(output);
        const int64_t used = sequences ? starts[sequences] : 0;
        std::fill(rows + used * heads * head_dim, rows + tokens * heads * head_dim, T(0.0f));
        attend_prompts(shape, static_cast<const T*>(query), Pages<T>{keys, nullptr, 0, head_dim},
                       Pages<T>{values, nullptr, 0, head_dim}, nullptr, starts, lengths.data(), rows);
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
#pragma omp parallel for if (tokens * row_bytes > 1 << 17)
    for (int64_t token = 0; token < tokens; token++) {
        std::memcpy(key_cache + slots[token] * row_bytes, key + token * key_stride_bytes, row_bytes);
        std::memcpy(value_cache + slots[token] * row_bytes, value + token * value_stride_bytes, row_bytes);
    }
    return 0;
}

REPLAYABLE(packed_attention)
REPLAYABLE(paged_attention)
REPLAYABLE(store_kv_cache)
