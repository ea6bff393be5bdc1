#include "hccl/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/errors.h"

OURS("ranks share memory of this machine; they must run on it, in one container and as one user");

namespace emulator {

SharedMemory::SharedMemory(const char* name, size_t bytes) : file(memfd_create(name, MFD_CLOEXEC)) {
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
        int problem = errno;
        close_file();
        throw HcclError(HCCL_E_MEMORY, format("the host cannot create shared memory: %s", std::strerror(problem)));
    }
    map(bytes);
}

SharedMemory::SharedMemory(int process, int descriptor, size_t bytes)
    : file(open(format("/proc/%d/fd/%d", process, descriptor).c_str(), O_RDWR | O_CLOEXEC)) {
    if (file < 0) {
        throw HcclError(HCCL_E_REMOTE, format("the memory of process %d cannot be opened (%s): it has ended, or runs in "
                                              "another container or as another user",
                                              process, std::strerror(errno)));
    }
    map(bytes);
    close_file();
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
    std::swap(address, other.address);
    std::swap(size, other.size);
    std::swap(file, other.file);
    return *this;
}

SharedMemory::~SharedMemory() {
    if (address) munmap(address, size);
    close_file();
}

void SharedMemory::map(size_t bytes) {
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (found == MAP_FAILED) {
        int problem = errno;
        close_file();
        throw HcclError(HCCL_E_MEMORY, format("the host cannot map shared memory: %s", std::strerror(problem)));
    }
    address = static_cast<char*>(found);
    size = bytes;
}

void SharedMemory::close_file() {
    if (file >= 0) close(file);
    file = -1;
}

void SharedMemory::release(size_t offset, size_t bytes) const {
    static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_t begin = (offset + page - 1) / page * page, end = (offset + bytes) / page * page;
    if (begin < end) madvise(address + begin, end - begin, MADV_REMOVE);
}

}  // namespace emulator
