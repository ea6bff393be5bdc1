// Sparse attention over paged caches: an index selects positions, and an attention reads the selected rows.
//
// A token's rows are taken in pieces, which start at the same rows whatever else a step computes, so a token's result
// does not depend on other tokens or on the number of threads. Scores are float32; a result is rounded once.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "elements.h"
#include "panels.h"
#include "replay.h"

namespace {

constexpr int64_t kScored = 1024;   // rows of an index that a thread takes
constexpr int64_t kSlab = 48;       // of which at a time, a multiple of kBand and kLanes
constexpr int64_t kAttended = 512;  // positions that a thread takes
constexpr int64_t kHeld = 128;      // of which at a time, a multiple of kBlock and kWhole; they stay in a second cache
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Pages {
    const int32_t *table, *starts, *lengths;
    int64_t sequences, num_blocks, block_size, max_blocks;

    // Returns the row of the cache at a row of a sequence, or -1 if there is none.
    int64_t row(int64_t sequence, int64_t at) const {
        if (at < 0 || at >= max_blocks * block_size) return -1;
        const int64_t block = table[sequence * max_blocks + at / block_size];
        return block < 0 || block >= num_blocks ? -1 : block * block_size + at % block_size;
    }

    // Returns 0, or 1 + the index of a sequence that has no row for each `group` of its tokens.
    int64_t wrong(int64_t group) const {
        for (int64_t sequence = 0; sequence < sequences; sequence++)
            for (int64_t at = 0; at < lengths[sequence] / group; at = (at / block_size + 1) * block_size)
                if (row(sequence, at) < 0) return sequence + 1;
        return 0;
    }
};

// Writes elements in the type that is multiplied.
template <class From, class To>
inline void convert(const From* from, int64_t count, To* to) {
    for (int64_t i = 0; i < count; i++) to[i] = To(float(from[i]));
}
template <class T>
inline void convert(const T* from, int64_t count, T* to) {
    std::copy_n(from, count, to);
}

template <class T>
constexpr int64_t steps_of(int64_t width) {
    return up(width, Product<T>::kStep) / kPair<T>;
}

// What a thread reuses.
template <class T>
struct Scratch {
    std::vector<const T*> pointers;
    std::vector<T> filled, gathered;
    Buffer<Operand<T>> rows, panels, weights, values;
    std::vector<Multiplication<T>> products;
    std::vector<float> sums, scores;
};

struct Piece {
    int64_t token, begin, end;
};

// A token's rows of the index.
struct Indexed {
    int64_t token, sequence, position, rows, from;  // `from`: where its scores are
};

// Multiplies the rows from `begin` to `end` of an index by heads. Of each few rows, `take(first, count, sums, stride)` gets
// the products, `stride` apart, filled up with zeros to kLanes heads.
template <class T, class Take>
void multiply_rows(const T* query, int64_t head_stride, int64_t heads, int64_t dim, const T* keys, const Pages& pages,
                   int64_t sequence, int64_t begin, int64_t end, Scratch<T>& scratch, Take take) {
    const int64_t steps = steps_of<T>(dim), whole = steps * kPair<T>, panel_size = whole * kPanel;
    const int64_t columns = up(heads, kLanes), stride = up(heads, kWhole);
    scratch.pointers.resize(heads);
    for (int64_t head = 0; head < heads; head++) scratch.pointers[head] = query + head * head_stride;
    scratch.panels.resize(up(heads, kPanel) * whole);
    pack_transposed<T>(scratch.pointers.data(), heads, dim, scratch.filled, scratch.panels.data());
    scratch.rows.assign(kSlab * whole, Operand<T>(0.0f));
    scratch.sums.resize(kSlab * stride);
    for (int64_t first = begin; first < end; first += kSlab) {
        const int64_t count = std::min(kSlab, end - first);
        for (int64_t i = 0; i < count; i++)
            convert(keys + pages.row(sequence, first + i) * dim, dim, scratch.rows.data() + i * whole);
        for (int64_t i = 0; i < count; i += kBand) {
            float* sums = scratch.sums.data() + i * stride;
            multiply_panels<T, false>(scratch.rows.data() + i * whole, whole, scratch.panels.data(), panel_size, 0,
                                      steps, 0, columns, sums, stride);
            for (int64_t r = 0; r < kBand; r++) std::fill(sums + r * stride + heads, sums + r * stride + columns, 0.0f);
        }
        take(first, count, scratch.sums.data(), stride);
    }
}

// scores[i] = sum(weights * relu(heads . rows[i])), for the rows of a piece.
template <class T>
void score(const T* query, int64_t head_stride, const float* weights, int64_t heads, int64_t dim, const T* keys,
           const Pages& pages, int64_t sequence, int64_t begin, int64_t end, float* scores, Scratch<T>& scratch) {
    auto take = [&](int64_t first, int64_t count, const float* sums, int64_t stride) {
        Lanes totals[kSlab] = {};
        for (int64_t r = 0; r < count; r++, sums += stride)
            for (int64_t head = 0; head < heads; head += kLanes) {
                const Lanes dots = load<Lanes>(sums + head);
                totals[r] += load<Lanes>(weights + head) * (dots < 0.0f ? Lanes{} : dots);  // keeps a NaN
            }
        float found[kSlab];
        write_sums<kSlab>(totals, found);
        std::copy_n(found, count, scores + first - begin);
    };
    multiply_rows(query, head_stride, heads, dim, keys, pages, sequence, begin, end, scratch, take);
}

// Writes the largest product of each head with the rows of each group, those of a head `apart` apart.
template <class T>
void score_groups(const T* query, int64_t head_stride, int64_t heads, int64_t dim, const T* keys, const Pages& pages,
                  int64_t sequence, int64_t begin, int64_t end, int64_t group, float* scores, int64_t apart,
                  Scratch<T>& scratch) {
    for (int64_t head = 0; head < heads; head++)
        std::fill(scores + head * apart, scores + head * apart + (end - begin + group - 1) / group, kLowest);
    auto take = [&](int64_t first, int64_t count, const float* sums, int64_t stride) {
        for (int64_t r = 0; r < count; r++, sums += stride)
            for (int64_t head = 0; head < heads; head++) {
                float& most = scores[head * apart + (first - begin + r) / group];
                most = most == most && !(sums[head] <= most) ? sums[head] : most;  // keeps a NaN
            }
    };
    multiply_rows(query, head_stride, heads, dim, keys, pages, sequence, begin, end, scratch, take);
}

// Returns numbers in the order of scores. The largest is that of a NaN.
inline uint32_t rank_of(float score) {
    if (std::isnan(score)) return ~0u;
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    if (bits << 1 == 0) bits = 0;  // -0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Writes the members of the `count` groups with the highest scores in ascending order. Returns their end.
int32_t* choose(const float* scores, int64_t rows, int64_t count, int64_t group, int32_t* to) {
    thread_local std::vector<uint32_t> ranks, order;
    auto take = [&](int64_t row) {
        for (int64_t i = 0; i < group; i++) *to++ = int32_t(row * group + i);
    };
    if (rows <= count) {
        for (int64_t row = 0; row < rows; row++) take(row);
        return to;
    }
    ranks.resize(rows);
    for (int64_t row = 0; row < rows; row++) ranks[row] = rank_of(scores[row]);
    order = ranks;
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), std::greater<uint32_t>());
    const uint32_t last = order[count - 1];
    int64_t ties = count - std::count_if(order.begin(), order.begin() + count, [&](uint32_t each) { return each > last; });
    for (int64_t row = 0; row < rows; row++)
        if (ranks[row] > last || (ranks[row] == last && ties-- > 0)) take(row);
    return to;
}

