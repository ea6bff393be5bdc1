// Attention of many queries over a paged cache, as in prompts, or without a cache, as in encoders.
//
// A tile of a key head's keys and values is packed once for all queries of a task. For a few rows at a time, two matrix
// products with a softmax between them then run in the CPU cache. The largest score and the sum of a row are carried
// from tile to tile, so that scores take no memory that grows with the prompt. Scores are float32. Weights are rounded
// to bfloat16 where the CPU multiplies pairs of them. A weight is 0 where a row does not see a value, so a tile whose
// values are not all finite is weighed row by row.
#include <omp.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "attention.h"
#include "elements.h"
#include "panels.h"
#include "products.h"

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

constexpr int64_t kKeys = 512;      // in a tile; with its values, it stays in a CPU's second cache
constexpr int64_t kTaskRows = 384;  // of queries; more rows pack tiles less often, fewer divide the work better

// Replaces a row's scores from `first` to `last`, whole vectors, with weights: 0 outside the span. `largest` is that of
// the adjusted scores of earlier tiles; this tile's are added. Returns the sum of the weights.
template <class T>
float softmax(const Shape& shape, float* scores, int64_t first, int64_t last, Span span, float& largest,
              Operand<T>* weights) {
    adjust(shape, scores + first, last - first);
    std::fill(scores + first, scores + span.begin, kLowest);
    std::fill(scores + span.end, scores + last, kLowest);
    Lanes top = Lanes{} + largest;
    for (int64_t i = first; i < last; i += kLanes) {
        const Lanes found = load<Lanes>(scores + i);
        top = found > top ? found : top;  // not a NaN, which comes out through its weight
    }
    for (int lane = 0; lane < kLanes; lane++) largest = top[lane] > largest ? top[lane] : largest;
    const float base = largest == kLowest ? 0.0f : largest;  // -inf less -inf would be NaN
    float total = 0;
    for (int64_t i = first; i < last; i++) total += scores[i] = exponential(scores[i] - base);
    if constexpr (kPair<T> == 2)
        for (int64_t i = first; i < last; i += kLanes) Product<T>::round(load<Lanes>(scores + i), weights + i);
    return total;
}

using Halves = int16_t __attribute__((vector_size(64)));
using Singles = int32_t __attribute__((vector_size(64)));

// Some queries of a sequence, for one key head.
struct Task {
    int64_t sequence, kv_head, first, last;
};

// Runs tasks, one after another. A row is a query of one head; heads of a query follow one another. `Band` rows are
// multiplied at a time: kTileBand of them with tiles.
template <class T, int64_t Band>
class Prompt {
  public:
    Prompt(const Shape& shape, const T* query, const Pages<T>& keys, const Pages<T>& values, T* output,
           const KeyRange& range)
        : shape_(shape), query_(query), keys_(keys), values_(values), output_(output), range_(range) {}

    // The sums over earlier keys are `carried`, if there are any, and those over all keys so far if there are more.
    void run(const Task& task, const int32_t* blocks, int64_t start, int64_t end, int64_t length, RowSums* carried) {
        const int64_t position = length - (end - start);  // of the first query
        group_ = shape_.heads / shape_.kv_heads, rows_ = (task.last - task.first) * group_;
        spans_.clear();
        for (int64_t row = 0; row < up(rows_, Band); row++)  // past the last row, its span again
            spans_.push_back(visible(shape_, position + task.first + std::min(row, rows_ - 1) / group_, length));
        const int64_t first_head = (start + task.first) * shape_.heads + task.kv_head * group_;
        pack_queries(start + task.first, task.kv_head * group_);
        const int64_t last = std::min(spans_.back().end, range_.end);
        if (range_.begin > 0) std::swap(sums_, *carried);
        const PanelShapes<Band> shapes;
        for (int64_t tile = std::max(spans_[0].begin, range_.begin); tile < last; tile += kKeys) {
            pack_tile(blocks, start - range_.begin, task.kv_head, tile, std::min(kKeys, last - tile));
            for (int64_t row = 0; row < rows_; row += Band) attend(row, tile, std::min(kKeys, last - tile));
        }
        if (range_.end < length) return std::swap(sums_, *carried);
        for (int64_t row = 0; row < rows_; row++)
            write(row, output_ + (first_head + row / group_ * shape_.heads + row % group_) * shape_.value_dim);
    }

