// aclCreate*, aclDestroy* and the queries of handles.
#include "handles.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <utility>

#include "op.h"
#include "runtime/launch.h"

DOCUMENTED("ops-math: docs/zh/context/aclnn_return_code.md");

namespace emulator {

namespace {

constexpr int kNullPointer = 161001;  // ACLNN_ERR_PARAM_NULLPTR

constexpr std::array<std::pair<aclDataType, at::ScalarType>, 20> kTypes{{
    {ACL_FLOAT, at::kFloat},
    {ACL_FLOAT16, at::kHalf},
    {ACL_BF16, at::kBFloat16},
    {ACL_DOUBLE, at::kDouble},
    {ACL_INT8, at::kChar},
    {ACL_INT16, at::kShort},
    {ACL_INT32, at::kInt},
    {ACL_INT64, at::kLong},
    {ACL_UINT8, at::kByte},
    {ACL_UINT16, at::kUInt16},
    {ACL_UINT32, at::kUInt32},
    {ACL_UINT64, at::kUInt64},
    {ACL_BOOL, at::kBool},
    {ACL_COMPLEX32, at::kComplexHalf},
    {ACL_COMPLEX64, at::kComplexFloat},
    {ACL_COMPLEX128, at::kComplexDouble},
    {ACL_FLOAT8_E5M2, at::kFloat8_e5m2},
    {ACL_FLOAT8_E4M3FN, at::kFloat8_e4m3fn},
    {ACL_FLOAT8_E8M0, at::kFloat8_e8m0fnu},
    {ACL_DT_UNDEFINED, at::ScalarType::Undefined},
}};

template <class T>
T load(const void* address) {
    return *static_cast<const T*>(address);
}

at::Scalar load_scalar(const void* value, aclDataType dtype) {
    switch (dtype) {
        case ACL_FLOAT:
            return load<float>(value);
        case ACL_DOUBLE:
            return load<double>(value);
        case ACL_FLOAT16:
            return static_cast<float>(load<c10::Half>(value));
        case ACL_BF16:
            return static_cast<float>(load<c10::BFloat16>(value));
        case ACL_BOOL:
            return load<bool>(value);
        case ACL_INT8:
            return load<int8_t>(value);
        case ACL_INT16:
            return load<int16_t>(value);
        case ACL_INT32:
            return load<int32_t>(value);
        case ACL_INT64:
            return load<int64_t>(value);
        case ACL_UINT8:
            return load<uint8_t>(value);
        case ACL_UINT16:
            return load<uint16_t>(value);
        case ACL_UINT32:
            return load<uint32_t>(value);
        case ACL_UINT64:
            return load<uint64_t>(value);
        case ACL_COMPLEX64:
            return load<c10::complex<float>>(value);
        case ACL_COMPLEX128:
            return load<c10::complex<double>>(value);
        default:
            throw NotEmulated("aclCreateScalar: aclDataType " + std::to_string(dtype) + " is not emulated");
    }
}

// Returns a handle. On an exception records its reason and returns null, as CANN does.
template <class Make>
auto create(const char* function, Make make) -> decltype(make()) {
    try {
        return make();
    } catch (const std::exception& error) {
        fail(kInvalid, std::string(function) + ": " + error.what());
        return nullptr;
    }
}

// Null stands for an omitted optional argument. Callers destroy it like the others, also after a refusal, so this must
// not change the recorded reason.
template <class Handle>
int destroy(const Handle* handle) {
    delete handle;
    return 0;
}

}  // namespace

at::ScalarType scalar_type(aclDataType dtype) {
    for (auto& [acl, torch] : kTypes)
        if (acl == dtype) return torch;
    throw NotEmulated("aclDataType " + std::to_string(dtype) + " of a tensor is not emulated");
}

aclDataType acl_type(at::ScalarType dtype) {
    for (auto& [acl, torch] : kTypes)
        if (torch == dtype) return acl;
    throw Refused(std::string("CANN has no aclDataType for dtype ") + c10::toString(dtype));
}

}  // namespace emulator