// What a piece gives a head: sums of values, the weights of which are relative to the largest score.
struct Partial {
    float largest, total;
};

// Heads that attend to the same rows. A head's query is in two parts, `rope_dim` may be 0.
struct Heads {
    int64_t count, rank, rope_dim, query_head_stride, rope_head_stride;
    float scale;
};

// The two parts of a row's key, and its value; null for the first part.
template <class T>
struct Row {
    const T *first, *second, *value;
};

// Writes the sums and a Partial of each head for `count` rows, up to kAttended. Sums are up(rank, kLanes) apart. `row_at`
// returns a Row.
template <class T, class RowAt>
void attend(const Heads& shape, const T* query, const T* query_rope, int64_t count, RowAt row_at, float* sums,
            Partial* partials, Scratch<T>& scratch) {
    const int64_t width = shape.rank + shape.rope_dim, apart = up(shape.rank, kLanes), rows = up(shape.count, kBand);
    const int64_t groups = (shape.count + kOthers - 1) / kOthers;
    scratch.products.resize(groups);
    scratch.gathered.resize(std::max(kOthers, kHeld) * width);
    for (int64_t group = 0; group < groups; group++) {
        const T* others[kOthers];
        const int64_t heads = std::min(kOthers, shape.count - group * kOthers);
        for (int64_t i = 0; i < heads; i++) {
            T* to = scratch.gathered.data() + i * width;
            others[i] = to;
            to = std::copy_n(query + (group * kOthers + i) * shape.query_head_stride, shape.rank, to);
            std::copy_n(query_rope + (group * kOthers + i) * shape.rope_head_stride, shape.rope_dim, to);
        }
        scratch.products[group].pack_others(others, heads, width);
    }
    scratch.pointers.resize(kHeld);
    scratch.values.resize(up(shape.rank, kPanel) / kPanel * kHeld * kPanel);
    scratch.weights.resize(rows * kHeld);  // those past the last head are not used
    scratch.sums.assign(rows * apart, 0.0f);
    scratch.scores.resize(shape.count * kHeld);
    std::fill(partials, partials + shape.count, Partial{kLowest, 0.0f});
    for (int64_t first = 0; first < count; first += kHeld) {
        const int64_t held = std::min(kHeld, count - first), whole = up(held, kWhole);
        T* to = scratch.gathered.data();
        for (int64_t i = 0; i < held; i++) {
            const Row<T> row = row_at(first + i);
            scratch.pointers[i] = row.value ? row.value : to;
            to = std::copy_n(row.first, shape.rank, to);
            to = std::copy_n(row.second, shape.rope_dim, to);
        }
        for (int64_t block = 0; block < held; block += kBlock) {
            const int64_t taken_rows = std::min(kBlock, held - block);
            for (int64_t i = first + kHeld + block; i < std::min(first + kHeld + block + kBlock, count); i++) {
                const Row<T> row = row_at(i);
                prefetch(row.first, shape.rank), prefetch(row.second, shape.rope_dim);
            }
            for (int64_t group = 0; group < groups; group++) {
                float dots[kOthers * kBlock];
                const T* from = scratch.gathered.data() + block * width;
                scratch.products[group].run(from, taken_rows, dots, from);
                const int64_t heads = std::min(kOthers, shape.count - group * kOthers);
                for (int64_t i = 0; i < heads; i++)
                    std::copy_n(dots + i * kBlock, taken_rows, scratch.scores.data() + (group * kOthers + i) * kHeld + block);
            }
        }
        for (int64_t head = 0; head < shape.count; head++) {
            float* line = scratch.scores.data() + head * kHeld;
            Partial& partial = partials[head];
            for (int64_t k = 0; k < held; k++) line[k] *= shape.scale;
            std::fill(line + held, line + whole, kLowest);
            Lanes most = Lanes{} + partial.largest, total = {};
            for (int64_t k = 0; k < whole; k += kLanes) {
                const Lanes scores = load<Lanes>(line + k);
                most = scores > most ? scores : most;
            }
            float largest = partial.largest;
            for (int lane = 0; lane < kLanes; lane++) largest = std::max(largest, most[lane]);
            const float base = largest == kLowest ? 0.0f : largest;  // -inf less -inf would be NaN
            for (int64_t k = 0; k < whole; k++) line[k] = exponential(line[k] - base);
            for (int64_t k = 0; k < whole; k += kLanes) total += load<Lanes>(line + k);
            if (largest != partial.largest) {
                const float factor = exponential(partial.largest - largest);
                partial = {largest, partial.total * factor};
                for (int64_t d = 0; d < apart; d++) scratch.sums[head * apart + d] *= factor;
            }
            for (int lane = 0; lane < kLanes; lane++) partial.total += total[lane];
            convert(line, whole, scratch.weights.data() + head * kHeld);  // rounds pairs of bfloat16
        }
        pack_rows<T>(scratch.pointers.data(), held, shape.rank, kHeld * kPanel, scratch.values.data());
        const int64_t steps = up(held, kPair<T>) / kPair<T>;
        for (int64_t head = 0; head < rows; head += kBand)
            multiply_panels<T, true>(scratch.weights.data() + head * kHeld, kHeld, scratch.values.data(), kHeld * kPanel, 0,
                                     steps, 0, apart, scratch.sums.data() + head * apart, apart);
    }
    std::copy_n(scratch.sums.data(), shape.count * apart, sums);
}