  private:
    void pack_queries(int64_t first, int64_t head) {
        const int64_t padded = spans_.size();
        queries_.resize(padded * width_);
        std::fill(queries_.begin() + rows_ * width_, queries_.end(), Operand<T>(0.0f));
        for (int64_t row = 0; row < rows_; row++) {
            const T* from = query_ + (first + row / group_) * shape_.query_stride +
                            (head + row % group_) * shape_.query_head_stride;
            prefetch(from + kAhead * shape_.query_stride, shape_.head_dim);
            Operand<T>* to = std::copy_n(from, shape_.head_dim, queries_.data() + row * width_);
            std::fill(to, queries_.data() + (row + 1) * width_, Operand<T>(0.0f));
        }
        sums_.values.assign(padded * columns_, 0.0f);
        sums_.weights.assign(padded, 0.0f), sums_.largest.assign(padded, kLowest);
        for (int64_t row = 0; shape_.sinks && row < rows_; row++)
            sums_.weights[row] = 1.0f, sums_.largest[row] = shape_.sinks[head + row % group_];
    }

    void pack_tile(const int32_t* blocks, int64_t start, int64_t kv_head, int64_t first, int64_t count) {
        const int64_t size = shape_.block_size;
        const T *keys[kKeys], *values[kKeys];
        for (int64_t i = 0; i < count; i++) {
            const int64_t slot = blocks ? blocks[(first + i) / size] * size + (first + i) % size : start + first + i;
            keys[i] = row_of(keys_, slot * shape_.key_stride + kv_head * shape_.key_head_stride, wide_keys_, i);
            values[i] = row_of(values_, slot * shape_.value_stride + kv_head * shape_.value_head_stride, wide_values_, i);
        }
        pack_transposed(keys, count, shape_.head_dim, copies_, tile_keys_.get());
        pack_rows(values, count, shape_.value_dim, kKeys * kPanel, tile_values_.get());
        const bool window = spans_.back().begin > first;
        together_ = finite(window ? 0 : std::clamp<int64_t>(spans_[0].end - first, 0, count), count);
    }

    // Returns whether the values of the tile's positions from `first` to `last` are finite.
    bool finite(int64_t first, int64_t last) const {
        using Bits = std::conditional_t<sizeof(Operand<T>) == 2, int16_t, int32_t>;
        using Vector = std::conditional_t<sizeof(Operand<T>) == 2, Halves, Singles>;
        constexpr Bits kSize = std::numeric_limits<Bits>::max(), kInfinity = sizeof(Bits) == 2 ? 0x7f80 : 0x7f800000;
        constexpr int64_t kAtOnce = 64 / sizeof(Bits);
        Vector most = {};  // sizes are in the order of their bits, and what is not finite comes last
        Bits largest = 0;
        for (int64_t column = 0; column < shape_.value_dim; column += kPanel)
            for (int64_t position = first / kPair<T> * kPair<T>; position < last; position += kPair<T>) {
                const Operand<T>* from = value_at(position, column);
                const int64_t taken = std::min(kPanel, shape_.value_dim - column) * kPair<T>;
                int64_t i = 0;
                for (; i + kAtOnce <= taken; i += kAtOnce) {
                    const Vector size = load<Vector>(from + i) & kSize;
                    most = size > most ? size : most;
                }
                for (; i < taken; i++) largest = std::max<Bits>(largest, load<Bits>(from + i) & kSize);
            }
        for (int64_t lane = 0; lane < kAtOnce; lane++) largest = std::max<Bits>(largest, most[lane]);
        return largest < kInfinity;
    }

    // Returns the place of a value's element in the tile; others of the panel follow kPair<T> apart.
    const Operand<T>* value_at(int64_t position, int64_t column) const {
        const int64_t within = position % kPair<T>, step = position - within;
        return tile_values_.get() + (column / kPanel * kKeys + step) * kPanel + column % kPanel * kPair<T> + within;
    }

    // Returns row `i` of a tile, widened if it is quantized.
    const T* row_of(const Pages<T>& pages, int64_t at, std::vector<T>& wide, int64_t i) const {
        if (!pages.scales) return static_cast<const T*>(pages.numbers) + at;
        wide.resize(kKeys * pages.dim);
        T* to = wide.data() + i * pages.dim;
        pages.widen(at, to);
        return to;
    }

