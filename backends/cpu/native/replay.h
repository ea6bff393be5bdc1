// Calls of kernels with arguments from memory, so that a captured step is data which one function runs.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// An argument of a kernel in 8 bytes: an integer, an address, or a float in the first 4.
template <class T>
inline T argument(int64_t slot) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(slot);
    } else if constexpr (std::is_floating_point_v<T>) {
        static_assert(sizeof(T) == 4, "slots have single floats");
        T value;
        std::memcpy(&value, &slot, sizeof(value));
        return value;
    } else {
        return T(slot);
    }
}

template <class Result, class... Types, size_t... Index>
inline int64_t call_with(Result (*kernel)(Types...), const int64_t* slots, std::index_sequence<Index...>) {
    if constexpr (std::is_void_v<Result>) {
        kernel(argument<Types>(slots[Index])...);
        return 0;
    } else {
        return kernel(argument<Types>(slots[Index])...);
    }
}

template <class Result, class... Types>
inline int64_t call_with(Result (*kernel)(Types...), const int64_t* slots) {
    return call_with(kernel, slots, std::index_sequence_for<Types...>{});
}

// Lets a captured step run a kernel: one that writes only to memory that its arguments name.
#define REPLAYABLE(kernel) \
    extern "C" int64_t replay_##kernel(const int64_t* slots) { return call_with(kernel, slots); }