// Attends with the heads of each unit, such as a token, to `counts[unit]` rows, and writes `[units, heads, rank]`.
// `query_at` returns the two parts of a unit's queries, `row_at` a Row of a unit. A head's sink is a score without a value.
template <class T, class QueryAt, class RowAt>
void attend_all(const Heads& shape, const std::vector<int64_t>& counts, QueryAt query_at, RowAt row_at,
                const float* sinks, T* output) {
    const int64_t units = counts.size(), heads = shape.count, rank = shape.rank, apart = up(rank, kLanes);
    const int64_t at_once = std::min<int64_t>(units, omp_get_max_threads());
    const int64_t longest = units ? *std::max_element(counts.begin(), counts.end()) : 0;
    const int64_t most = (longest + kAttended - 1) / kAttended;
    std::vector<float> sums(at_once * most * heads * apart);
    std::vector<Partial> partials(at_once * most * heads);
    std::vector<Piece> pieces;
    for (int64_t first = 0; first < units; first += at_once) {
        const int64_t last = std::min(units, first + at_once);
        pieces.clear();
        for (int64_t unit = first; unit < last; unit++)
            for (int64_t begin = 0; begin < counts[unit]; begin += kAttended)
                pieces.push_back({unit, begin, std::min(begin + kAttended, counts[unit])});
#pragma omp parallel if (pieces.size() > 1)
        {
            thread_local Scratch<T> scratch;
            thread_local std::vector<float> row;
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < pieces.size(); i++) {
                const Piece& piece = pieces[i];
                const auto [query, query_rope] = query_at(piece.token);
                const int64_t place = ((piece.token - first) * most + piece.begin / kAttended) * heads;
                attend(shape, query, query_rope, piece.end - piece.begin,
                       [&](int64_t at) { return row_at(piece.token, piece.begin + at); }, sums.data() + place * apart,
                       partials.data() + place, scratch);
            }
            row.resize(apart);
#pragma omp for schedule(static)
            for (int64_t each = 0; each < (last - first) * heads; each++) {
                const int64_t unit = first + each / heads, head = each % heads;
                const int64_t count = (counts[unit] + kAttended - 1) / kAttended;
                const int64_t place = (unit - first) * most * heads + head;
                float largest = count && sinks ? sinks[head] : kLowest, total = 0;
                for (int64_t i = 0; i < count; i++) largest = std::max(largest, partials[place + i * heads].largest);
                if (count && sinks) total = exponential(sinks[head] - largest);
                std::fill(row.begin(), row.end(), 0.0f);
                for (int64_t i = 0; i < count; i++) {
                    const Partial& partial = partials[place + i * heads];
                    const float factor = partial.largest == largest ? 1.0f : exponential(partial.largest - largest);
                    const float* from = sums.data() + (place + i * heads) * apart;
                    total += factor * partial.total;
                    for (int64_t d = 0; d < rank; d++) row[d] += factor * from[d];
                }
                const float share = count ? 1.0f / total : 0.0f;
                T* to = output + (unit * heads + head) * rank;
                for (int64_t d = 0; d < rank; d++) to[d] = T(row[d] * share);
            }
        }
    }
}

