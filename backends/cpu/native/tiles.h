// The tile registers of AMX. With HAL_EMULATED_TILES, functions on memory replace them, to test the callers elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

#include "elements.h"

#if defined(HAL_EMULATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define HAL_TILES

// Rows and bytes of each tile, as the processor reads them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int64_t count, int64_t row_bytes) {
        rows[tile] = uint8_t(count), bytes[tile] = uint16_t(row_bytes);
    }
};

#ifdef HAL_EMULATED_TILES
struct EmulatedTiles {
    TileShapes shapes;
    uint8_t tile[8][16][64];
};
inline thread_local EmulatedTiles emulated;

inline bool tiles_allowed() { return true; }
inline void load_shapes(const TileShapes& shapes) {
    emulated.shapes = shapes;
    std::memset(emulated.tile, 0, sizeof(emulated.tile));
}
inline void release_tiles() { emulated.shapes = TileShapes{}; }
template <int T>
inline void zero_tile() {
    std::memset(emulated.tile[T], 0, sizeof(emulated.tile[T]));
}
template <int T>
inline void load_tile(const void* from, int64_t stride) {
    zero_tile<T>();
    for (int row = 0; row < emulated.shapes.rows[T]; row++)
        std::memcpy(emulated.tile[T][row], static_cast<const char*>(from) + row * stride, emulated.shapes.bytes[T]);
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
    for (int row = 0; row < emulated.shapes.rows[T]; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, emulated.tile[T][row], emulated.shapes.bytes[T]);
}
// C[m][n] += the dot of pairs k of A[m][k] and B[k][n].
template <int C, int A, int B>
inline void multiply_pairs() {
    for (int m = 0; m < emulated.shapes.rows[C]; m++)
        for (int n = 0; n < emulated.shapes.bytes[C] / 4; n++) {
            float sum;
            std::memcpy(&sum, emulated.tile[C][m] + 4 * n, 4);
            for (int k = 0; k < emulated.shapes.bytes[A] / 4; k++)
                for (int i = 0; i < 2; i++) {
                    bfloat16 a, b;
                    std::memcpy(&a, emulated.tile[A][m] + 4 * k + 2 * i, 2);
                    std::memcpy(&b, emulated.tile[B][k] + 4 * n + 2 * i, 2);
                    sum += float(a) * float(b);
                }
            std::memcpy(emulated.tile[C][m] + 4 * n, &sum, 4);
        }
}
// The same of int32 and four signed bytes.
template <int C, int A, int B>
inline void multiply_bytes() {
    for (int m = 0; m < emulated.shapes.rows[C]; m++)
        for (int n = 0; n < emulated.shapes.bytes[C] / 4; n++) {
            int32_t sum;
            std::memcpy(&sum, emulated.tile[C][m] + 4 * n, 4);
            for (int k = 0; k < emulated.shapes.bytes[A]; k++)
                sum += int8_t(emulated.tile[A][m][k]) * int8_t(emulated.tile[B][k / 4][4 * n + k % 4]);
            std::memcpy(emulated.tile[C][m] + 4 * n, &sum, 4);
        }
}

#else
#include <sys/syscall.h>
#include <unistd.h>

// Whether the system lets this process use tiles; Linux wants to be asked (arch/x86/xstate.rst).
inline bool tiles_allowed() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return allowed;
}
// Not the intrinsics: GCC's are macros that take a tile's number as text, and do not name the memory that they read.
inline void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void multiply_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void multiply_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif
#endif
