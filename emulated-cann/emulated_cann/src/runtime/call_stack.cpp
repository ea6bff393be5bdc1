// Stacks are found with CPython's C interface, which the process has if Python runs in it. Each frame's text and each
// stack is stored once, so that a call costs a walk over its frames.
#include "runtime/call_stack.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "runtime/errors.h"

namespace emulator {

namespace {

constexpr size_t most_frames = 12;

// Functions of CPython. An object is a void*.
struct Python {
    template <class Function>
    static Function* find(const char* name) {
        return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
    }
    int (*is_initialized)() = find<int()>("Py_IsInitialized");
    void* (*thread_state)() = find<void*()>("PyGILState_GetThisThreadState");
    int (*holds_lock)() = find<int()>("PyGILState_Check");
    int (*lock)() = find<int()>("PyGILState_Ensure");
    void (*unlock)(int) = find<void(int)>("PyGILState_Release");
    void* (*frame)(void*) = find<void*(void*)>("PyThreadState_GetFrame");
    void* (*outer)(void*) = find<void*(void*)>("PyFrame_GetBack");
    void* (*code)(void*) = find<void*(void*)>("PyFrame_GetCode");
    int (*instruction)(void*) = find<int(void*)>("PyFrame_GetLasti");
    int (*line)(void*, int) = find<int(void*, int)>("PyCode_Addr2Line");
    void* (*attribute)(void*, const char*) = find<void*(void*, const char*)>("PyObject_GetAttrString");
    const char* (*text)(void*) = find<const char*(void*)>("PyUnicode_AsUTF8");
    void (*release)(void*) = find<void(void*)>("Py_DecRef");
    bool complete = is_initialized && thread_state && holds_lock && lock && unlock && frame && outer && code &&
                    instruction && line && attribute && text && release;
};

struct Calls {
    std::atomic<int> wanted{0};
    std::mutex mutex;
    // By code object, which is kept alive, and instruction.
    std::map<std::pair<void*, int>, uint32_t> frames;
    std::vector<std::string> texts;
    std::map<std::vector<uint32_t>, uint32_t> numbers;
    std::vector<const std::vector<uint32_t>*> stacks;
};
Calls& calls() {
    static auto* only = new Calls;
    return *only;
}

std::string attribute_text(const Python& python, void* code, const char* name) {
    void* value = python.attribute(code, name);
    const char* text = value ? python.text(value) : nullptr;
    std::string result = text ? text : "?";
    if (value) python.release(value);
    return result;
}

// Takes the reference to the code object.
uint32_t frame_number(const Python& python, void* code, int instruction) {
    auto& self = calls();
    auto [found, is_new] = self.frames.try_emplace({code, instruction}, static_cast<uint32_t>(self.texts.size()));
    if (is_new) {
        self.texts.push_back(attribute_text(python, code, "co_filename") +
                             format(":%d in ", python.line(code, instruction)) +
                             attribute_text(python, code, "co_qualname"));
    } else {
        python.release(code);
    }
    return found->second;
}

// Requires Python's lock.
uint32_t walk(const Python& python, void* thread) {
    std::vector<uint32_t> stack;
    std::lock_guard lock(calls().mutex);
    for (void* frame = python.frame(thread); frame;) {
        if (stack.size() < most_frames)
            stack.push_back(frame_number(python, python.code(frame), python.instruction(frame)));
        void* outer = stack.size() < most_frames ? python.outer(frame) : nullptr;
        python.release(frame);
        frame = outer;
    }
    if (stack.empty()) return 0;
    auto& self = calls();
    auto [found, is_new] = self.numbers.try_emplace(std::move(stack), static_cast<uint32_t>(self.stacks.size() + 1));
    if (is_new) self.stacks.push_back(&found->first);
    return found->second;
}

uint32_t find_stack(bool only_if_locked) {
    if (!calls().wanted.load(std::memory_order_relaxed)) return 0;
    static const auto* python = new Python;
    if (!python->complete || !python->is_initialized()) return 0;
    void* thread = python->thread_state();
    if (!thread || (only_if_locked && !python->holds_lock())) return 0;
    int state = python->lock();
    uint32_t number = walk(*python, thread);
    python->unlock(state);
    return number;
}

}  // namespace

void record_calls(bool on) { calls().wanted += on ? 1 : -1; }

uint32_t call_stack() { return find_stack(false); }
uint32_t call_stack_if_locked() { return find_stack(true); }

std::vector<std::string> frames_of(uint32_t call) {
    std::vector<std::string> result;
    auto& self = calls();
    std::lock_guard lock(self.mutex);
    if (!call || call > self.stacks.size()) return result;
    for (uint32_t frame : *self.stacks[call - 1]) result.push_back(self.texts[frame]);
    return result;
}

}  // namespace emulator