// Where the new tokens of sequences are.
struct Tokens {
    std::vector<int64_t> sequence, position;

    // A token of no sequence has the position -1.
    Tokens(const Pages& pages, int64_t tokens) : sequence(tokens), position(tokens, -1) {
        for (int64_t token = 0, of = 0; token < tokens; token++) {
            while (of < pages.sequences && pages.starts[of + 1] <= token) of++;
            sequence[token] = of;
            if (of < pages.sequences && pages.lengths && pages.lengths[of] > 0)
                position[token] = pages.lengths[of] - pages.starts[of + 1] + token;
        }
    }
};

// Returns how many of the first of `most` positions are not negative, or -1 if one of these is outside the cache.
int64_t count_of(const Pages& pages, int64_t sequence, const int32_t* positions, int64_t most) {
    int64_t count = 0;
    for (; count < most && positions[count] >= 0; count++)
        if (sequence >= pages.sequences || pages.row(sequence, positions[count]) < 0) return -1;
    return count;
}

}  // namespace

// Returns 0, or 1 + the index of a sequence whose rows are outside the block table or the cache.
extern "C" int64_t select_keys(const void* query, const void* weights, const void* keys, const int32_t* table,
                               const int32_t* starts, const int32_t* lengths, int32_t* selected, int dtype,
                               int weights_dtype, int64_t sequences, int64_t tokens, int64_t heads, int64_t dim, int64_t num_blocks,
                               int64_t block_size, int64_t max_blocks, int64_t query_stride, int64_t head_stride,
                               int64_t budget, int64_t group) {
    const Pages pages{table, starts, lengths, sequences, num_blocks, block_size, max_blocks};
    if (const int64_t wrong = pages.wrong(group)) return wrong;
    const int64_t padded = up(heads, kLanes), columns = budget + group - 1, count = budget / group;
    const int64_t at_once = 4 * omp_get_max_threads();
    std::vector<float> wide(tokens * padded), scores;
    with_type(weights_dtype, [&](auto type) {
        for (int64_t token = 0; token < tokens; token++)
            convert(static_cast<const decltype(type)*>(weights) + token * heads, heads, wide.data() + token * padded);
    });
    std::vector<Indexed> taken;
    std::vector<Piece> pieces;
    for (int64_t first = 0, sequence = 0; first < tokens; first += at_once) {
        int64_t size = 0;
        taken.clear(), pieces.clear();
        for (int64_t token = first; token < std::min(tokens, first + at_once); token++) {
            while (sequence < sequences && starts[sequence + 1] <= token) sequence++;
            const bool any = sequence < sequences && lengths[sequence] > 0;
            const int64_t position = any ? lengths[sequence] - starts[sequence + 1] + token : -1;
            const int64_t rows = (std::max<int64_t>(position, -1) + 1) / group;
            taken.push_back({token, sequence, position, rows, size});
            if (rows <= count) continue;
            for (int64_t begin = 0; begin < rows; begin += kScored)
                pieces.push_back({int64_t(taken.size()) - 1, begin, std::min(begin + kScored, rows)});
            size += rows;
        }
        scores.resize(size);
#pragma omp parallel if (pieces.size() > 1)
        {
            with_type(dtype, [&](auto type) {
                using T = decltype(type);
                thread_local Scratch<T> scratch;
#pragma omp for schedule(dynamic)
                for (size_t i = 0; i < pieces.size(); i++) {
                    const Piece& piece = pieces[i];
                    const Indexed& of = taken[piece.token];
                    score(static_cast<const T*>(query) + of.token * query_stride, head_stride,
                          wide.data() + of.token * padded, heads, dim, static_cast<const T*>(keys), pages, of.sequence,
                          piece.begin, piece.end, scores.data() + of.from + piece.begin, scratch);
                }
            });
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < taken.size(); i++) {
                const Indexed& of = taken[i];
                int32_t *row = selected + of.token * columns, *end = row + columns;
                row = choose(scores.data() + of.from, of.rows, count, group, row);
                for (int64_t at = of.rows * group; at <= of.position; at++) *row++ = int32_t(at);
                std::fill(row, end, -1);
            }
        }
    }
    return 0;
}

