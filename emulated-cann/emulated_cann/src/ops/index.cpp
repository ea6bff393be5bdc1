// Gathers and writes by index tensors on the device. An index out of range causes a stream error.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-nn: index (the page of each operation); ops-math: math (the page of each operation)");

static void check_index_type(const In& index) { require_dtype(index, {at::kLong, at::kInt}, "index"); }

// CANN's kernels take int32 indices; most of ATen's CPU kernels take only int64.

static void check_embedding(In weight, In indices, Out out) {
    require(weight.dim() == 2, "weight must have two dimensions, but has shape " + shown(weight.sizes()));
    check_index_type(indices);
    auto shape = indices.sizes().vec();
    shape.push_back(weight.size(1));
    require_shape(out, shape, "out");
}
static void Embedding(In weight, In indices, Out out) {
    auto rows = weight.tensor().index_select(0, wide(indices).reshape(-1));
    out.set(rows.reshape(out.sizes()));
}
ACLNN(Embedding, .check = check_embedding)

static void EmbeddingRenorm(InOut self, In indices, double most, double order) {
    auto rows = widen(self).clone();
    self.set(at::embedding_renorm_(rows, wide(indices), most, order));
}
ACLNN(EmbeddingRenorm)
static void EmbeddingBag(In weight, In indices, In offsets, bool scale, int64_t mode, bool sparse, In factors,
                         bool include_last, int64_t padding, Out out, Out bags, Out sizes, Out largest) {
    std::optional<at::Tensor> given = factors ? std::optional<at::Tensor>(widen(factors)) : std::nullopt;
    auto [sum, bag, size, where] = at::_embedding_bag(widen(weight), wide(indices), wide(offsets), scale, mode, sparse,
                                                      given, include_last, padding);
    out.set(sum);
    // The others are for the gradient; torch_npu leaves out those that a mode does not need.
    auto set_if_same = [](const Out& target, const at::Tensor& value) {
        if (target && target.sizes() == value.sizes()) target.set(value);
    };
    set_if_same(bags, bag);
    set_if_same(sizes, size);
    set_if_same(largest, where);
}
ACLNN(EmbeddingBag, .check = floating_first)

static void check_select(In self, int64_t dim, In index, Out out) {
    check_index_type(index);
    dim = wrap(dim, self.dim());
    require(index.dim() <= 1, "index must have at most one dimension, but has shape " + shown(index.sizes()));
    auto shape = self.sizes().vec();
    if (!shape.empty()) shape[dim] = index.dim() ? index.size(0) : 1;
    require_shape(out, shape, "out");
}
static void IndexSelect(In self, int64_t dim, In index, Out out) { out.set(at::index_select(self, dim, index)); }
ACLNN(IndexSelect, .check = check_select)

static void check_gather(In self, int64_t dim, In index, Out out) {
    check_index_type(index);
    wrap(dim, self.dim());
    require_shape(out, index.sizes(), "out");
}
static void Gather(In self, int64_t dim, In index, Out out) { out.set(at::gather(self, dim, wide(index))); }
ACLNN(Gather, .check = check_gather)
static void Take(In self, In index, Out out) { out.set(at::take(self, wide(index))); }
ACLNN(Take)

// The list holds an empty tensor for each dimension without an index. The indices are broadcast already, so either all
// are empty or none is.
static bool nothing_indexed(const Ins& indices) {
    for (auto& index : indices.items)
        if (index && index.tensor().numel()) return false;
    return true;
}
static c10::List<std::optional<at::Tensor>> indexed(const Ins& indices) {
    c10::List<std::optional<at::Tensor>> list;
    for (auto& index : indices.items) {
        bool absent = !index || (index.dim() == 1 && index.size(0) == 0);
        list.push_back(absent ? std::nullopt : std::optional<at::Tensor>(index.tensor()));
    }
    return list;
}
static void check_indices(const Ins& indices) {
    for (auto& index : indices.items)
        if (index && index.tensor().numel()) require_dtype(index, {at::kLong, at::kInt, at::kBool}, "an index");
}
static void Index(In self, Ins indices, Out out) {
    if (out.tensor().numel()) out.set(at::index(self, indexed(indices)));
}
ACLNN(Index, .check = [](In, Ins indices, Out) { check_indices(indices); })
static void IndexPutImpl(InOut self, Ins indices, In values, bool accumulate, bool) {
    if (nothing_indexed(indices)) return;
    self.set(at::index_put(self, indexed(indices), values.tensor().to(self.dtype()), accumulate));
}
ACLNN(IndexPutImpl, .check = [](InOut, Ins indices, In, bool, bool) { check_indices(indices); })
static void InplacePut(InOut self, In index, In source, bool accumulate) {
    self.set(at::put(self, wide(index), source, accumulate));
}
ACLNN(InplacePut)

