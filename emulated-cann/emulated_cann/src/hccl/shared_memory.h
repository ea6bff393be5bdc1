// Memory that processes share: anonymous files, which other processes of the same user open through /proc. They have no
// name, are not limited by the size of /dev/shm, and the kernel frees them when the last process has unmapped them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "hccl/hccl_types.h"

namespace emulator {

// A function of HCCL fails with this code and reason.
struct HcclError : std::runtime_error {
    HcclError(HcclResult code, const std::string& reason) : std::runtime_error(reason), code(code) {}
    HcclResult code;
};

// A mapping of a whole file. Pages that were never written take no memory.
class SharedMemory {
  public:
    SharedMemory() = default;
    // Creates a file. It is open, so that others can open it, until `close_file`.
    SharedMemory(const char* name, size_t bytes);
    // Opens a file of a process, which may be this one.
    SharedMemory(int process, int descriptor, size_t bytes);
    SharedMemory(SharedMemory&& other) noexcept;
    SharedMemory& operator=(SharedMemory&& other) noexcept;
    ~SharedMemory();

    char* data() const { return address; }
    int descriptor() const { return file; }
    void close_file();
    // Gives the pages within these bytes back. They then read as zeros.
    void release(size_t offset, size_t bytes) const;

  private:
    void map(size_t bytes);
    char* address = nullptr;
    size_t size = 0;
    int file = -1;
};

}  // namespace emulator
