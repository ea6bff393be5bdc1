// Lookups of rows of a table with numbers of 8 or 4 bits in groups.
#include <omp.h>

#include <cstdint>
#include <vector>

#include "elements.h"
#include "replay.h"
#include "weight_only.h"

namespace {

constexpr int64_t kSerialRows = 1 << 15;  // elements of the rows, up to which starting threads costs more than it gains

}  // namespace

// Writes the rows of a weight that `ids` names, int64 or else int32; if null, the first ones. Returns 0, or 1 if it has no
// such row. All contiguous.
extern "C" int64_t weight_only_embedding(const void* ids, const void* weight, const void* scales, const void* zeros,
                                         void* y, int dtype, int scale_dtype, int zero_dtype, int numbers, int wide_ids,
                                         int64_t rows, int64_t width, int64_t vocabulary, int64_t group) {
    auto id = [&](int64_t row) {
        if (!ids) return row;
        return wide_ids ? static_cast<const int64_t*>(ids)[row] : int64_t(static_cast<const int32_t*>(ids)[row]);
    };
    for (int64_t row = 0; row < rows; row++)
        if (id(row) < 0 || id(row) >= vocabulary) return 1;
    const int64_t groups = (width + group - 1) / group;
    const WeightOnly given{static_cast<const uint8_t*>(weight), Factors{scales, scale_dtype, groups},
                           Factors{zeros, zero_dtype, groups}, nullptr, 0, numbers, rows, width, vocabulary, group};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel if (rows * width > kSerialRows)
        {
            std::vector<float> of_scales(groups), of_zeros(zeros ? groups : 0);
#pragma omp for
            for (int64_t row = 0; row < rows; row++) {
                given.scales.read(id(row), of_scales.data());
                if (zeros) given.zeros.read(id(row), of_zeros.data());
                widen(given, id(row), of_scales.data(), zeros ? of_zeros.data() : nullptr,
                      static_cast<T*>(y) + row * width);
            }
        }
    });
    return 0;
}

REPLAYABLE(weight_only_embedding)
