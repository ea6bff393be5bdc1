#include "operations/tensors.h"

#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

namespace emulated {

namespace {

// A Python number among tensors decides less about the result's type than a tensor does.
void keep_number(const at::Tensor& from, at::Tensor& to) {
    if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

}  // namespace

at::Tensor on_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto options = tensor.options().device(at::kCPU).pinned_memory(false);
    at::Tensor alias = tensor.numel() ? at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options)
                                      : at::empty_strided(tensor.sizes(), tensor.strides(), options);
    keep_number(tensor, alias);
    if (tensor.is_conj()) alias = at::_conj(alias);
    if (tensor.is_neg()) alias = at::_neg_view(alias);
    return alias;
}

at::Tensor on_meta(const at::Tensor& tensor) {
    if (!tensor.defined() || (!tensor.is_cuda() && tensor.dim() == 0)) return tensor;
    auto options = tensor.options().device(at::kMeta).pinned_memory(false);
    at::Tensor shape = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    keep_number(tensor, shape);
    return shape;
}

c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace,
                         at::DeviceType device) {
    if (value.isTensor()) return replace(value.toTensor());
    if (value.isDevice()) return c10::Device(device);
    if (value.isTensorList()) {
        c10::List<at::Tensor> made;
        for (const at::Tensor& each : value.toTensorVector()) made.push_back(replace(each));
        return made;
    }
    if (value.isList() && !value.toListRef().empty()) {  // of indices, some of which may be none
        auto first = value.toListRef()[0];
        if (!first.isTensor() && !first.isNone()) return value;
        c10::List<std::optional<at::Tensor>> made;
        for (const c10::IValue& each : value.toListRef()) {
            made.push_back(each.isNone() ? std::nullopt : std::optional(replace(each.toTensor())));
        }
        return made;
    }
    return value;
}

}  // namespace emulated