    // Adds a tile of `count` positions from `tile` on to a band of rows.
    void attend(int64_t row, int64_t tile, int64_t count) {
        // All positions that a row of the band sees.
        const int64_t first = std::max<int64_t>(0, spans_[row].begin - tile) / kPanel * kPanel;
        const int64_t end = std::min(spans_[row + Band - 1].end - tile, count), last = up(end, kWhole);
        if (first >= end) return;
        multiply_band<T, Band, false>(queries_.data() + row * width_, width_, tile_keys_.get(), width_ * kPanel, 0,
                                      width_ / kPair<T>, first, last, scores_, kKeys);
        for (int64_t r = 0; r < Band; r++) {
            float& largest = sums_.largest[row + r];
            const float before = largest;
            const Span span{std::clamp(spans_[row + r].begin - tile, first, end),
                            std::clamp(spans_[row + r].end - tile, first, end)};
            const float total = softmax<T>(shape_, scores_ + r * kKeys, first, last, span, largest,
                                           weights() + r * kKeys);
            if (largest != before) rescale(row + r, exponential(before - largest));
            sums_.weights[row + r] += total;
            if (!together_) weigh(row + r, span, weights() + r * kKeys);
        }
        if (!together_) return;
        const int64_t seen = Band == kBand ? up(end, kPair<T>) : last;
        multiply_band<T, Band, true>(weights(), kKeys, tile_values_.get(), kKeys * kPanel, first / kPair<T>,
                                     seen / kPair<T>, 0, up(shape_.value_dim, kWhole), sums_.values.data() + row * columns_,
                                     columns_);
    }

    // Adds the values that a row sees.
    void weigh(int64_t row, Span span, const Operand<T>* weights) {
        float* sums = sums_.values.data() + row * columns_;
        for (int64_t position = span.begin; position < span.end; position++)
            for (int64_t column = 0; column < shape_.value_dim; column++)
                sums[column] += float(weights[position]) * float(*value_at(position, column));
    }

    void rescale(int64_t row, float factor) {
        sums_.weights[row] *= factor;
        for (int64_t i = 0; i < columns_; i++) sums_.values[row * columns_ + i] *= factor;
    }

    void write(int64_t row, T* to) const {
        const float* sums = sums_.values.data() + row * columns_;
        const float share = spans_[row].begin == spans_[row].end ? 0.0f : 1.0f / sums_.weights[row];
        int64_t i = 0;
        for (; i + kLanes <= shape_.value_dim; i += kLanes) narrow(load<Lanes>(sums + i) * share, to + i);
        for (; i < shape_.value_dim; i++) to[i] = T(sums[i] * share);
    }

    // Weights take the place of scores, unless they are narrower.
    Operand<T>* weights() {
        if constexpr (kPair<T> == 2)
            return narrow_;
        else
            return scores_;
    }

    const Shape shape_;
    const T* query_;
    const Pages<T> keys_, values_;
    T* output_;
    const KeyRange range_;
    const int64_t width_ = up(shape_.head_dim, Product<T>::kStep), columns_ = up(shape_.value_dim, kPanel);
    int64_t group_, rows_;
    bool together_;  // whether the rows of a band are weighed together
    std::vector<Span> spans_;
    Buffer<Operand<T>> queries_;
    const std::unique_ptr<Operand<T>[]> tile_keys_{new Operand<T>[kKeys * width_]};
    const std::unique_ptr<Operand<T>[]> tile_values_{new Operand<T>[kKeys * columns_]};
    RowSums sums_;
    std::vector<T> copies_, wide_keys_, wide_values_;
    alignas(64) float scores_[Band * kKeys];
    alignas(64) Operand<T> narrow_[kPair<T> == 2 ? Band * kKeys : 1];
};

}  // namespace

template <class T>
void attend_prompts(const Shape& shape, const T* query, const Pages<T>& keys, const Pages<T>& values,
                    const int32_t* block_table, const int32_t* starts, const int32_t* lengths, T* output,
                    const KeyRange& range, std::vector<RowSums>* carried) {
    const int64_t queries = std::max<int64_t>(1, kTaskRows / (shape.heads / shape.kv_heads));
    std::vector<Task> tasks;
    for (int64_t sequence = 0; sequence < shape.sequences; sequence++) {
        if (!shape.many(starts, lengths, sequence)) continue;
        const int64_t count = starts[sequence + 1] - starts[sequence];
        for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head++)
            for (int64_t first = 0; first < count; first += queries)
                tasks.push_back({sequence, kv_head, first, std::min(first + queries, count)});
    }
    if (tasks.empty()) return;
    if (carried) carried->resize(tasks.size());
    with_band<T>([&](auto band) {
#pragma omp parallel
        {
            Prompt<T, band> prompt(shape, query, keys, values, output, range);
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < tasks.size(); i++) {
                const int64_t sequence = tasks[i].sequence;
                prompt.run(tasks[i], block_table ? block_table + sequence * shape.max_blocks : nullptr,
                           starts[sequence], starts[sequence + 1], lengths[sequence],
                           carried ? &(*carried)[i] : nullptr);
            }
        }
    });
}

#define INSTANTIATE(T)                                                                                                 \
    template void attend_prompts(const Shape&, const T*, const Pages<T>&, const Pages<T>&, const int32_t*,             \
                                 const int32_t*, const int32_t*, T*, const KeyRange&, std::vector<RowSums>*);
INSTANTIATE(float)
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