using emulator::create;
using emulator::destroy;

extern "C" {

aclTensor* aclCreateTensor(const int64_t* view_dims, uint64_t dims, aclDataType dtype, const int64_t* strides,
                           int64_t offset, aclFormat format, const int64_t* storage_dims, uint64_t storage_dims_num,
                           void* storage) {
    return create("aclCreateTensor", [&] {
        auto* tensor = new aclTensor{.shape = {view_dims, view_dims + dims},
                                     .offset = offset,
                                     .storage_shape = {storage_dims, storage_dims + storage_dims_num},
                                     .dtype = dtype,
                                     .format = format,
                                     .storage = storage};
        if (strides) {
            tensor->strides.assign(strides, strides + dims);
        } else {  // contiguous
            tensor->strides.assign(dims, 1);
            for (int64_t d = static_cast<int64_t>(dims) - 2; d >= 0; --d)
                tensor->strides[d] = tensor->strides[d + 1] * tensor->shape[d + 1];
        }
        return tensor;
    });
}

aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
    return create("aclCreateScalar", [&] { return new aclScalar{emulator::load_scalar(value, dtype), dtype}; });
}

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
    return create("aclCreateIntArray", [&] { return new aclIntArray{{values, values + size}}; });
}

aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
    return create("aclCreateFloatArray", [&] { return new aclFloatArray{{values, values + size}}; });
}

aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
    return create("aclCreateBoolArray", [&] { return new aclBoolArray{std::vector<bool>(values, values + size)}; });
}

aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
    return create("aclCreateTensorList", [&] { return new aclTensorList{{tensors, tensors + size}}; });
}

aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t size) {
    return create("aclCreateScalarList", [&] { return new aclScalarList{{scalars, scalars + size}}; });
}

int aclDestroyTensor(const aclTensor* tensor) { return destroy(tensor); }
int aclDestroyScalar(const aclScalar* scalar) { return destroy(scalar); }
int aclDestroyIntArray(const aclIntArray* array) { return destroy(array); }
int aclDestroyFloatArray(const aclFloatArray* array) { return destroy(array); }
int aclDestroyBoolArray(const aclBoolArray* array) { return destroy(array); }

// A list owns the handles in it.
int aclDestroyTensorList(const aclTensorList* list) {
    if (list)
        for (auto* tensor : list->tensors) delete tensor;
    return destroy(list);
}
int aclDestroyScalarList(const aclScalarList* list) {
    if (list)
        for (auto* scalar : list->scalars) delete scalar;
    return destroy(list);
}

// Returns the shape. For an output whose shape depends on data, callers synchronize first. The caller frees the
// dimensions with delete[].
int aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* dims_num) {
    if (!tensor || !dims || !dims_num)
        return emulator::fail(emulator::kNullPointer, "aclGetViewShape: an argument is null");
    const auto& shape = tensor->result_shape && *tensor->result_shape ? **tensor->result_shape : tensor->shape;
    *dims = new int64_t[shape.size()];
    std::copy(shape.begin(), shape.end(), *dims);
    *dims_num = shape.size();
    return 0;
}

int aclGetViewStrides(const aclTensor* tensor, int64_t** strides, uint64_t* strides_num) {
    if (!tensor || !strides || !strides_num)
        return emulator::fail(emulator::kNullPointer, "aclGetViewStrides: an argument is null");
    *strides = new int64_t[tensor->strides.size()];
    std::copy(tensor->strides.begin(), tensor->strides.end(), *strides);
    *strides_num = tensor->strides.size();
    return 0;
}

int aclGetDataType(const aclTensor* tensor, aclDataType* dtype) {
    if (!tensor || !dtype) return emulator::fail(emulator::kNullPointer, "aclGetDataType: an argument is null");
    *dtype = tensor->dtype;
    return 0;
}

int aclGetFormat(const aclTensor* tensor, aclFormat* format) {
    if (!tensor || !format) return emulator::fail(emulator::kNullPointer, "aclGetFormat: an argument is null");
    *format = tensor->format;
    return 0;
}

}  // extern "C"
