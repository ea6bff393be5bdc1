// Writes to and reads from key-value caches.
#include "cache.h"

namespace emulator {

// Returns a cache of 4 dimensions unchanged, because its strides may not allow a view.
at::Tensor rows_of_blocks(const at::Tensor& cache) {
    return cache.dim() == 4 ? cache : cache.view({cache.size(0), cache.size(1), -1, cache.size(-1)});
}

at::Tensor rows_of_fractal_blocks(const at::Tensor& cache) {
    auto blocks = cache.dim() == 4 ? cache : cache.view({cache.size(0), cache.size(1), cache.size(-2), cache.size(-1)});
    return blocks.transpose(1, 2);
}

UNDEFINED("a kernel would write outside the cache");
void write_slots(const at::Tensor& cache_rows, const at::Tensor& rows, const at::Tensor& slots) {
    int64_t block_size = cache_rows.size(1), capacity = cache_rows.size(0) * block_size;
    auto wide = slots.reshape(-1).to(at::kLong);
    if (wide.numel() == 0) return;
    if (int64_t most = wide.max().item<int64_t>(); most >= capacity)
        throw std::runtime_error("slots must be less than the cache's capacity, " + std::to_string(capacity) +
                                 ", but one is " + std::to_string(most));
    auto values = rows.reshape({rows.size(0), cache_rows.size(2), cache_rows.size(3)}).to(cache_rows.scalar_type());
    auto kept = wide >= 0;
    if (!kept.all().item<bool>()) wide = wide.masked_select(kept), values = values.index({kept});
    auto cache = cache_rows;
    cache.index_put_({at::div(wide, block_size, "floor"), at::remainder(wide, block_size)}, values);
}

DOCUMENTED(
    "ops-transformer: attention/scatter_pa_kv_cache/docs/aclnnScatterPaKvCache.md"
    "; ops-transformer: posembedding/kv_rms_norm_rope_cache/docs/aclnnKvRmsNormRopeCache.md");
void check_slots(const In& slots, int64_t rows) {
    if (slots.dtype() != at::kInt && slots.dtype() != at::kLong)
        throw Refused(std::string("slots must be int32 or int64, not ") + c10::toString(slots.dtype()));
    if (slots.dim() != 1 || slots.size(0) != rows)
        throw Refused("slots must have shape [" + std::to_string(rows) + "], one slot for each token, not " +
                      c10::str(slots.sizes()));
}

}  // namespace emulator

