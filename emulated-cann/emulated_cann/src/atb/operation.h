// The base class of emulated ATB operations. It checks the tensors of a call and launches the kernel.
#pragma once

#include "atb.h"
#include "ops/op.h"

namespace atb {

// Returns an aclnn handle over the device memory of a tensor in a VariantPack.
aclTensor handle_of(const Tensor& tensor);

// Returns the launch that `bind` returns, of the operation `name`. Throws std::runtime_error for what `bind` refuses.
emulator::Launch bound_launch(const std::string& name, const std::function<emulator::Launch()>& bind);

// Returns the numbers of an int32 tensor in host memory; `name` is for the refusal of any other.
std::vector<int64_t> host_numbers(const void* data, aclDataType dtype, uint64_t count, const char* name);
inline std::vector<int64_t> host_numbers(const Tensor& tensor, const char* name) {
    return host_numbers(tensor.host_data, tensor.desc.dtype, Utils::GetTensorNumel(tensor), name);
}

// Errors are thrown, because torch_npu ignores some of ATB's status codes and explains none. An exception reaches
// Python with its message.
class EmulatedOperation : public Operation {
  public:
    EmulatedOperation(std::string name, uint32_t inputs, uint32_t outputs, uint64_t workspace)
        : name_(std::move(name)), inputs_(inputs), outputs_(outputs), workspace_(workspace) {}
    std::string GetName() const override { return name_; }
    Status InferShape(const SVector<TensorDesc>& inputs, SVector<TensorDesc>& outputs) const override;
    uint32_t GetInputNum() const override { return inputs_; }
    uint32_t GetOutputNum() const override { return outputs_; }
    Status Setup(const VariantPack& pack, uint64_t& workspace, Context* context) override;
    Status Execute(const VariantPack& pack, uint8_t* workspace, uint64_t workspace_bytes, Context* context) override;

  protected:
    // Returns the launch of one call, with copies of the host data that it reads. Throws Refused.
    virtual emulator::Launch bind(const VariantPack& pack) const = 0;

  private:
    emulator::Launch bound(const VariantPack& pack) const;
    std::string name_;
    uint32_t inputs_, outputs_;
    uint64_t workspace_;
};

}  // namespace atb
