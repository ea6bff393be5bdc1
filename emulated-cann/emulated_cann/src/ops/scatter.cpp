// Scatter operations along one dimension.
#include "numeric.h"

using namespace emulator;

DOCUMENTED("ops-nn: index (the page of each operation)");


static void check_scatter(const In& self, int64_t dim, const In& index, const In* src) {
    wrap(dim, self.dim());
    require_dtype(index, {at::kLong, at::kInt}, "index");
    if (index.tensor().numel() == 0) return;
    require(index.dim() == self.dim() || index.dim() + self.dim() == 1,
            "index and self must have the same number of dimensions, but have shapes " + shown(index.sizes()) +
                " and " + shown(self.sizes()));
    if (!src) return;
    require(src->dtype() == self.dtype(),
            "src must have self's dtype, " + c10::str(self.dtype(), ", not ", src->dtype()));
    for (int64_t d = 0; d < std::min(index.dim(), src->dim()); ++d)
        require(index.size(d) <= src->size(d),
                "index must be at most as large as src in each dimension, but they have shapes " +
                    shown(index.sizes()) + " and " + shown(src->sizes()));
}

// Returns ATen's name of a reduction by the interface's number. Only ScatterReduce has 3 and 4.
static const char* reduction_name(int64_t reduction) {
    static constexpr const char* kNames[] = {"", "sum", "prod", "amax", "amin", "mean"};
    require(reduction >= 0 && reduction <= 5,
            "the reduction must be between 0 and 5, but is " + std::to_string(reduction));
    return kNames[reduction];
}

static at::Tensor scattered(const In& self, int64_t dim, const In& index, const at::Tensor& src, int64_t reduction,
                            bool include_self = true) {
    if (reduction == 0) return at::scatter(self, dim, wide(index), src);
    return at::scatter_reduce(widen(self), dim, wide(index), widen(src), reduction_name(reduction), include_self);
}
static at::Tensor scattered(const In& self, int64_t dim, const In& index, const Number& value, int64_t reduction) {
    auto src = at::scalar_tensor(value, self.dtype()).expand(index.sizes());
    return scattered(self, dim, index, src, reduction);
}

static void Scatter(In self, int64_t dim, In index, In src, int64_t reduction, Out out) {
    out.set(scattered(self, dim, index, src.tensor(), reduction));
}
ACLNN(
    Scatter, .check = [](In self, int64_t dim, In index, In src, int64_t reduction, Out out) {
        reduction_name(reduction);
        check_scatter(self, dim, index, &src);
        require_shape(out, self.sizes(), "out");
    })
static void InplaceScatter(InOut self, int64_t dim, In index, In src, int64_t reduction) {
    self.set(scattered(self, dim, index, src.tensor(), reduction));
}
ACLNN(
    InplaceScatter, .check = [](InOut self, int64_t dim, In index, In src, int64_t reduction) {
        reduction_name(reduction);
        check_scatter(self, dim, index, &src);
    })
static void ScatterValue(In self, int64_t dim, In index, Number value, int64_t reduction, Out out) {
    out.set(scattered(self, dim, index, value, reduction));
}
ACLNN(
    ScatterValue, .check = [](In self, int64_t dim, In index, Number, int64_t, Out out) {
        check_scatter(self, dim, index, nullptr);
        require_shape(out, self.sizes(), "out");
    })
static void InplaceScatterValue(InOut self, int64_t dim, In index, Number value, int64_t reduction) {
    self.set(scattered(self, dim, index, value, reduction));
}
ACLNN(
    InplaceScatterValue,
    .check = [](InOut self, int64_t dim, In index, Number, int64_t) { check_scatter(self, dim, index, nullptr); })
static void ScatterAdd(In self, int64_t dim, In index, In src, Out out) {
    out.set(at::scatter_add(widen(self), dim, wide(index), widen(src)));
}
ACLNN(
    ScatterAdd, .check = [](In self, int64_t dim, In index, In src, Out out) {
        check_scatter(self, dim, index, &src);
        require_shape(out, self.sizes(), "out");
    })
static void ScatterReduce(In self, int64_t dim, In index, In src, int64_t reduction, bool include_self, Out out) {
    out.set(scattered(self, dim, index, src.tensor(), reduction, include_self));
}
ACLNN(ScatterReduce)
static void InplaceScatterReduce(InOut self, int64_t dim, In index, In src, int64_t reduction, bool include_self) {
    self.set(scattered(self, dim, index, src.tensor(), reduction, include_self));
}
ACLNN(InplaceScatterReduce)

DOCUMENTED("op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-scatter_update_.md");
static void check_update(InOut data, In indices, In updates, int64_t axis) {
    require_dtype(data, {at::kChar, at::kHalf, at::kFloat, at::kBFloat16, at::kInt}, "data");
    require(updates.dtype() == data.dtype(), "updates must have the dtype of data");
    require_dtype(indices, {at::kInt, at::kLong}, "indices");
    require(data.dim() >= 2 && data.dim() <= 8 && updates.dim() == data.dim(),
            "data and updates must have the same 2 to 8 dimensions, but have shapes " + shown(data.sizes()) + " and " +
                shown(updates.sizes()));
    require(indices.dim() == 1 || (indices.dim() == 2 && indices.size(1) == 2),
            "indices must have shape [n] or [n, 2], not " + shown(indices.sizes()));
    require(wrap(axis, data.dim()) > 0, "axis must not be the first dimension");
    require(updates.size(0) == indices.size(0), "updates must have an entry for each index");
}
// Entry i of updates goes to entry i of data, or to the one that its first index names, from its last index on.
UNDEFINED("a kernel would write outside its output");
static void InplaceScatterUpdate(InOut data, In indices, In updates, int64_t axis) {
    auto rows = wide(indices), target = data.raw(), values = updates.tensor();
    axis = wrap(axis, data.dim());
    for (int64_t i = 0; i < rows.size(0); ++i) {
        int64_t entry = rows.dim() == 2 ? rows[i][0].item<int64_t>() : i;
        int64_t start = (rows.dim() == 2 ? rows[i][1] : rows[i]).item<int64_t>(), length = values.size(axis);
        if (entry < 0 || entry >= target.size(0) || start < 0 || start + length > target.size(axis))
            throw std::runtime_error("indices must be inside of data");
        target[entry].narrow(axis - 1, start, length).copy_(values[i]);
    }
}
ACLNN(InplaceScatterUpdate, .check = check_update)
