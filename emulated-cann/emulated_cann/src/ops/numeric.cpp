#include "numeric.h"

namespace emulator {

DOCUMENTED("ops-math: math (the page of each operation); ops-nn: index (the page of each operation)");

std::vector<int64_t> broadcast(at::IntArrayRef a, at::IntArrayRef b) {
    std::vector<int64_t> shape(std::max(a.size(), b.size()));
    for (size_t i = 1; i <= shape.size(); ++i) {
        int64_t left = i <= a.size() ? a[a.size() - i] : 1, right = i <= b.size() ? b[b.size() - i] : 1;
        if (left != right && left != 1 && right != 1)
            throw Refused("shapes " + shown(a) + " and " + shown(b) + " cannot be broadcast together");
        shape[shape.size() - i] = left == 1 ? right : left;
    }
    return shape;
}

}  // namespace emulator