// As select_keys. Each head selects `top` blocks of `group` positions, among them the last `local`.
extern "C" int64_t select_blocks(const void* query, const void* keys, const int32_t* table, const int32_t* starts,
                                 const int32_t* lengths, int32_t* selected, int dtype, int64_t sequences,
                                 int64_t tokens, int64_t heads, int64_t dim, int64_t num_blocks, int64_t block_size,
                                 int64_t max_blocks, int64_t query_stride, int64_t head_stride, int64_t top,
                                 int64_t group, int64_t local) {
    const Pages pages{table, starts, lengths, sequences, num_blocks, block_size, max_blocks};
    if (const int64_t wrong = pages.wrong(1)) return wrong;
    const Tokens of(pages, tokens);
    const int64_t at_once = 4 * omp_get_max_threads(), scored = std::max<int64_t>(kScored / group, 1) * group;
    std::vector<float> scores;
    std::vector<Indexed> taken;
    std::vector<Piece> pieces;
    for (int64_t first = 0; first < tokens; first += at_once) {
        int64_t size = 0;
        taken.clear(), pieces.clear();
        for (int64_t token = first; token < std::min(tokens, first + at_once); token++) {
            const int64_t rows = of.position[token] + 1, blocks = (rows + group - 1) / group;
            taken.push_back({token, of.sequence[token], of.position[token], blocks, size});
            if (blocks <= top) continue;
            for (int64_t begin = 0; begin < rows; begin += scored)
                pieces.push_back({int64_t(taken.size()) - 1, begin, std::min(begin + scored, rows)});
            size += heads * blocks;
        }
        scores.resize(size);
#pragma omp parallel if (pieces.size() > 1)
        {
            with_type(dtype, [&](auto type) {
                using T = decltype(type);
                thread_local Scratch<T> scratch;
#pragma omp for schedule(dynamic)
                for (size_t i = 0; i < pieces.size(); i++) {
                    const Piece& piece = pieces[i];
                    const Indexed& token = taken[piece.token];
                    score_groups(static_cast<const T*>(query) + token.token * query_stride, head_stride, heads, dim,
                                 static_cast<const T*>(keys), pages, token.sequence, piece.begin, piece.end, group,
                                 scores.data() + token.from + piece.begin / group, token.rows, scratch);
                }
            });
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < taken.size() * heads; i++) {
                const Indexed& token = taken[i / heads];
                int32_t *row = selected + (token.token * heads + i % heads) * top * group, *end = row + top * group;
                float* own = scores.data() + token.from + i % heads * token.rows;
                if (token.rows > top)
                    std::fill(own + token.rows - local, own + token.rows, std::numeric_limits<float>::infinity());
                int32_t* to = choose(own, token.rows, top, group, row);
                while (to > row && to[-1] > token.position) to--;
                std::fill(to, end, -1);
            }
        }
    }
    return 0;
}

