#include "operations/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAFunctions.h>

namespace emulated {

c10::IValue generator_for_call(const c10::IValue& given, bool captured) {
    constexpr uint64_t step = 4, spread = 1000003;  // the offset of a generator of the device is a multiple of 4
    uint64_t seed = spread;                         // torch does not tell a generator's state in a capture
    if (!captured) {
        at::Generator of_device = given.isGenerator()
                                      ? given.toGenerator()
                                      : at::cuda::detail::getDefaultCUDAGenerator(c10::cuda::current_device());
        std::lock_guard lock(of_device.mutex());
        uint64_t offset = of_device.get_offset();
        seed = of_device.current_seed() * spread + offset;
        of_device.set_offset(offset + step);
    }
    return at::make_generator<at::CPUGeneratorImpl>(seed);
}

}  // namespace emulated
