// aclrtValueWrite and aclrtValueWait, which use words of device memory as semaphores. torch_npu implements its external
// events with them.
#include <atomic>

#include "runtime/memory.h"
#include "runtime/races.h"
#include "runtime/stream.h"

DOCUMENTED("runtime: docs/zh/api_ref/11-09_stream_memory_operation.md");

namespace emulator {

namespace {

std::atomic_ref<uint64_t> word(void* address) {
    return std::atomic_ref<uint64_t>(*static_cast<uint64_t*>(backing(address)));
}

void check_word(void* address, int device, const char* name) {
    auto reason = objection(address, sizeof(uint64_t), device);
    if (!reason.empty()) throw DeviceError(ACL_ERROR_RT_SYS_DMA, format("%s: ", name) + reason);
}

std::string numbered(const char* type, const void* address) {
    return format("%s_%ju", type, reinterpret_cast<uintmax_t>(address));
}

struct WriteTask : Task {
    WriteTask(void* address, uint64_t value) : address(address), value(value) {}
    void* address;
    uint64_t value;
    void run(const Context& context) override {
        check_word(address, context.stream.device, "ValueWrite");
        if (finding_races()) release_by_name(format("value at %p", address), context);
        word(address) = value;
    }
    std::string name() const override { return "ValueWrite"; }
    std::vector<Dumped> dumped() const override { return {{numbered("MEM_WRITE_VALUE", address), "MEM_WRITE_VALUE"}}; }
};

struct ValueWaitTask : Task {
    ValueWaitTask(void* address, uint64_t value, uint32_t condition)
        : address(address), value(value), condition(condition) {}
    void* address;
    uint64_t value;
    uint32_t condition;
    bool ready(const Context& context) override {
        // On freed memory the task starts immediately, and fails in run().
        if (!objection(address, sizeof(uint64_t), context.stream.device).empty()) return true;
        uint64_t found = word(address);
        switch (condition) {
            case ACL_STREAM_WAIT_VALUE_GEQ:
                return static_cast<int64_t>(found - value) >= 0;
            case ACL_STREAM_WAIT_VALUE_EQ:
                return found == value;
            case ACL_STREAM_WAIT_VALUE_AND:
                return (found & value) != 0;
            default:
                return ~(found | value) != 0;
        }
    }
    void run(const Context& context) override {
        check_word(address, context.stream.device, "ValueWait");
        if (finding_races()) acquire_by_name(format("value at %p", address), context);
    }
    std::string name() const override { return "ValueWait"; }
    std::vector<Dumped> dumped() const override { return {{numbered("MEM_WAIT_VALUE", address), "MEM_WAIT_VALUE"}}; }
};

int submit_to(aclrtStream handle, void* address, TaskPointer task) {
    if (owner(address) < 0 || reinterpret_cast<uintptr_t>(address) % sizeof(uint64_t)) {
        return fail(ACL_ERROR_RT_PARAM_INVALID,
                    format("%p is not an aligned address of a 64-bit word in device memory", address));
    }
    Lock lock(machine().mutex);
    auto stream = find_stream(handle);
    return stream ? submit(*stream, std::move(task)) : no_such_stream(handle);
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
    return submit_to(stream, address, std::make_shared<WriteTask>(address, value));
}

aclError aclrtValueWait(void* address, uint64_t value, uint32_t condition, aclrtStream stream) {
    if (condition > ACL_STREAM_WAIT_VALUE_NOR) {
        return fail(ACL_ERROR_RT_PARAM_INVALID, format("aclrtValueWait: the flag must be between 0 and %d, but is %u",
                                                       static_cast<int>(ACL_STREAM_WAIT_VALUE_NOR), condition));
    }
    return submit_to(stream, address, std::make_shared<ValueWaitTask>(address, value, condition));
}

}  // extern "C"