// Returns 0, or 1 + the index of a token with a position that is outside its sequence's blocks or the cache. Without
// positions, a token attends to all up to its own, which the lengths give.
extern "C" int64_t attend_selected(const void* query, const void* query_rope, const void* latents, const void* ropes,
                                   const int32_t* positions, const int32_t* table, const int32_t* starts,
                                   const int32_t* lengths, void* output,
                                   int dtype, int64_t sequences, int64_t tokens, int64_t heads, int64_t rank,
                                   int64_t rope_dim, int64_t num_blocks, int64_t block_size, int64_t max_blocks,
                                   int64_t selected, int64_t query_stride, int64_t query_head_stride,
                                   int64_t rope_stride, int64_t rope_head_stride, float scale) {
    const Pages pages{table, starts, lengths, sequences, num_blocks, block_size, max_blocks};
    const Heads shape{heads, rank, rope_dim, query_head_stride, rope_head_stride, scale};
    const Tokens of(pages, tokens);
    std::vector<int64_t> counts(tokens);
    for (int64_t token = 0; token < tokens; token++) {
        if (positions) counts[token] = count_of(pages, of.sequence[token], positions + token * selected, selected);
        else
            for (int64_t& at = counts[token]; at <= of.position[token]; at++)
                if (pages.row(of.sequence[token], at) < 0) return token + 1;
        if (counts[token] < 0) return token + 1;
    }
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        auto query_at = [&](int64_t token) {
            return std::pair(static_cast<const T*>(query) + token * query_stride,
                             static_cast<const T*>(query_rope) + token * rope_stride);
        };
        auto row_at = [&](int64_t token, int64_t at) {
            const int64_t from = pages.row(of.sequence[token], positions ? positions[token * selected + at] : at);
            return Row<T>{static_cast<const T*>(latents) + from * rank, static_cast<const T*>(ropes) + from * rope_dim,
                          nullptr};
        };
        attend_all<T>(shape, counts, query_at, row_at, nullptr, static_cast<T*>(output));
    });
    return 0;
}

