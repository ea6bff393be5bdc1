// One call of an operation of torch's for the device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAGuard.h>

#include <optional>
#include <string>

namespace emulated {

using Stack = torch::jit::Stack;

// Computes an operation with torch's kernel for the CPU, on the device's memory, as work on the current stream. The
// shapes of its results are those that its kernel for `meta` says. An operation whose results' shapes depend on values
// waits for the stream, as it does on a GPU.
class Call {
  public:
    Call(const c10::OperatorHandle& operation, const Stack& arguments);

    // What the operation returns.
    Stack run();

  private:
    size_t returned() const { return schema_.returns().size(); }
    bool depends_on_values() const;
    std::optional<Stack> shapes();
    void resize_outputs(const Stack& before);
    void replace_generators();
    Stack arguments_for_work() const;
    std::optional<size_t> argument_returned_as(size_t result) const;
    Stack queue(const Stack& shapes);
    Stack run_now();

    const c10::OperatorHandle& operation_;
    const c10::FunctionSchema& schema_;
    Stack arguments_;
    c10::cuda::OptionalCUDAGuard device_;
    cudaStream_t stream_ = nullptr;
    bool captured_ = false;
};

// Puts work on a stream. An error of a kernel becomes CUDA's sticky one, and an index out of range the device-side
// assert that it is on a GPU.
void submit(cudaStream_t stream, const std::string& name, std::function<void()> work);

}  // namespace emulated
