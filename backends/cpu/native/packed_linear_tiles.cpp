// The products of packed_linear.cpp by AMX: 16 or 32 rows of x at a time with 32 columns of the weight, which are two
// tiles as they lie in the packed layout.
#include <algorithm>
#include <cstring>
#include <vector>

#include "packed_linear.h"
#include "tiles.h"

#ifdef HAL_TILES
namespace {

constexpr int64_t kColumns = 32, kTileRows = 16, kMostRows = 2 * kTileRows, kAhead = 1024;
constexpr int64_t kBytesOfX = 1 << 20;  // rows that stay in a core's second cache for all columns
constexpr int64_t kChunkBytes = 256 << 10, kSerialBytes = 128 << 10;

// Tiles 0 to 3 are sums, of both halves of the rows times both halves of the columns; 4 and 5 rows of x; 6 and 7 columns.
TileShapes shapes_of(int64_t rows) {
    TileShapes shapes;
    const int64_t first = std::min(rows, kTileRows), second = std::max<int64_t>(1, rows - kTileRows);
    for (int tile = 0; tile < 2; tile++) shapes.set(tile, first, 64), shapes.set(2 + tile, second, 64);
    shapes.set(4, first, 64), shapes.set(5, second, 64);
    shapes.set(6, kTileRows, 64), shapes.set(7, kTileRows, 64);
    return shapes;
}

// sums[r * kColumns + c] of up to kMostRows rows with a block's columns from `weight` on.
template <bool Two>
void multiply(const uint32_t* weight, int64_t block, const bfloat16* x, int64_t x_stride, int64_t steps, float* sums) {
    zero_tile<0>(), zero_tile<1>();
    if (Two) zero_tile<2>(), zero_tile<3>();
    for (int64_t i = 0; i < steps; i++, weight += kTileRows * block, x += kInBlock) {
        for (int row = 0; row < kTileRows; row++) {
            const char* line = reinterpret_cast<const char*>(weight + row * block) + kAhead;
            __builtin_prefetch(line), __builtin_prefetch(line + 64);
        }
        load_tile<4>(x, 2 * x_stride);
        load_tile<6>(weight, 4 * block);
        multiply_pairs<0, 4, 6>();
        load_tile<7>(weight + kTileRows, 4 * block);
        multiply_pairs<1, 4, 7>();
        if (Two) {
            load_tile<5>(x + kTileRows * x_stride, 2 * x_stride);
            multiply_pairs<2, 5, 6>();
            multiply_pairs<3, 5, 7>();
        }
    }
    constexpr int64_t kStride = 4 * kColumns;
    store_tile<0>(sums, kStride), store_tile<1>(sums + kTileRows, kStride);
    if (Two) {
        float* second = sums + kTileRows * kColumns;
        store_tile<2>(second, kStride), store_tile<3>(second + kTileRows, kStride);
    }
}

}  // namespace
#endif

bool multiply_tiles(const PackedProduct& product) {
#ifdef HAL_TILES
    if (product.block % kColumns || !tiles_allowed()) return false;
    const int64_t steps = product.block_pairs * 2 / kInBlock, units = (product.out + kColumns - 1) / kColumns;
    const int64_t unit_bytes = product.block_pairs * kColumns * 4;
    const int64_t chunk = std::max<int64_t>(1, kChunkBytes / unit_bytes / std::max<int64_t>(1, product.rows / kMostRows));
    const int64_t in_block = product.block / kColumns;
    thread_local std::vector<bfloat16> copies;
    const bfloat16* x = product.x;
    int64_t stride = product.x_stride;
    if (product.width % kInBlock) {  // tiles have whole rows
        stride = 2 * product.block_pairs;
        copies.assign(product.rows * stride, bfloat16(0.0f));
        for (int64_t row = 0; row < product.rows; row++)
            std::copy_n(product.x + row * product.x_stride, product.width, copies.data() + row * stride);
        x = copies.data();
    }
    const int64_t at_once = std::max(kMostRows, kBytesOfX / (2 * stride) / kMostRows * kMostRows);
    for (int64_t begin = 0; begin < product.rows; begin += at_once) {
        PackedProduct part = product;
        part.rows = std::min(at_once, product.rows - begin);
        part.y += begin * product.out;
#pragma omp parallel if (product.out * product.block_pairs * 4 > kSerialBytes)
        {
            std::vector<float> sums((part.rows + kTileRows) * kColumns);
#pragma omp for schedule(dynamic, chunk)
            for (int64_t unit = 0; unit < units; unit++) {
                const uint32_t* weight = product.weight + unit / in_block * product.block_pairs * product.block +
                                         unit % in_block * kColumns;
                for (int64_t row = 0; row < part.rows; row += kMostRows) {
                    const int64_t rows = std::min(kMostRows, part.rows - row);
                    load_shapes(shapes_of(rows));
                    const auto run = rows > kTileRows ? multiply<true> : multiply<false>;
                    run(weight, product.block, x + (begin + row) * stride, stride, steps, sums.data() + row * kColumns);
                }
                part.write(sums.data(), kColumns, unit * kColumns, std::min(kColumns, product.out - unit * kColumns));
            }
            release_tiles();
        }
    }
    return true;
#else
    return false;
#endif
}

// Whether products run in tiles, which are fast for many rows, too.
extern "C" int multiplies_tiles() {
#ifdef HAL_TILES
    return tiles_allowed();
#else
    return 0;
#endif
}
