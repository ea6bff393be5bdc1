// Tensors of the device as tensors of the CPU, on the same memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>

namespace emulated {

// The same memory as a tensor of the CPU, which does not hold it: what queued work may do at its place in the stream's
// order. Other tensors stay what they are.
at::Tensor on_cpu(const at::Tensor& tensor);

// A tensor of its shape without values. Numbers keep theirs: shapes may depend on them.
at::Tensor on_meta(const at::Tensor& tensor);

// An argument with its tensors replaced, alone or in lists, and with another device where it is a device.
c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace,
                         at::DeviceType device);

}  // namespace emulated
