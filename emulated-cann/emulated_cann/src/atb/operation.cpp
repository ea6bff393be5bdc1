#include "operation.h"

#include <ATen/core/LegacyTypeDispatch.h>

DOCUMENTED("ascend-transformer-boost: docs (the tensors of each operation)");

namespace atb {

namespace {

class EmulatedContext : public Context {
  public:
    Status SetExecuteStream(aclrtStream stream) override {
        stream_ = stream;
        return 0;
    }
    aclrtStream GetExecuteStream() const override { return stream_; }
    Status SetAsyncTilingCopyStatus(bool enable) override {
        async_copy_ = enable;
        return 0;
    }
    bool GetAsyncTilingCopyStatus() const override { return async_copy_; }

  private:
    aclrtStream stream_ = nullptr;
    bool async_copy_ = false;
};

}  // namespace

aclTensor handle_of(const Tensor& tensor) {
    const auto& shape = tensor.desc.shape;
    aclTensor handle;
    handle.shape.assign(shape.dims, shape.dims + shape.count);
    handle.strides.assign(shape.count, 1);
    for (int64_t d = static_cast<int64_t>(shape.count) - 2; d >= 0; --d)
        handle.strides[d] = handle.strides[d + 1] * handle.shape[d + 1];
    handle.storage_shape = handle.shape;
    handle.dtype = tensor.desc.dtype;
    // The last dimension of a cache in FRACTAL_NZ is the width of a tile, so its memory layout is that of ND.
    handle.format = ACL_FORMAT_ND;
    handle.storage = tensor.device_data;
    return handle;
}

Status EmulatedOperation::InferShape(const SVector<TensorDesc>&, SVector<TensorDesc>&) const {
    OURS("not emulated");
    throw std::runtime_error("ATB's " + name_ + ": InferShape is not emulated");
}

emulator::Launch bound_launch(const std::string& name, const std::function<emulator::Launch()>& bind) {
    try {
        auto launch = bind();
        launch.kernel = name;
        launch.run = [run = std::move(launch.run)] {
            at::AutoDispatchBelowADInplaceOrView guard;
            run();
        };
        return launch;
    } catch (const std::exception& error) {
        auto* refused = dynamic_cast<const emulator::Refused*>(&error);
        std::string reason = "ATB's " + name + ": " + (refused ? emulator::describe_refusal(*refused) : error.what());
        emulator::fail(kInvalidParameter, reason);  // for aclGetRecentErrMsg
        throw std::runtime_error(reason);
    }
}

std::vector<int64_t> host_numbers(const void* data, aclDataType dtype, uint64_t count, const char* name) {
    if (!data) throw emulator::Refused(std::string(name) + " must be a CPU tensor");
    if (dtype != ACL_INT32) throw emulator::Refused(std::string(name) + " must be int32");
    auto* first = static_cast<const int32_t*>(data);
    return {first, first + count};
}

emulator::Launch EmulatedOperation::bound(const VariantPack& pack) const {
    return bound_launch(name_, [&] {
        if (pack.inputs.size != inputs_ || pack.outputs.size != outputs_)
            throw emulator::Refused("the numbers of inputs and outputs must be " + std::to_string(inputs_) + " and " +
                                    std::to_string(outputs_) + ", not " + std::to_string(pack.inputs.size) + " and " +
                                    std::to_string(pack.outputs.size));
        return bind(pack);
    });
}

Status EmulatedOperation::Setup(const VariantPack& pack, uint64_t& workspace, Context*) {
    bound(pack);
    workspace = workspace_;
    return 0;
}

Status EmulatedOperation::Execute(const VariantPack& pack, uint8_t*, uint64_t, Context* context) {
    int code = emulator::launch(context->GetExecuteStream(), bound(pack));
    if (code)
        throw std::runtime_error("ATB's " + name_ + " failed with " + std::to_string(code) + ": " +
                                 aclGetRecentErrMsg());
    return 0;
}

Status CreateContext(Context** context) {
    *context = new EmulatedContext;
    return 0;
}

Status DestroyContext(Context* context) {
    delete context;
    return 0;
}

Status DestroyOperation(Operation* operation) {
    delete operation;
    return 0;
}

uint64_t Utils::GetTensorNumel(const TensorDesc& desc) {
    uint64_t count = desc.shape.count ? 1 : 0;
    for (uint64_t d = 0; d < desc.shape.count; ++d) count *= desc.shape.dims[d];
    return count;
}
uint64_t Utils::GetTensorNumel(const Tensor& tensor) { return GetTensorNumel(tensor.desc); }
uint64_t Utils::GetTensorSize(const TensorDesc& desc) {
    return GetTensorNumel(desc) * c10::elementSize(emulator::scalar_type(desc.dtype));
}
uint64_t Utils::GetTensorSize(const Tensor& tensor) { return GetTensorSize(tensor.desc); }

}  // namespace atb
