// The part of ATB's C++ interface that torch_npu uses, with the memory and virtual table layouts that it expects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "acl/acl.h"

namespace atb {

using Status = int32_t;  // 0: no error
constexpr Status kInvalidParameter = 1;

struct Dims {
    int64_t dims[8];
    uint64_t count = 0;
};

struct TensorDesc {
    aclDataType dtype = ACL_DT_UNDEFINED;
    aclFormat format = ACL_FORMAT_UNDEFINED;
    Dims shape;
};

struct Tensor {
    TensorDesc desc;
    void* device_data = nullptr;
    void* host_data = nullptr;
    uint64_t bytes = 0;
};

// Stores up to 64 elements inline and more on the heap. Callers fill it; the emulator only reads it.
template <class T>
struct SVector {
    const T& operator[](size_t index) const { return heap ? heap[index] : storage[index]; }
    size_t capacity, size;
    T storage[65];
    T* heap;
};

struct VariantPack {
    SVector<Tensor> inputs, outputs;
};

// The order of the virtual functions is part of the ABI.
class Context {
  public:
    virtual ~Context() = default;
    virtual Status SetExecuteStream(aclrtStream stream) = 0;
    virtual aclrtStream GetExecuteStream() const = 0;
    virtual Status SetAsyncTilingCopyStatus(bool enable) = 0;
    virtual bool GetAsyncTilingCopyStatus() const = 0;
};

class Operation {
  public:
    virtual ~Operation() = default;
    virtual std::string GetName() const = 0;
    virtual Status InferShape(const SVector<TensorDesc>& inputs, SVector<TensorDesc>& outputs) const = 0;
    virtual uint32_t GetInputNum() const = 0;
    virtual uint32_t GetOutputNum() const = 0;
    virtual Status Setup(const VariantPack& pack, uint64_t& workspace, Context* context) = 0;
    virtual Status Execute(const VariantPack& pack, uint8_t* workspace, uint64_t workspace_bytes, Context* context) = 0;
};

Status CreateContext(Context** context);
Status DestroyContext(Context* context);
template <class Parameters>
Status CreateOperation(const Parameters& parameters, Operation** operation);
Status DestroyOperation(Operation* operation);

class Utils {
  public:
    static uint64_t GetTensorSize(const Tensor& tensor);
    static uint64_t GetTensorSize(const TensorDesc& desc);
    static uint64_t GetTensorNumel(const Tensor& tensor);
    static uint64_t GetTensorNumel(const TensorDesc& desc);
};

}  // namespace atb
