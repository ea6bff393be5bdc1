// What can be chosen about the emulated machine, by variables of the environment. They are read once.
#pragma once

#include <cstddef>
#include <random>

namespace emulated {

constexpr int max_devices = 16;

struct Options {
    int devices = 1;  // EMULATED_CUDA_DEVICES
    size_t memory;    // bytes of each device; EMULATED_CUDA_MEMORY, in MiB
    int major = 9;    // EMULATED_CUDA_CAPABILITY, such as 9.0
    int minor = 0;
    bool reordered = false;  // EMULATED_CUDA_SEED is set: work runs late, in an order that it draws
    unsigned seed = 0;
};

const Options& options();

// The next number of the sequence that EMULATED_CUDA_SEED begins, below `limit`. Called under the lock.
unsigned draw(unsigned limit);

}  // namespace emulated
