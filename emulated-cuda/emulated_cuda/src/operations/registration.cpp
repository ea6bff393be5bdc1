// Puts the emulated kernels in the place of torch's kernels for CUDA, when the library is loaded.
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "operations/call.h"
#include "operations/tensors.h"

namespace emulated {

namespace {

// These stay torch's own: they allocate, look at tensors, or move bytes by CUDA's functions, and launch no kernel.
const std::set<std::string> kept = {
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::_efficientzerotensor",
    "aten::_fused_sdp_choice",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_resize_output_",
    "aten::copy_",
    "aten::empty",
    "aten::empty_quantized",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::unfold",
};

// A view has no kernel to emulate.
bool is_view(const c10::FunctionSchema& schema) {
    for (auto& each : schema.returns()) {
        if (each.alias_info() && !each.alias_info()->isWrite()) return true;
    }
    return false;
}

void call(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
    size_t count = operation.schema().arguments().size();
    Stack results = Call(operation, Stack(stack->end() - count, stack->end())).run();
    torch::jit::drop(*stack, count);
    stack->insert(stack->end(), results.begin(), results.end());
}

// Within a device a copy is a kernel. Between the device and the host torch's own function looks whether memory is
// pinned and whether a capture is under way, and calls cudaMemcpyAsync.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
    if (!self.is_cuda() || self.device() != source.device()) return at::native::copy_(self, source, non_blocking);
    c10::cuda::CUDAGuard device(self.device());
    submit(c10::cuda::getCurrentCUDAStream().stream(), "aten::copy_",
           [to = on_cpu(self), from = on_cpu(source)] { to.copy_(from); });
    return self;
}

class Silent : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

// Every operation of torch's that has a kernel for CUDA.
struct Registration {
    Registration() {
        Silent silent;  // torch warns of each kernel that takes the place of another
        c10::WarningUtils::WarningHandlerGuard guard(&silent);
        auto& dispatcher = c10::Dispatcher::singleton();
        auto put = [&](const c10::OperatorName& name, c10::KernelFunction kernel) {
            handles.push_back(
                dispatcher.registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel), {}, nullptr, "emulated CUDA"));
        };
        for (auto& name : dispatcher.getAllOpNames()) {
            auto operation = dispatcher.findSchema(name);
            if (!operation || name.name.rfind("aten::", 0) != 0 || kept.count(name.name)) continue;
            if (is_view(operation->schema()) || !operation->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
            put(name, c10::KernelFunction::makeFromBoxedFunction<&call>());
        }
        put({"aten::copy_", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy));
    }
    std::vector<c10::RegistrationHandleRAII> handles;
};
const auto* const registration = new Registration;  // not destroyed: the process may end in the middle of a call

}  // namespace

}  // namespace emulated

// For kernels in Python: torch.ops.emulated_cuda.on_cpu.
TORCH_LIBRARY(emulated_cuda, library) {
    library.def("on_cpu(Tensor tensor) -> Tensor");
    library.impl("on_cpu", c10::DispatchKey::CompositeExplicitAutograd,
                 [](const at::Tensor& tensor) { return emulated::on_cpu(tensor); });
}
