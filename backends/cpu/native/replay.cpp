// The loop of a captured step.
#include <cstdint>

struct Call {
    int64_t (*run)(const int64_t*);
    const int64_t* slots;
};

// Runs calls in order. Returns 0, or 1 + the index of the first that fails; those after it did not run.
extern "C" int64_t replay(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (calls[i].run(calls[i].slots)) return i + 1;
    return 0;
}
