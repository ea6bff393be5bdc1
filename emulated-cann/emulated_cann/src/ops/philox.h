// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The random numbers of an element
// depend only on the seed, the offset and the element's index, not on threads, strides or earlier calls.
#pragma once

#include <array>
#include <cstdint>

#include "op.h"

namespace emulator {

class Philox {
  public:
    Philox(uint64_t seed, uint64_t offset) : seed_(seed), offset_(offset) {}
    // In a graph, seed and offset are device tensors, so that each replay draws new numbers. A launch adds its offset
    // within the graph.
    Philox(const In& seed, const In& offset, uint64_t offset_in_graph)
        : Philox(seed.tensor().item<int64_t>(), offset.tensor().item<int64_t>() + offset_in_graph) {}

    std::array<uint32_t, 4> operator()(uint64_t index) const {
        std::array<uint32_t, 4> counter{uint32_t(index), uint32_t(index >> 32), uint32_t(offset_),
                                        uint32_t(offset_ >> 32)};
        uint32_t key[2] = {uint32_t(seed_), uint32_t(seed_ >> 32)};
        for (int round = 0; round < 10; ++round) {
            uint64_t first = uint64_t{0xD2511F53} * counter[0], second = uint64_t{0xCD9E8D57} * counter[2];
            counter = {uint32_t(second >> 32) ^ counter[1] ^ key[0], uint32_t(second),
                       uint32_t(first >> 32) ^ counter[3] ^ key[1], uint32_t(first)};
            key[0] += 0x9E3779B9;
            key[1] += 0xBB67AE85;
        }
        return counter;
    }

    uint64_t integer(uint64_t index) const {
        auto words = (*this)(index);
        return uint64_t{words[0]} << 32 | words[1];
    }
    // Returns a multiple of 2^-bits in [0, 1).
    double uniform(uint64_t index, int bits = 53) const {
        return (integer(index) >> (64 - bits)) * 1.0 / (uint64_t{1} << bits);
    }
    double normal(uint64_t index) const;

  private:
    uint64_t seed_, offset_;
};

// Returns a tensor whose element i is draw(i).
template <class T, class Draw>
at::Tensor drawn(at::IntArrayRef shape, const Draw& draw) {
    auto values = at::empty(shape, c10::CppTypeToScalarType<T>::value);
    auto* data = values.template mutable_data_ptr<T>();
    for (int64_t i = 0; i < values.numel(); ++i) data[i] = draw(i);
    return values;
}

}  // namespace emulator

// The last parameters of random operations, and the generator that they make.
#define SEEDED int64_t seed, int64_t offset
#define SEEDED_ON_DEVICE In seed, In offset, uint64_t offset_in_graph
#define NUMBERS Philox(seed, offset)
#define NUMBERS_ON_DEVICE Philox(seed, offset, offset_in_graph)
