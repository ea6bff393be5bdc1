// Vector clocks, which say what is ordered before what.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulator {

// By timeline, the number of its last access to memory that is ordered before.
struct Times {
    std::vector<uint64_t> of;

    void join(const Times& other) {
        if (of.size() < other.of.size()) of.resize(other.of.size());
        for (size_t i = 0; i < other.of.size(); ++i) of[i] = std::max(of[i], other.of[i]);
    }
    bool cover(uint32_t timeline, uint64_t number) const { return timeline < of.size() && of[timeline] >= number; }
};

// What runs in order: a stream, a further lane of a graph, or all threads of the host. Lane 0 of a replay is part of
// the timeline that replays it.
struct Timeline {
    uint32_t id;
    Times times = {};
    std::shared_ptr<const Times> issued = nullptr;  // what the host had waited for at the last task that began

    uint64_t tick() {
        if (times.of.size() <= id) times.of.resize(id + 1);
        return ++times.of[id];
    }
};

}  // namespace emulator
