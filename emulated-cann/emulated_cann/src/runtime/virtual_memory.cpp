// Reserves addresses and maps memory to them, for torch_npu's expandable segments. The mapped memory of a device is
// stored in one anonymous file; a mapping is a range of it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>

#include "runtime/faults.h"
#include "runtime/memory.h"

DOCUMENTED("runtime: docs/zh/api_ref/11-04_virtual_memory_management.md; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

constexpr size_t granularity = size_t{2} << 20;

struct Physical {
    int device;
    size_t size, offset;  // in the device's file
    int mappings = 0;
    bool freed = false;
};
struct Files {                                           // guarded by the memory's lock
    std::map<int, int> descriptors;                      // by device
    std::map<int, size_t> next;                          // by device: the start of the unused part of its file
    std::multimap<std::pair<int, size_t>, size_t> free;  // by device and size: offsets of freed ranges
    std::map<Physical*, std::unique_ptr<Physical>> handles;
    std::map<void*, Physical*> mapped;
};
Files& files() {
    static auto* only = new Files;
    return *only;
}

int descriptor(int device) {
    auto [entry, is_new] = files().descriptors.try_emplace(device, -1);
    if (is_new) {
        entry->second = memfd_create("npu", MFD_CLOEXEC);
        OURS("a limit of the host machine");
        if (entry->second < 0 || ftruncate(entry->second, span))
            throw std::runtime_error("emulated CANN: the host cannot create a file for device memory (memfd_create)");
    }
    return entry->second;
}

void drop_if_unused(Physical* physical) {
    if (!physical->freed || physical->mappings) return;
    fallocate(descriptor(physical->device), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, physical->offset,
              physical->size);
    files().free.emplace(std::pair(physical->device, physical->size), physical->offset);
    accounts(physical->device).used -= physical->size;
    files().handles.erase(physical);
}

Physical* find(aclrtDrvMemHandle handle) {
    auto found = files().handles.find(static_cast<Physical*>(handle));
    return found == files().handles.end() || found->second->freed ? nullptr : found->second.get();
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclrtReserveMemAddress(void** result, size_t size, size_t, void*, uint64_t) {
    std::lock_guard lock(memory_mutex());
    *result = reserve(current_device(), (size + granularity - 1) / granularity * granularity);
    if (*result) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                format("device %d has no contiguous range of %zu free addresses", current_device(), size));
}

aclError aclrtReleaseMemAddress(void* address) {
    if (owner(address) < 0) return fail(ACL_ERROR_RT_PARAM_INVALID, format("%p is not a reserved address", address));
    std::lock_guard lock(memory_mutex());
    unreserve(address);
    return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* properties, uint64_t) {
    int device = static_cast<int>(properties->location.id);
    if (properties->location.type != ACL_MEM_LOCATION_TYPE_DEVICE || device >= machine().options.devices) {
        OURS("not emulated");
        return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                    "aclrtMallocPhysical: memory outside the devices (option `devices`) is not emulated");
    }
    if (!size || size % granularity) {
        return fail(
            ACL_ERROR_RT_PARAM_INVALID,
            format("aclrtMallocPhysical: the size must be a positive multiple of %zu, but is %zu", granularity, size));
    }
    bool faulty = fault_at(Fault::malloc);
    std::lock_guard lock(memory_mutex());
    if (faulty || !charge(device, size)) {
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                    format("device %d cannot allocate %zu bytes: %zu of %zu are in use (option `memory`)", device, size,
                           accounts(device).used, accounts(device).limit));
    }
    auto physical = std::make_unique<Physical>(Physical{device, size, 0});
    auto reusable = files().free.find({device, size});
    if (reusable != files().free.end()) {
        physical->offset = reusable->second;
        files().free.erase(reusable);
    } else {
        physical->offset = files().next[device];
        files().next[device] += size;
    }
    *handle = physical.get();
    files().handles.emplace(physical.get(), std::move(physical));
    return ACL_SUCCESS;
}

// Existing mappings keep the memory until they are unmapped.
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    std::lock_guard lock(memory_mutex());
    Physical* physical = find(handle);
    if (!physical)
        return fail(ACL_ERROR_RT_INVALID_HANDLE, format("%p is not a live handle of physical memory", handle));
    physical->freed = true;
    drop_if_unused(physical);
    return ACL_SUCCESS;
}

aclError aclrtMapMem(void* address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
    std::lock_guard lock(memory_mutex());
    Physical* physical = find(handle);
    if (!physical)
        return fail(ACL_ERROR_RT_INVALID_HANDLE, format("%p is not a live handle of physical memory", handle));
    if (owner(address) != physical->device || offset + size > physical->size) {
        return fail(
            ACL_ERROR_RT_PARAM_INVALID,
            format("%zu bytes at offset %zu of a physical allocation of %zu bytes on device %d cannot be mapped to %p",
                   size, offset, physical->size, physical->device, address));
    }
    void* mapped = mmap(backing(address), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                        descriptor(physical->device), static_cast<off_t>(physical->offset + offset));
    if (mapped == MAP_FAILED) {
        OURS("a limit of the host machine");
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host cannot map more memory");
    }
    mark_live(address, size);
    files().mapped[address] = physical;
    ++physical->mappings;
    return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void* address) {
    std::lock_guard lock(memory_mutex());
    size_t size = mark_dead(address);
    auto found = files().mapped.find(address);
    if (!size || found == files().mapped.end()) {
        return fail(ACL_ERROR_RT_PARAM_INVALID, format("%p is not the start of a mapping", address));
    }
    Physical* physical = found->second;
    files().mapped.erase(found);
    mmap(backing(address), size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    --physical->mappings;
    drop_if_unused(physical);
    return ACL_SUCCESS;
}

}  // extern "C"
