// Device memory: which addresses are live, and where their bytes really are.
#pragma once

#include <cstddef>

#include "runtime/machine.h"

namespace emulator {

constexpr int max_devices = 64;
constexpr size_t span = size_t{1} << 38;  // of addresses, per device; they take no memory

struct DeviceMemory {
    size_t used = 0, peak = 0, limit = 0;
};

// Null when the device has not that much left. `size` is rounded up.
void* allocate(int device, size_t size);
bool release(void* address);

// What keeps [address, address + bytes) from being used on the device; empty if nothing does.
std::string objection(const void* address, size_t bytes, int device);
// The device that owns the address, live or not; -1 for a host address.
int owner(const void* address);
// Host memory from aclrtMallocHost or registered by aclrtHostRegister.
bool pinned(const void* address, size_t bytes);
size_t pinned_allocations();

// Guards everything here, and is never held while the machine's lock is asked for. What follows wants it held.
std::mutex& memory_mutex();
DeviceMemory& accounts(int device);
bool charge(int device, size_t size);    // counts memory as used; false if there is not as much
void* reserve(int device, size_t size);  // addresses without memory; null if there are none
void unreserve(void* address);
void mark_live(void* address, size_t size);  // there is memory behind them
size_t mark_dead(void* address);             // how much there was

size_t live_allocations();

}  // namespace emulator
