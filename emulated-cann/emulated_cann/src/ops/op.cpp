// Binds arguments to device memory, and prepares and launches operations.
#include "op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <numeric>

namespace emulator {

namespace {

constexpr int kInternal = 561000;  // ACLNN_ERR_INNER
constexpr int kTiling = 561002;    // ACLNN_ERR_INNER_TILING_ERROR

int64_t elements(at::IntArrayRef shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

bool is_nz(aclFormat format) {
    return format == ACL_FORMAT_FRACTAL_NZ || format == ACL_FORMAT_FRACTAL_NZ_C0_16 ||
           format == ACL_FORMAT_FRACTAL_NZ_C0_32;
}

int submit(const aclOpExecutor& executor, aclrtStream stream, Launch made) {
    return executor.submit ? executor.submit(stream, std::move(made)) : launch(stream, std::move(made));
}

// FRACTAL_NZ: [..., N1, M1, M0, N0] holds the matrix [..., M, N] in tiles of M0 x N0, padded with zeros.
at::Tensor from_nz(const at::Tensor& fractal, at::IntArrayRef matrix) {
    int64_t dims = fractal.dim();
    auto shape = fractal.sizes().vec();
    auto padded = fractal.movedim({dims - 4, dims - 3, dims - 2, dims - 1}, {dims - 2, dims - 4, dims - 3, dims - 1});
    std::vector<int64_t> flat(shape.begin(), shape.end() - 4);
    flat.push_back(shape[dims - 3] * shape[dims - 2]);
    flat.push_back(shape[dims - 4] * shape[dims - 1]);
    return padded.reshape(flat)
        .narrow(-2, 0, matrix[matrix.size() - 2])
        .narrow(-1, 0, matrix[matrix.size() - 1])
        .reshape(matrix);
}

void into_nz(const at::Tensor& fractal, const at::Tensor& matrix) {
    int64_t dims = fractal.dim();
    auto shape = fractal.sizes();
    int64_t rows = shape[dims - 3] * shape[dims - 2], columns = shape[dims - 4] * shape[dims - 1];
    std::vector<int64_t> batched(shape.begin(), shape.end() - 4), tiled = batched;
    batched.insert(batched.end(), {matrix.size(-2), matrix.size(-1)});
    auto padded =
        at::constant_pad_nd(matrix.reshape(batched), {0, columns - matrix.size(-1), 0, rows - matrix.size(-2)});
    tiled.insert(tiled.end(), {shape[dims - 3], shape[dims - 2], shape[dims - 4], shape[dims - 1]});
    fractal.copy_(padded.reshape(tiled).movedim({dims - 4, dims - 3, dims - 2, dims - 1},
                                                {dims - 3, dims - 2, dims - 4, dims - 1}));
}

}  // namespace

std::string describe_refusal(const Refused& error) {
    if (dynamic_cast<const NotEmulated*>(&error)) return error.what();
    return std::string(error.what()) + " (docs/reference/emulator-refusals.md links the document of this rule)";
}

DOCUMENTED("ops-math: math (the page of each operation); ops-math: docs/zh/context/data_format.md");
In::In(const aclTensor* handle) {
    if (!handle) return;
    present_ = true;
    shape_ = handle->shape;
    if (shape_.size() > 8)
        throw Refused("a tensor argument must have at most 8 dimensions, but has " + std::to_string(shape_.size()));
    dtype_ = scalar_type(handle->dtype);
    format_ = handle->format;
    address_ = handle->storage;
    auto options = at::TensorOptions().dtype(dtype_);
    size_t itemsize = c10::elementSize(dtype_);
    if (elements(shape_) == 0) {  // the address may be anything
        view_ = at::detail::empty_cpu(shape_, options);
        return;
    }
    if (!address_) throw Refused("the address of a tensor with elements must not be null");
    if (is_nz(format_)) {
        bind_nz(*handle);
        return;
    }
    address_ = static_cast<const char*>(address_) + handle->offset * itemsize;
    int64_t last = 0;
    for (size_t d = 0; d < shape_.size(); ++d) last += (shape_[d] - 1) * handle->strides[d];
    bytes_ = (last + 1) * itemsize;
    view_ = at::from_blob(backing(address_), shape_, handle->strides, options);
}

In::In(const In&) = default;
In::In(In&&) noexcept = default;
In::~In() = default;

void In::bind_nz(const aclTensor& handle) {
    const auto& fractal = handle.storage_shape;
    size_t dims = shape_.size(), fractal_dims = fractal.size();
    if (dims < 2 || fractal_dims < 4)
        throw Refused("a tensor in FRACTAL_NZ must have at least 2 dimensions and its storage 4, but they have " +
                      std::to_string(dims) + " and " + std::to_string(fractal_dims));
    // Tiles have no strides, so the view must be the whole matrix, possibly transposed.
    transposed_ = handle.strides[dims - 2] == 1 && handle.strides[dims - 1] == shape_[dims - 2] &&
                  !(shape_[dims - 2] == 1 && handle.strides[dims - 2] == shape_[dims - 1]);
    matrix_ = shape_;
    if (transposed_) std::swap(matrix_[dims - 1], matrix_[dims - 2]);
    int64_t stride = matrix_[dims - 1];
    if (!transposed_ &&
        (handle.strides[dims - 1] != 1 || (handle.strides[dims - 2] != stride && shape_[dims - 2] != 1)))
        throw NotEmulated(
            "a view of a tensor in FRACTAL_NZ other than the whole matrix or its transpose is not emulated");
    int64_t tile_elements = 1;
    for (size_t d = fractal_dims - 4; d < fractal_dims; ++d) tile_elements *= fractal[d];
    int64_t matrix_elements = matrix_[dims - 1] * matrix_[dims - 2];
    if (handle.offset % matrix_elements != 0)
        throw NotEmulated("a view of a tensor in FRACTAL_NZ that does not begin at a matrix is not emulated");
    std::vector<int64_t> shape(matrix_.begin(), matrix_.end() - 2);
    shape.insert(shape.end(), fractal.end() - 4, fractal.end());
    int64_t offset = handle.offset / matrix_elements * tile_elements;
    size_t itemsize = c10::elementSize(dtype_);
    address_ = static_cast<const char*>(address_) + offset * itemsize;
    bytes_ = elements(shape) * itemsize;
    view_ = at::from_blob(backing(address_), shape, at::TensorOptions().dtype(dtype_));
}

at::Tensor In::tensor() const {
    if (!present_ || matrix_.empty()) return view_;
    auto matrix = from_nz(view_, matrix_);
    return transposed_ ? matrix.transpose(-1, -2) : matrix;
}

void In::describe(std::vector<Operand>& operands, Access access) const {
    if (!present_) return;
    operands.push_back({address_, bytes_, access, static_cast<int>(acl_type(dtype_)), shape_});
    if (matrix_.empty() && !view_.is_contiguous()) operands.back().strides = view_.strides().vec();
}

void Out::set(const at::Tensor& value) const {
    if (!present_ || view_.numel() == 0) return;
    if (matrix_.empty()) {
        view_.copy_(value);
        return;
    }
    auto matrix = value.to(dtype_).expand(shape_);
    into_nz(view_, transposed_ ? matrix.transpose(-1, -2) : matrix);
}

Resizable::Resizable(const aclTensor* handle) : Out(handle) {
    if (!handle) return;
    if (!handle->result_shape) handle->result_shape = std::make_shared<std::optional<std::vector<int64_t>>>();
    result_shape_ = handle->result_shape;
}

void Resizable::set(const at::Tensor& value) const {
    if (!present_) return;
    *result_shape_ = value.sizes().vec();
    if (value.numel() == 0) return;
    UNDEFINED("a kernel would write outside the output");
    if (value.numel() > view_.numel())
        throw Refused("the output must have room for the result's " + std::to_string(value.numel()) +
                      " elements, but has room for " + std::to_string(view_.numel()));
    view_.view(-1).narrow(0, 0, value.numel()).copy_(value.reshape(-1));
}

// Dispatches to ATen's backend kernels only, because the caller handles autograd and views.
void run_body(c10::function_ref<void()> body) {
    at::AutoDispatchBelowADInplaceOrView guard;
    try {
        body();
    } catch (const c10::Error& error) {
        throw std::runtime_error(error.what_without_backtrace());
    }
}

DOCUMENTED("ops-math: docs/zh/context/aclnn_return_code.md; ops-math: docs/zh/context/two_phase_api.md");
int prepare(const char* kernel, uint64_t* workspace, aclOpExecutor** executor,
            c10::function_ref<void(aclOpExecutor&)> bind) {
    std::string name = std::string("aclnn") + kernel;
    if (!workspace || !executor) return fail(kInvalid, name + ": workspaceSize or executor is null");
    *workspace = 0;
    try {
        auto made = std::make_unique<aclOpExecutor>();
        bind(*made);
        made->launch.call = call_stack();  // because torch_npu may launch it from another thread
        *executor = made.release();
        return 0;
    } catch (const TilingRefused& error) {
        return fail(kTiling, name + ": " + describe_refusal(error));
    } catch (const Refused& error) {
        return fail(kInvalid, name + ": " + describe_refusal(error));
    } catch (const c10::Error& error) {
        return fail(kInvalid, name + ": " + error.what_without_backtrace());
    } catch (const std::out_of_range& error) {  // from backing(), for an address outside device memory, or from size()
        return fail(kInvalid, name + ": " + error.what());
    } catch (const std::exception& error) {
        return fail(kInternal, name + ": " + error.what());
    }
}

int execute(aclOpExecutor* executor, aclrtStream stream) {
    if (!executor)
        return fail(kInvalid,
                    "the second phase of an aclnn function requires the executor from its first phase, but it is null");
    if (executor->repeatable) return submit(*executor, stream, executor->launch);
    std::unique_ptr<aclOpExecutor> owned(executor);
    return submit(*owned, stream, std::move(owned->launch));
}

}  // namespace emulator

DOCUMENTED("ops-math: docs/zh/context/aclnn_return_code.md; ops-math: docs/zh/context/two_phase_api.md");

extern "C" {

// A launch destroys its executor unless it is repeatable. Callers destroy executors that were not launched or are
// repeatable.
int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
    delete executor;
    return 0;
}

int aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
    if (!executor) return emulator::fail(161001, "aclSetAclOpExecutorRepeatable: executor is null");
    executor->repeatable = true;
    return 0;
}

}  // extern "C"