// Returns 0, or 1 + the index of a token that attends outside its sequence's blocks or the caches. A token attends to
// the last `window` tokens, and beside them to `selected` entries of groups, or, without entries, to those of all groups
// that are complete. A block has as many entries as it has groups.
extern "C" int64_t attend_compressed(const void* query, const void* latents, const void* compressed,
                                     const int32_t* entries, const void* sinks, const int32_t* table,
                                     const int32_t* starts, const int32_t* lengths, void* output, int dtype,
                                     int64_t sequences, int64_t tokens, int64_t heads, int64_t dim, int64_t num_blocks,
                                     int64_t block_size, int64_t max_blocks, int64_t selected, int64_t group,
                                     int64_t window, int64_t query_stride, int64_t head_stride, float scale) {
    const Pages pages{table, starts, lengths, sequences, num_blocks, block_size, max_blocks};
    const Pages groups{table, starts, lengths, sequences, num_blocks, block_size / group, max_blocks};
    const Heads shape{heads, dim, 0, head_stride, 0, scale};
    const Tokens of(pages, tokens);
    std::vector<int64_t> counts(tokens), near(tokens);
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t end = of.position[token] + 1;
        near[token] = std::min(window, end);
        for (int64_t at = end - near[token]; at < end; at++)
            if (pages.row(of.sequence[token], at) < 0) return token + 1;
        if (entries) {
            counts[token] = end ? count_of(groups, of.sequence[token], entries + token * selected, selected) : 0;
        } else {
            counts[token] = end / group;
            for (int64_t at = 0; at < counts[token]; at++)
                if (groups.row(of.sequence[token], at) < 0) return token + 1;
        }
        if (counts[token] < 0) return token + 1;
        counts[token] += near[token];
    }
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        std::vector<float> wide(heads);
        convert(static_cast<const T*>(sinks), heads, wide.data());
        auto query_at = [&](int64_t token) {
            const T* from = static_cast<const T*>(query) + token * query_stride;
            return std::pair(from, from);
        };
        auto row_at = [&](int64_t token, int64_t at) {
            const int64_t first = of.position[token] + 1 - near[token], entry = at - near[token];
            const T* from = entry < 0
                ? static_cast<const T*>(latents) + pages.row(of.sequence[token], first + at) * dim
                : static_cast<const T*>(compressed) +
                      groups.row(of.sequence[token], entries ? entries[token * selected + entry] : entry) * dim;
            return Row<T>{from, from, nullptr};
        };
        attend_all<T>(shape, counts, query_at, row_at, wide.data(), static_cast<T*>(output));
    });
    return 0;
}

// Returns 0, or 1 + the index of a token with a position that is outside its sequence's blocks or the cache. Each of
// `choices` groups of key heads has its own positions.
extern "C" int64_t attend_chosen(const void* query, const void* keys, const void* values, const int32_t* positions,
                                 const int32_t* table, const int32_t* starts, void* output, int dtype,
                                 int64_t sequences, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                                 int64_t num_blocks, int64_t block_size, int64_t max_blocks, int64_t choices,
                                 int64_t selected, int64_t query_stride, int64_t head_stride, float scale) {
    const Pages pages{table, starts, nullptr, sequences, num_blocks, block_size, max_blocks};
    const Heads shape{heads / kv_heads, dim, 0, head_stride, 0, scale};
    const Tokens of(pages, tokens);
    auto chosen = [&](int64_t unit) {
        return positions + (unit / kv_heads * choices + unit % kv_heads / (kv_heads / choices)) * selected;
    };
    std::vector<int64_t> counts(tokens * kv_heads);
    for (int64_t unit = 0; unit < tokens * kv_heads; unit++) {
        counts[unit] = count_of(pages, of.sequence[unit / kv_heads], chosen(unit), selected);
        if (counts[unit] < 0) return unit / kv_heads + 1;
    }
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        auto query_at = [&](int64_t unit) {
            const T* from = static_cast<const T*>(query) + unit / kv_heads * query_stride +
                            unit % kv_heads * shape.count * head_stride;
            return std::pair(from, from);
        };
        auto row_at = [&](int64_t unit, int64_t at) {
            const int64_t from = pages.row(of.sequence[unit / kv_heads], chosen(unit)[at]) * kv_heads + unit % kv_heads;
            const T* key = static_cast<const T*>(keys) + from * dim;
            return Row<T>{key, key, static_cast<const T*>(values) + from * dim};
        };
        attend_all<T>(shape, counts, query_at, row_at, nullptr, static_cast<T*>(output));
    });
    return 0;
}

REPLAYABLE(attend_chosen)
REPLAYABLE(attend_compressed)
REPLAYABLE(attend_selected)
REPLAYABLE(select_blocks)
REPLAYABLE(select_keys)
