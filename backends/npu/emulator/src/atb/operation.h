// What every emulated ATB operation is: a check of its tensors, and a launch.
#pragma once

#include "atb.h"
#include "ops/op.h"

namespace atb {

// A tensor of the pack, as an aclnn handle over the same device memory.
aclTensor handle_of(const Tensor& tensor);

// ATB reports errors by codes that torch_npu partly ignores and never explains, so errors are thrown here: they reach
// Python with their words.
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
    // The launch of one call, which has copied what it needs from the host. Throws Refused.
    virtual emulator::Launch bind(const VariantPack& pack) const = 0;

  private:
    emulator::Launch bound(const VariantPack& pack) const;
    std::string name_;
    uint32_t inputs_, outputs_;
    uint64_t workspace_;
};

}  // namespace atb
