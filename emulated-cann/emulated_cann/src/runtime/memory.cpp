// Every device has a span of addresses that the host cannot access (PROT_NONE) and, at a fixed offset, its backing
// memory for kernels and copies. Addresses are allocated in ascending order and reused only after the whole span, so a
// stale pointer rarely points into a new allocation. Memory is filled with `poison` when it is allocated and when it is
// freed.
#include "runtime/memory.h"

#include <sys/mman.h>

#include <cstring>

#include "runtime/faults.h"
#include "runtime/races.h"

DOCUMENTED(
    "runtime: docs/zh/api_ref/11-01_device_memory_malloc_and_free.md"
    "; runtime: docs/zh/api_ref/25-01_aclError.md");

namespace emulator {

namespace {

constexpr size_t alignment = 512;
constexpr int poison = 0xFF;  // NaN in every floating type, -1 in the integers
// Larger allocations are not filled, so that a large cache takes only the pages that it uses.
constexpr size_t poison_limit = size_t{256} << 20;

struct Spans {
    char* devices = nullptr;  // PROT_NONE
    char* backing = nullptr;
    std::vector<size_t> next;                        // by device
    std::vector<std::map<uintptr_t, size_t>> taken;  // by device: allocated or reserved addresses, to size
    std::vector<std::map<uintptr_t, size_t>> live;   // by device: addresses with memory, to size
    std::vector<DeviceMemory> accounts;
    std::mutex mutex;
};

Spans& spans() {
    static auto* only = [] {
        auto* created = new Spans;
        size_t count = std::min<size_t>(machine().options.devices, max_devices);
        auto map = [&](int protection) {
            void* address = mmap(nullptr, span * count, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (address == MAP_FAILED) {
                OURS("a limit of the host machine");
                throw std::runtime_error(
                    format("emulated CANN: the host cannot reserve %zu GiB of addresses; `ulimit -v` must be unlimited",
                           (span * count) >> 30));
            }
            return static_cast<char*>(address);
        };
        created->devices = map(PROT_NONE);
        created->backing = map(PROT_READ | PROT_WRITE);
        madvise(created->devices, span * count, MADV_DONTDUMP);
        created->next.resize(count);
        created->taken.resize(count);
        created->live.resize(count);
        created->accounts.resize(count);
        for (auto& account : created->accounts) account.limit = machine().options.memory;
        return created;
    }();
    return *only;
}

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }
size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Returns a free range of addresses, searching from `next` on.
char* find_free_range(int device, size_t size) {
    auto& self = spans();
    char* base = self.devices + span * device;
    for (int turn = 0; turn < 2; ++turn) {
        size_t start = self.next[device];
        auto& taken = self.taken[device];
        auto above = taken.lower_bound(number(base + start));
        while (start + size <= span) {
            if (above == taken.end() || number(base + start + size) <= above->first) {
                self.next[device] = start + size;
                return base + start;
            }
            start = above->first + above->second - number(base);
            start = round_up(start, alignment);
            ++above;
        }
        self.next[device] = 0;
    }
    return nullptr;
}

void fill(void* address, size_t size) {
    if (size <= poison_limit) std::memset(backing(address), poison, size);
}

}  // namespace

std::mutex& memory_mutex() { return spans().mutex; }
DeviceMemory& accounts(int device) { return spans().accounts.at(device); }

void* reserve(int device, size_t size) {
    char* address = find_free_range(device, size);
    if (address) spans().taken[device].emplace(number(address), size);
    return address;
}

void unreserve(void* address) { spans().taken[owner(address)].erase(number(address)); }

bool charge(int device, size_t size) {
    auto& account = accounts(device);
    if (account.used + size > account.limit) return false;
    account.used += size;
    account.peak = std::max(account.peak, account.used);
    return true;
}

void mark_live(void* address, size_t size) { spans().live[owner(address)].emplace(number(address), size); }

size_t mark_dead(void* address) {
    if (owner(address) < 0) return 0;
    auto& live = spans().live[owner(address)];
    auto found = live.find(number(address));
    if (found == live.end()) return 0;
    size_t size = found->second;
    free_in_order(address, size);
    live.erase(found);
    return size;
}

void* allocate(int device, size_t size) {
    size = round_up(std::max<size_t>(size, 1), alignment);
    std::lock_guard lock(memory_mutex());
    if (!charge(device, size)) return nullptr;
    void* address = reserve(device, size);
    if (!address) {
        accounts(device).used -= size;
        return nullptr;
    }
    mark_live(address, size);
    fill(address, size);
    return address;
}

bool release(void* address) {
    std::lock_guard lock(memory_mutex());
    size_t size = mark_dead(address);
    if (!size) return false;
    // Poisons the memory, so that use after free is detected, and returns its pages to the system.
    fill(address, size);
    auto first = round_up(number(backing(address)), 4096), last = (number(backing(address)) + size) / 4096 * 4096;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    accounts(owner(address)).used -= size;
    unreserve(address);
    return true;
}

int owner(const void* address) {
    auto& self = spans();
    auto offset = number(address) - number(self.devices);
    return number(address) >= number(self.devices) && offset < span * self.live.size() ? static_cast<int>(offset / span)
                                                                                       : -1;
}

void* backing(const void* address) {
    if (!address) return nullptr;
    if (owner(address) < 0) throw std::out_of_range(format("%p is not an address of device memory", address));
    return spans().backing + (number(address) - number(spans().devices));
}

std::string objection(const void* address, size_t bytes, int device) {
    if (!address || !bytes) return "";
    int of = owner(address);
    if (of < 0) return format("%p is host memory, which kernels cannot access", address);
    if (of != device) return format("%p is memory of device %d, but the stream is on device %d", address, of, device);
    std::lock_guard lock(memory_mutex());
    auto& live = spans().live[device];
    auto after = live.upper_bound(number(address));
    uintptr_t reached = number(address);
    if (after != live.begin()) {
        auto holder = std::prev(after);
        reached = std::max(reached, holder->first + holder->second);
        // Adjacent mappings form one range.
        while (after != live.end() && after->first == reached && reached < number(address) + bytes) {
            reached += after->second;
            ++after;
        }
    }
    if (reached >= number(address) + bytes) return "";
    if (reached == number(address))
        return format("%p is not allocated on device %d: freed, or never allocated", address, device);
    return format("%zu bytes from %p on exceed their allocation, which ends after %zu", bytes, address,
                  static_cast<size_t>(reached - number(address)));
}

size_t live_allocations() {
    std::lock_guard lock(memory_mutex());
    size_t count = 0;
    for (auto& each : spans().live) count += each.size();
    return count;
}

namespace {

int malloc_device(void** result, size_t size) {
    if (!result || !size) return fail(ACL_ERROR_RT_PARAM_INVALID, "the size of an allocation must be positive");
    int device = current_device();
    *result = nullptr;
    if (!fault_at(Fault::malloc)) *result = allocate(device, size);
    if (*result) return ACL_SUCCESS;
    auto account = accounts(device);
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                format("device %d cannot allocate %zu bytes: %zu of %zu are in use (option `memory`)", device, size,
                       account.used, account.limit));
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclrtMalloc(void** address, size_t size, aclrtMemMallocPolicy) { return malloc_device(address, size); }
aclError aclrtMallocAlign32(void** address, size_t size, aclrtMemMallocPolicy) { return malloc_device(address, size); }

aclError aclrtFree(void* address) {
    if (release(address)) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                format("%p cannot be freed, because it is not the start of a live allocation", address));
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
    std::lock_guard lock(memory_mutex());
    auto& account = accounts(current_device());
    *free = account.limit - account.used;
    *total = account.limit;
    return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
    int device = owner(address);
    *attributes = {};
    attributes->location.id = device < 0 ? 0 : static_cast<uint32_t>(device);
    attributes->location.type = device >= 0          ? ACL_MEM_LOCATION_TYPE_DEVICE
                                : pinned(address, 1) ? ACL_MEM_LOCATION_TYPE_HOST
                                                     : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    attributes->pageSize = 4096;
    return ACL_SUCCESS;
}

}  // extern "C"
