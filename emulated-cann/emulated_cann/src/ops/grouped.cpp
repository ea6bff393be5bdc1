#include "grouped.h"

#include "handles.h"
#include "numeric.h"

namespace emulator {

namespace {

constexpr size_t kTileDims = 4;
constexpr int64_t kTileRows = 16, kTileRowBytes = 32;

DOCUMENTED("ops-transformer: gmm/grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantWeightNzV2.md");
std::unique_ptr<aclTensor> view_of_matrices(const aclTensor* handle, bool always_nz) {
    if (!handle) return nullptr;
    auto view = std::make_unique<aclTensor>(*handle);
    auto& shape = view->shape;
    bool is_nz = view->format == ACL_FORMAT_FRACTAL_NZ && shape.size() == view->storage_shape.size();
    if (shape.size() < kTileDims || !(is_nz || always_nz)) return view;
    size_t outer = shape.size() - kTileDims;
    int64_t row = kTileRowBytes / c10::elementSize(scalar_type(view->dtype)), expected = 1;
    if (shape[outer + 2] == row && shape[outer + 3] == kTileRows)
        throw NotEmulated("transposed tiles of a weight in FRACTAL_NZ are not emulated");
    require(shape[outer + 2] == kTileRows && shape[outer + 3] == row,
            "the tiles of a weight in FRACTAL_NZ must be 16 x " + std::to_string(row) + ", but are " + shown(shape));
    for (size_t d = shape.size(); d-- > 0; expected *= shape[d])
        if (shape[d] != 1 && view->strides[d] != expected)
            throw NotEmulated("tiles of a weight in FRACTAL_NZ that are not contiguous are not emulated");
    view->format = ACL_FORMAT_FRACTAL_NZ;
    view->storage_shape = shape;
    int64_t rows = shape[outer + 1] * kTileRows, columns = shape[outer] * row;
    shape.resize(outer);
    shape.insert(shape.end(), {rows, columns});
    view->strides.assign(shape.size(), 1);
    for (size_t d = shape.size() - 1; d-- > 0;) view->strides[d] = view->strides[d + 1] * shape[d + 1];
    return view;
}

}  // namespace

Weight::Weight(const aclTensor* handle, bool always_nz) : In(view_of_matrices(handle, always_nz).get()) {}
NzWeight::NzWeight(const aclTensor* handle) : Weight(handle, true) {}

DOCUMENTED("ops-transformer: gmm (the page of each operation)");
Line product_line(const std::string& operation) {
    const auto& soc = soc_name();
    if (soc.starts_with("Ascend310P")) return Line::inference;
    if (soc.starts_with("Ascend950")) return Line::a5;
    if (soc.starts_with("Ascend910B") || soc.starts_with("Ascend910_93")) return Line::a2_a3;
    throw Refused(operation + " is not for " + soc);
}

bool Weight::is_transposed() const {
    if (is_nz()) return transposed_;
    if (view_.dim() < 2 || view_.size(-1) == 1 || view_.size(-2) == 1) return false;
    return view_.stride(-2) == 1 && view_.stride(-1) != 1;
}

at::Tensor Weight::matrix(int64_t index) const {
    auto stored = dim() == 3 ? view_.select(0, index) : view_;
    if (!is_nz()) return stored;
    auto rows = matrix_[matrix_.size() - 2], columns = matrix_.back();
    auto padded = stored.permute({1, 2, 0, 3}).reshape({stored.size(1) * stored.size(2), -1});
    auto values = padded.narrow(0, 0, rows).narrow(1, 0, columns);
    return transposed_ ? values.t() : values;
}

DOCUMENTED("ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md");
std::vector<Group> groups_of(const at::Tensor& list, int64_t type, int64_t rows, int64_t experts) {
    auto values = list.to(at::kLong).contiguous();
    const int64_t* value = values.const_data_ptr<int64_t>();
    std::vector<Group> groups;
    int64_t end = 0, count = values.size(0);
    bool ended = false;
    for (int64_t i = 0; i < count; ++i) {
        int64_t expert = type == kPairs ? value[2 * i] : i;
        int64_t size = type == kPairs ? value[2 * i + 1] : type == kCounts ? value[i] : value[i] - end;
        if (size < 0)
            throw std::runtime_error("group_list gives group " + std::to_string(i) + " " + std::to_string(size) +
                                     " rows");
        if (expert < 0 || expert >= experts)
            throw std::runtime_error("group_list names group " + std::to_string(expert) + " of " +
                                     std::to_string(experts));
        if (type == kPairs && size && ended)
            throw std::runtime_error("group_list of pairs must have the groups without rows last");
        ended = ended || size == 0;
        groups.push_back({expert, end, size});
        end += size;
    }
    if (end > rows)
        throw std::runtime_error("group_list counts " + std::to_string(end) + " rows, but there are " +
                                 std::to_string(rows));
    return groups;
}

}  // namespace emulator