namespace {

using namespace emulator;


DOCUMENTED("ops-nn: index/scatter_nd_update/docs/aclnnScatterNdUpdate.md");
void check_nd_update(InOut self, In indices, In updates) {
    if (indices.dtype() != at::kInt && indices.dtype() != at::kLong)
        throw Refused(std::string("indices must be int32 or int64, not ") + c10::toString(indices.dtype()));
    if (updates.dtype() != self.dtype())
        throw Refused("updates must have the input's dtype, " + c10::str(self.dtype(), ", not ", updates.dtype()));
    int64_t depth = indices.dim() ? indices.size(-1) : 0;
    if (depth < 1 || depth > self.dim())
        throw Refused("the last dimension of indices must be between 1 and the input's " + number(self.dim()) +
                      " dimensions, but is " + number(depth));
    auto expected = indices.sizes().vec();
    expected.pop_back();
    expected.insert(expected.end(), self.sizes().begin() + depth, self.sizes().end());
    if (updates.sizes() != at::IntArrayRef(expected))
        throw Refused("updates must have the shape that indices select, " +
                      c10::str(at::IntArrayRef(expected), ", not ", updates.sizes()));
}

void ScatterNdUpdate(InOut self, In indices, In updates) {
    int64_t depth = indices.size(-1);
    auto flat = indices.tensor().reshape({-1, depth}).to(at::kLong);
    if (flat.numel() == 0) return;
    std::vector<int64_t> shape{flat.size(0)};
    shape.insert(shape.end(), self.sizes().begin() + depth, self.sizes().end());
    std::vector<at::indexing::TensorIndex> positions;
    UNDEFINED("a kernel would write outside the input");
    for (int64_t d = 0; d < depth; ++d) {
        auto place = flat.select(1, d);
        if (place.min().item<int64_t>() < 0 || place.max().item<int64_t>() >= self.size(d))
            throw std::runtime_error("indices must be between 0 and " + number(self.size(d) - 1) + " in dimension " +
                                     number(d));
        positions.emplace_back(place);
    }
    auto values = updates.tensor().reshape(shape);
    if (self.format() == ACL_FORMAT_FRACTAL_NZ) throw NotEmulated("an input in FRACTAL_NZ is not emulated");
    self.raw().index_put_(positions, values);
}

bool in_fractals(const Text& mode) { return mode.value == "PA_NZ"; }

// A cache whose last dimension is the width of a tile has the same memory layout in FRACTAL_NZ and ND.
at::Tensor cache_rows(const In& cache, const Text& mode) {
    auto plain = cache.raw().sizes() == cache.sizes() ? cache.raw() : cache.raw().view(cache.sizes());
    return in_fractals(mode) ? rows_of_fractal_blocks(plain) : rows_of_blocks(plain);
}

DOCUMENTED("ops-transformer: attention/scatter_pa_kv_cache/docs/aclnnScatterPaKvCache.md");
void check_cache(const In& rows, const In& cache, const Text& mode, const char* name) {
    std::string what = name;
    if (rows.dim() != 3)
        throw NotEmulated(what + " must have shape [tokens, heads, head dimension]; 4 dimensions are not emulated");
    if (cache.dim() != 4) throw Refused(what + "_cache must have 4 dimensions, not " + number(cache.dim()));
    if (cache.dtype() != rows.dtype())
        throw Refused(what + "_cache must have the dtype of " + what + ", " +
                      c10::str(rows.dtype(), ", not ", cache.dtype()));
    int64_t width = rows.size(1) * rows.size(2), last = cache.size(3);
    if (in_fractals(mode)) {
        int64_t fractal = 32 / static_cast<int64_t>(c10::elementSize(cache.dtype()));
        if (last != fractal || cache.size(1) * last != width)
            throw Refused("with cache_mode PA_NZ, " + what + "_cache must have shape [blocks, " +
                          number(width / fractal) + ", block_size, " + number(fractal) + "], not " +
                          c10::str(cache.sizes()));
    } else if (cache.size(2) != rows.size(1) || last != rows.size(2)) {
        throw Refused(what + "_cache must have shape [blocks, block_size, " + number(rows.size(1)) + ", " +
                      number(rows.size(2)) + "], not " + c10::str(cache.sizes()));
    }
}

void check_mode(const Text& mode) {
    if (mode.value != "" && mode.value != "Norm" && mode.value != "PA_NZ")
        throw Refused("cache_mode must be Norm or PA_NZ, not '" + mode.value + "'");
}

void check_scatter(In key, InOut key_cache, In slots, In value, InOut value_cache, In compress_lens,
                   In compress_offsets, In seq_lens, Text mode, Text scatter_mode, Ints strides, Ints offsets) {
    check_mode(mode);
    if (compress_lens || compress_offsets || seq_lens || (scatter_mode.value != "" && scatter_mode.value != "None"))
        throw NotEmulated(
            "compressed caches (compress_lens, compress_seq_offset, seq_lens, scatter_mode) are not emulated");
    check_cache(key, key_cache, mode, "key");
    check_cache(value, value_cache, mode, "value");
    if (value.size(0) != key.size(0) || value.size(1) != key.size(1))
        throw Refused("key and value must have the same number of tokens and heads, but have shapes " +
                      c10::str(key.sizes(), " and ", value.sizes()));
    if (value.dtype() != key.dtype() && !in_fractals(mode))
        throw Refused("key and value must have the same dtype unless cache_mode is PA_NZ, but are " +
                      c10::str(key.dtype(), " and ", value.dtype()));
    check_slots(slots, key.size(0));
}

void ScatterPaKvCache(In key, InOut key_cache, In slots, In value, InOut value_cache, In compress_lens,
                      In compress_offsets, In seq_lens, Text mode, Text scatter_mode, Ints strides, Ints offsets) {
    write_slots(cache_rows(key_cache, mode), key, slots);
    write_slots(cache_rows(value_cache, mode), value, slots);
}

DOCUMENTED("ops-transformer: attention/gather_pa_kv_cache/docs/aclnnGatherPaKvCache.md");
void check_gather(In key_cache, In value_cache, In tables, In lengths, InOut key, InOut value, In starts, Text mode,
                  bool is_cumulative) {
    check_mode(mode);
    if (key_cache.dim() != 4 || value_cache.dim() != 4)
        throw Refused("key_cache and value_cache must have 4 dimensions, not " + number(key_cache.dim()) + " and " +
                      number(value_cache.dim()));
    if (key.dtype() != key_cache.dtype() || value.dtype() != value_cache.dtype())
        throw Refused(
            "key and value must have the dtypes of their caches, " +
            c10::str(key_cache.dtype(), " and ", value_cache.dtype(), ", not ", key.dtype(), " and ", value.dtype()));
    if (tables.dtype() != at::kInt || lengths.dtype() != at::kInt || (starts && starts.dtype() != at::kInt))
        throw Refused("block_tables, seq_lens and seq_offset must be int32");
    int64_t batch = tables.size(0);
    if (tables.dim() != 2 || lengths.dim() != 1 || lengths.size(0) != batch + is_cumulative)
        throw Refused(
            "block_tables must have shape [batch, blocks], and seq_lens [batch], or [batch + 1] if cumulative, but "
            "they have shapes " +
            c10::str(tables.sizes(), " and ", lengths.sizes()));
}

// Writes the tokens of all sequences, concatenated.
void GatherPaKvCache(In key_cache, In value_cache, In tables, In lengths, InOut key, InOut value, In starts, Text mode,
                     bool is_cumulative) {
    auto keys = cache_rows(key_cache, mode), values = cache_rows(value_cache, mode);
    auto table = tables.tensor().to(at::kLong);
    auto counts = lengths.tensor().to(at::kLong);
    if (is_cumulative) counts = counts.diff();
    int64_t block_size = keys.size(1), row = 0;
    for (int64_t b = 0; b < table.size(0); ++b) {
        int64_t count = counts[b].item<int64_t>(), start = starts ? starts.tensor()[b].item<int64_t>() : 0;
        UNDEFINED("a kernel would read outside the cache or write outside key and value");
        if (row + count > key.size(0) || (start + count + block_size - 1) / block_size > table.size(1))
            throw std::runtime_error("seq_lens must not exceed the tokens that key and block_tables have room for");
        auto position = at::arange(start, start + count, at::kLong);
        auto block = table[b].index_select(0, at::div(position, block_size, "floor")),
             place = at::remainder(position, block_size);
        if (count == 0) continue;
        auto copy = [&](const at::Tensor& cached, const InOut& output) {
            auto rows = output.raw().narrow(0, row, count);
            rows.copy_(cached.index({block, place}).reshape(rows.sizes()));
        };
        copy(keys, key);
        copy(values, value);
        row += count;
    }
}

}  // namespace

ACLNN(ScatterNdUpdate, .check = check_nd_update)
ACLNN(ScatterPaKvCache, .check = check_scatter)
ACLNN(GatherPaKvCache, .check = check_gather)
