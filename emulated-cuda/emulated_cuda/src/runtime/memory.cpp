// Allocations. Device memory is memory of the process, as what emulates kernels runs there. Each allocation ends where
// memory that cannot be touched begins, to 256 bytes, and a page of such memory lies before it: a read or write past
// its end kills the process, as compute-sanitizer would report it. torch asks for large pieces and hands out parts of
// them, so tensors have such ends only with PYTORCH_NO_CUDA_MEMORY_CACHING=1. New memory is full of NaN.
#include "runtime/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>

#include "runtime/capture.h"
#include "runtime/stream.h"

namespace emulated {

namespace {

constexpr size_t page = 4096;
constexpr size_t alignment = 256;             // cudaMalloc's
constexpr size_t poisoned = size_t{4} << 20;  // a large cache should cost only the pages that it uses
constexpr int poison = 0xFF;                  // NaN in every floating type, -1 in the integers

struct Allocation {
    size_t size;
    cudaMemoryType type;
    int device;
    void* mapped;  // null for memory that was registered, and is its owner's
    size_t mapped_size;
};

std::map<uintptr_t, Allocation>& allocations() {
    static auto* all = new std::map<uintptr_t, Allocation>;
    return *all;
}

size_t used[max_devices];  // bytes

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }
size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

const Allocation* containing(const void* address) {
    auto above = allocations().upper_bound(number(address));
    if (above == allocations().begin()) return nullptr;
    auto& [start, found] = *--above;
    return number(address) < start + found.size ? &found : nullptr;
}

cudaError_t allocate(void** address, size_t wanted, cudaMemoryType type) {
    if (cudaError_t error = refuse_unsafe()) return error;
    int device = current_device();
    size_t size = round_up(std::max<size_t>(wanted, 1), alignment), inside = round_up(size, page);
    bool on_device = type == cudaMemoryTypeDevice;
    // cudaErrorMemoryAllocation leaves everything as it was.
    if (on_device && (wanted > options().memory || used[device] + size > options().memory)) {
        return report(cudaErrorMemoryAllocation);
    }
    size_t whole = inside + 2 * page;
    void* mapped = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return report(cudaErrorMemoryAllocation);
    char* first = static_cast<char*>(mapped) + page;
    mprotect(first, inside, PROT_READ | PROT_WRITE);
    *address = first + inside - size;
    std::memset(*address, poison, std::min(size, poisoned));
    allocations()[number(*address)] = {size, type, device, mapped, whole};
    if (on_device) used[device] += size;
    return cudaSuccess;
}

cudaError_t release(void* address) {
    if (!address) return cudaSuccess;
    if (cudaError_t error = refuse_unsafe()) return error;
    auto found = allocations().find(number(address));
    if (found == allocations().end() || !found->second.mapped) return report(cudaErrorInvalidValue);
    drain_everything();  // cudaFree waits for whatever may use the memory
    Allocation freed = found->second;
    allocations().erase(found);
    if (freed.type == cudaMemoryTypeDevice) used[freed.device] -= freed.size;
    munmap(freed.mapped, freed.mapped_size);
    return report(broken());
}

}  // namespace

cudaMemoryType type_of(const void* address) {
    const Allocation* found = containing(address);
    return found ? found->type : cudaMemoryTypeUnregistered;
}

}  // namespace emulated

using namespace emulated;

extern "C" {

cudaError_t cudaMalloc(void** address, size_t size) {
    Lock lock;
    return allocate(address, size, cudaMemoryTypeDevice);
}

cudaError_t cudaFree(void* address) {
    Lock lock;
    return release(address);
}

cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
    Lock lock;
    return allocate(address, size, cudaMemoryTypeHost);
}

cudaError_t cudaFreeHost(void* address) {
    Lock lock;
    return release(address);
}

cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
    Lock lock;
    allocations()[number(address)] = {size, cudaMemoryTypeHost, current_device(), nullptr, 0};
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
    Lock lock;
    return allocations().erase(number(address)) ? cudaSuccess : report(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    Lock lock;
    *total = options().memory;
    *free = options().memory - used[current_device()];
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    Lock lock;
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    const Allocation* found = containing(address);
    if (!found) return cudaSuccess;
    attributes->type = found->type;
    attributes->device = found->device;
    attributes->devicePointer = const_cast<void*>(address);
    if (found->type == cudaMemoryTypeHost) attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
}

}  // extern "C"
