// Pinned host memory, allocated by aclrtMallocHost or registered. Copies from and to it are asynchronous.
#include <sys/mman.h>

#include <algorithm>

#include "runtime/memory.h"
#include "runtime/races.h"

DOCUMENTED("runtime: docs/zh/api_ref/11-02_host_memory_management.md; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

struct Pinned {
    std::mutex mutex;
    std::map<uintptr_t, size_t> pieces;  // address to size
};
Pinned& all() {
    static auto* only = new Pinned;
    return *only;
}

uintptr_t host_number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

int malloc_host(void** result, size_t size) {
    size = (std::max<size_t>(size, 1) + 4095) / 4096 * 4096;
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
        OURS("a limit of the host machine");
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, format("the host cannot allocate %zu bytes", size));
    }
    std::lock_guard lock(all().mutex);
    all().pieces.emplace(host_number(address), size);
    *result = address;
    return ACL_SUCCESS;
}

}  // namespace

bool pinned(const void* address, size_t bytes) {
    std::lock_guard lock(all().mutex);
    auto after = all().pieces.upper_bound(host_number(address));
    if (after == all().pieces.begin()) return false;
    auto holder = std::prev(after);
    return host_number(address) + bytes <= holder->first + holder->second;
}

size_t pinned_allocations() {
    std::lock_guard lock(all().mutex);
    return all().pieces.size();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclrtMallocHost(void** address, size_t size) { return malloc_host(address, size); }
aclError aclrtMallocHostWithCfg(void** address, uint64_t size, aclrtMallocConfig*) {
    return malloc_host(address, size);
}

aclError aclrtFreeHost(void* address) {
    std::lock_guard lock(all().mutex);
    auto found = all().pieces.find(host_number(address));
    if (found == all().pieces.end()) {
        return fail(ACL_ERROR_RT_PARAM_INVALID, format("%p is not a live allocation of aclrtMallocHost", address));
    }
    free_in_order(address, found->second);
    munmap(address, found->second);
    all().pieces.erase(found);
    return ACL_SUCCESS;
}

// Registered memory counts as pinned for copies. Kernels cannot access it.
aclError aclrtHostRegisterV2(void* address, uint64_t size, uint32_t flags) {
    if (flags & ACL_HOST_REG_MAPPED) {
        OURS("not emulated");
        return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtHostRegisterV2: ACL_HOST_REG_MAPPED is not emulated");
    }
    std::lock_guard lock(all().mutex);
    if (all().pieces.emplace(host_number(address), size).second) return ACL_SUCCESS;
    return fail(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, format("%p must not be registered already", address));
}

aclError aclrtHostUnregister(void* address) {
    std::lock_guard lock(all().mutex);
    if (all().pieces.erase(host_number(address))) return ACL_SUCCESS;
    return fail(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, format("%p is not registered", address));
}

}  // extern "C"