static void check_rows(InOut, int64_t, In index, In) { check_index_type(index); }
static void InplaceIndexCopy(InOut self, int64_t dim, In index, In source) {
    self.set(at::index_copy(self, dim, wide(index), source));
}
ACLNN(InplaceIndexCopy, .check = check_rows)
static void IndexCopy(In self, int64_t dim, In index, In source, Out out) {
    out.set(at::index_copy(self, dim, wide(index), source));
}
ACLNN(IndexCopy)
static void IndexAdd(In self, int64_t dim, In index, In source, Number alpha, Out out) {
    out.set(at::index_add(widen(self), dim, wide(index), widen(source), alpha));
}
ACLNN(IndexAdd)
static void IndexFill(In self, int64_t dim, In index, Number value, Out out) {
    out.set(at::index_fill(self.tensor(), dim, wide(index), at::Scalar(value)));
}
ACLNN(IndexFill)
static void InplaceIndexFill(InOut self, int64_t dim, In index, Number value) {
    self.set(at::index_fill(self.tensor(), dim, wide(index), at::Scalar(value)));
}
ACLNN(InplaceIndexFill)
static at::Tensor fill_rows(const In& self, int64_t dim, const Ints& index, const Number& value) {
    return at::index_fill(self.tensor(), dim, at::tensor(index.values, at::kLong), at::Scalar(value));
}
static void IndexFillTensor(In self, int64_t dim, Ints index, Number value, Out out) {
    out.set(fill_rows(self, dim, index, value));
}
ACLNN(IndexFillTensor)
static void InplaceIndexFillTensor(InOut self, int64_t dim, Ints index, Number value) {
    self.set(fill_rows(self, dim, index, value));
}
ACLNN(InplaceIndexFillTensor)

static void check_one_hot(In self, int64_t depth, In, In, int64_t axis, Out out) {
    check_index_type(self);
    auto shape = self.sizes().vec();
    shape.insert(axis < 0 ? shape.end() + axis + 1 : shape.begin() + axis, depth);
    require_shape(out, shape, "out");
}
static void OneHot(In self, int64_t depth, In on, In off, int64_t axis, Out out) {
    auto classes = at::arange(depth, at::kLong);
    auto matched = wide(self).unsqueeze(-1).eq(classes);  // an index out of range matches no class
    out.set(at::where(matched, on.tensor().reshape({}), off.tensor().reshape({})).movedim(-1, axis));
}
ACLNN(OneHot, .check = check_one_hot)

static void SearchSorted(In sorted, In self, bool, bool right, In sorter, Out out) {
    std::optional<at::Tensor> order = sorter ? std::optional<at::Tensor>(sorter.tensor()) : std::nullopt;
    out.set(
        at::searchsorted(sorted.tensor().contiguous(), self.tensor().contiguous(), false, right, std::nullopt, order));
}
ACLNN(SearchSorted)
static void SearchSorteds(In sorted, Number self, bool, bool right, In sorter, Out out) {
    std::optional<at::Tensor> order = sorter ? std::optional<at::Tensor>(sorter.tensor()) : std::nullopt;
    out.set(at::searchsorted(sorted.tensor().contiguous(), at::Scalar(self), false, right, std::nullopt, order));
}
ACLNN(SearchSorteds)
static void Bucketize(In self, In boundaries, bool, bool right, Out out) {
    out.set(at::bucketize(self.tensor().contiguous(), boundaries.tensor().contiguous(), false, right));
}
ACLNN(Bucketize)
