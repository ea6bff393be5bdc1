// Device memory: live addresses, and the host memory that backs them.
#pragma once

#include <cstddef>

#include "runtime/machine.h"

namespace emulator {

constexpr int max_devices = 64;
constexpr size_t span = size_t{1} << 38;  // addresses per device, which take no memory

struct DeviceMemory {
    size_t used = 0, peak = 0, limit = 0;
};

// Returns null if the device does not have enough memory. `size` is rounded up.
void* allocate(int device, size_t size);
bool release(void* address);

// Returns the reason why [address, address + bytes) cannot be accessed on the device, or an empty string if it can.
std::string objection(const void* address, size_t bytes, int device);
// Returns the device that owns the address, live or not, or -1 for a host address.
int owner(const void* address);
// Returns whether host memory was allocated by aclrtMallocHost or registered by aclrtHostRegister.
bool pinned(const void* address, size_t bytes);
size_t pinned_allocations();

// Guards all functions below. A thread that holds it must not take the machine's lock.
std::mutex& memory_mutex();
DeviceMemory& accounts(int device);
bool charge(int device, size_t size);    // counts memory as used; false if there is not enough
void* reserve(int device, size_t size);  // reserves addresses without memory; null if there are none
void unreserve(void* address);
void mark_live(void* address, size_t size);  // the addresses now have memory
size_t mark_dead(void* address);             // returns the size, or 0 if the address is not live

size_t live_allocations();

}  // namespace emulator
