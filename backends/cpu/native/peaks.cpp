// Reads of memory and products in registers at the highest rates of the processor, to measure floors with.
#include <cstdint>

#include "elements.h"
#include "panels.h"
#include "products.h"
#include "tiles.h"

namespace {

using Pieces = uint64_t __attribute__((vector_size(64)));
constexpr int64_t kPiece = 1 << 16, kAheadBytes = 4096;

// Adds products to as many vectors of sums as multiply() of panels.h holds. Returns the operations.
template <class T>
int64_t add_products(int64_t steps) {
    using P = Product<T>;
    constexpr int kSums = kBand * kPanelVectors;
    const Operand<T> zeros[P::kStep] = {};
    typename P::Vector left = P::repeated(zeros), right = load<typename P::Vector>(zeros);
    asm volatile("" : IN_REGISTER(left), IN_REGISTER(right));  // the compiler knows that zeros add nothing
    Lanes sums[kSums] = {};
    for (int64_t i = 0; i < steps; i++)
#pragma GCC unroll 24
        for (int s = 0; s < kSums; s++) {
            P::add(sums[s], left, right);
            asm volatile("" : IN_REGISTER(sums[s]));
        }
    return steps * kSums * P::kStep * 2;
}

#ifdef HAL_PANEL_TILES
int64_t add_tiles(int64_t steps) {
    load_panel_shapes();
    for (int64_t i = 0; i < steps; i++)
        multiply_pairs<0, 4, 6>(), multiply_pairs<1, 4, 7>(), multiply_pairs<2, 5, 6>(), multiply_pairs<3, 5, 7>();
    release_tiles();
    return steps * 4 * (16 * 16 * 32 * 2);
}
#endif

}  // namespace

// Reads memory on all threads. Returns the exclusive or of its words, but for the last that do not fill a piece.
extern "C" uint64_t read_memory(const char* start, int64_t bytes) {
    uint64_t found = 0;
#pragma omp parallel for reduction(^ : found)
    for (int64_t piece = 0; piece < bytes / kPiece; piece++) {
        Pieces sums[4] = {};
        for (const char *from = start + piece * kPiece, *end = from + kPiece; from < end; from += sizeof(sums)) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __builtin_prefetch(from + i * sizeof(Pieces) + kAheadBytes);
                sums[i] ^= load<Pieces>(from + i * sizeof(Pieces));
            }
        }
        const Pieces all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
        for (int i = 0; i < 8; i++) found ^= all[i];
    }
    return found;
}

// Multiplies elements of `dtype` in the registers of all threads. Returns the operations.
extern "C" int64_t multiply_in_registers(int dtype, int64_t steps) {
    int64_t found = 0;
#pragma omp parallel reduction(+ : found)
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
#ifdef HAL_PANEL_TILES
        if (std::is_same_v<T, bfloat16> && tiles_allowed()) return void(found += add_tiles(steps));
#endif
        found += add_products<T>(steps);
    });
    return found;
}

// Returns the instruction sets that the kernels were compiled for.
extern "C" const char* instructions() {
    return ""
#ifdef __SSE4_1__
           "SSE4 "
#endif
#ifdef __AVX2__
           "AVX2 "
#endif
#ifdef __AVXVNNI__
           "AVX-VNNI "
#endif
#ifdef __AVX512BW__
           "AVX-512 "
#endif
#ifdef __AVX512VNNI__
           "AVX512-VNNI "
#endif
#ifdef __AVX512BF16__
           "AVX512-BF16 "
#endif
#ifdef HAL_TILES
           "AMX "
#endif
#ifdef __aarch64__
           "NEON "
#endif
        ;
}

// Converts, multiplies and adds in each way that the kernels do, to see whether the processor knows the instructions.
extern "C" int try_instructions() {
    float16 halves[kLanes] = {};
    bfloat16 others[kLanes] = {};
    Lanes sum = wide(halves) + wide(others);
    narrow(sum, halves), narrow(sum, others);
    float found = float(halves[0]) + float(others[0]);
#ifdef HAL_INTEGERS
    const Ints integers = dot(Ints{}, Shorts{} + 1, Shorts{} + int16_t(found));
    found += integers[0];
#endif
    for (const int dtype : {kFloat32, kBFloat16, kFloat16}) found += multiply_in_registers(dtype, 1) == 0;
    return int(found);
}
