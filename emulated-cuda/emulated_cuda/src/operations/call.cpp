#include "operations/call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "operations/generator.h"
#include "operations/tensors.h"
#include "runtime/interface.h"

namespace emulated {

namespace {

// Their results' shapes, or the decision that Python takes, depend on values.
const std::set<std::string> dependent = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal",   "aten::is_nonzero",    "aten::item",     "aten::bincount",   "aten::repeat_interleave",
};
// Those that do if they are given a mask.
const std::set<std::string> indexing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

void run_below_autograd(const c10::OperatorHandle& operation, Stack& stack) {
    at::AutoDispatchBelowADInplaceOrView guard;
    c10::InferenceMode inference;
    operation.callBoxed(&stack);
}

// What kernels for the CPU say of a value that kernels for GPUs assert to be in range.
bool is_assertion(const std::exception& error) {
    if (dynamic_cast<const c10::IndexError*>(&error)) return true;
    std::string text = error.what();
    for (const char* phrase : {"out of bounds", "out of range", "probability tensor contains"}) {
        if (text.find(phrase) != std::string::npos) return true;
    }
    return false;
}

std::string first_line(const std::exception& error) {
    std::string text = error.what();
    return text.substr(0, text.find('\n'));
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

at::Tensor allocate_like(const at::Tensor& other) {
    return at::empty_strided(other.sizes(), other.strides(), other.options().device(at::kCUDA));
}

}  // namespace

void submit(cudaStream_t stream, const std::string& name, std::function<void()> work) {
    C10_CUDA_CHECK(emulated_cuda_enqueue(stream, name.c_str(), [name, work = std::move(work)] {
        at::AutoDispatchBelowADInplaceOrView guard;
        c10::InferenceMode inference;
        try {
            work();
        } catch (const std::exception& error) {
            auto kind = is_assertion(error) ? cudaErrorAssert : cudaErrorLaunchFailure;
            emulated_cuda_break(kind, (name + ": " + first_line(error)).c_str());
        }
    }));
}

Call::Call(const c10::OperatorHandle& operation, const Stack& arguments)
    : operation_(operation), schema_(operation.schema()), arguments_(arguments) {
    bool found = false;
    auto look = [&](const at::Tensor& tensor) {
        if (!found && tensor.defined() && tensor.is_cuda()) {
            device_.set_device(tensor.device());
            found = true;
        }
        return tensor;
    };
    for (auto& each : arguments_) {
        with_tensors(each, look, at::kCPU);
        if (!found && each.isDevice() && each.toDevice().is_cuda() && each.toDevice().has_index()) {
            device_.set_device(each.toDevice());
        }
    }
    stream_ = c10::cuda::getCurrentCUDAStream().stream();
    captured_ = emulated_cuda_is_captured(stream_);
}

Stack Call::run() {
    replace_generators();
    if (depends_on_values()) {
        c10::cuda::stream_synchronize(stream_);  // which torch's warnings of waits and CUDA's captures notice
        return run_now();
    }
    if (auto found = shapes()) return queue(*found);
    // No kernel says the shapes, or the arguments are wrong, of which the CPU's kernel tells.
    TORCH_CHECK(!captured_, "emulated CUDA: the shapes of ", schema_.name(), "'s results are not known in a capture");
    emulated_cuda_drain(stream_);
    return run_now();
}

bool Call::depends_on_values() const {
    if (dependent.count(schema_.name())) return true;
    if (!indexing.count(schema_.name())) return false;
    for (const c10::IValue& each : arguments_[1].toListRef()) {
        if (each.isTensor() && each.toTensor().defined()) {
            auto type = each.toTensor().scalar_type();
            if (type == at::kBool || type == at::kByte) return true;
        }
    }
    return false;
}

// The results of the operation's kernel for `meta`, or none if it has none that says them.
std::optional<Stack> Call::shapes() {
    Stack stack;
    for (auto& each : arguments_) {
        stack.push_back(each.isGenerator() ? c10::IValue() : with_tensors(each, on_meta, at::kMeta));
    }
    Stack before = stack;
    try {
        run_below_autograd(operation_, stack);
    } catch (const c10::Error&) {
        return std::nullopt;
    }
    for (auto& each : stack) {
        if (!each.isTensor() && !each.isTensorList() && !each.isNone()) return std::nullopt;
    }
    resize_outputs(before);
    return stack;
}

// As the operation has resized what stands for them.
void Call::resize_outputs(const Stack& before) {
    for (size_t index = 0; index < arguments_.size(); ++index) {
        if (!writes(schema_.arguments()[index]) || !before[index].isTensor()) continue;
        at::Tensor output = arguments_[index].toTensor();
        auto sizes = before[index].toTensor().sizes();
        if (output.defined() && output.is_cuda() && output.sizes() != sizes) output.resize_(sizes);
    }
}

// The CPU's kernels draw from the CPU's generators: one is made for the call, from the state of the device's.
void Call::replace_generators() {
    for (size_t index = 0; index < arguments_.size(); ++index) {
        if (schema_.arguments()[index].type()->str() != "Generator?") continue;
        auto& given = arguments_[index];
        if (given.isGenerator() && !given.toGenerator().device().is_cuda()) continue;
        given = generator_for_call(given, captured_);
    }
}

// What the work reads must be as it is now. The device's memory is, by the stream's order; the host's is copied.
Stack Call::arguments_for_work() const {
    auto alias = [](const at::Tensor& tensor) {
        bool of_host = tensor.defined() && !tensor.is_cuda();
        return of_host && !tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor.clone() : on_cpu(tensor);
    };
    Stack made;
    for (auto& each : arguments_) made.push_back(with_tensors(each, alias, at::kCPU));
    return made;
}

// Of an operation that writes to its argument and returns it.
std::optional<size_t> Call::argument_returned_as(size_t result) const {
    auto* wanted = schema_.returns()[result].alias_info();
    if (!wanted || !wanted->isWrite()) return std::nullopt;
    for (size_t index = 0; index < arguments_.size(); ++index) {
        auto& argument = schema_.arguments()[index];
        if (writes(argument) && argument.alias_info()->beforeSets() == wanted->beforeSets()) return index;
    }
    return std::nullopt;
}

Stack Call::queue(const Stack& shapes) {
    Stack results;
    std::vector<std::vector<at::Tensor>> places(returned());  // where the work puts each result
    for (size_t index = 0; index < returned(); ++index) {
        if (auto argument = argument_returned_as(index)) {
            results.push_back(arguments_[*argument]);
            continue;
        }
        auto make = [&](const at::Tensor& shape) {
            if (!shape.defined()) return shape;
            at::Tensor made = allocate_like(shape);
            places[index].push_back(on_cpu(made));
            return made;
        };
        results.push_back(with_tensors(shapes[index], make, at::kCUDA));
    }
    submit(stream_, schema_.name(), [operation = operation_, places, arguments = arguments_for_work()] {
        Stack stack = arguments;
        operation.callBoxed(&stack);
        for (size_t index = 0; index < places.size(); ++index) {
            if (places[index].empty()) continue;
            auto made = stack[index].isTensorList() ? stack[index].toTensorVector()
                                                    : std::vector<at::Tensor>{stack[index].toTensor()};
            std::erase_if(made, [](const at::Tensor& each) { return !each.defined(); });
            for (size_t each = 0; each < places[index].size(); ++each) places[index][each].copy_(made[each]);
        }
    });
    return results;
}

// Whatever is queued on the stream has run.
Stack Call::run_now() {
    Stack stack = arguments_for_work(), results;
    run_below_autograd(operation_, stack);
    auto to_device = [](const at::Tensor& tensor) {
        if (!tensor.defined() || tensor.is_cuda()) return tensor;
        at::Tensor made = allocate_like(tensor);
        on_cpu(made).copy_(tensor);
        return made;
    };
    for (size_t index = 0; index < returned(); ++index) {
        auto argument = argument_returned_as(index);
        results.push_back(argument ? arguments_[*argument] : with_tensors(stack[index], to_device, at::kCUDA));
    }
    return results;
}

}  // namespace emulated
