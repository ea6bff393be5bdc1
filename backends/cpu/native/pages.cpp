// Huge pages for weights, whose reads then miss the processor's table of pages less often.
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

// Asks for huge pages for the whole ones in a range, and moves its contents there now. The system may refuse, in which
// case nothing changes. Returns whether it did not.
extern "C" int collapse_pages(void* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t kHuge = 2 << 20;
    constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1
    const uintptr_t at = reinterpret_cast<uintptr_t>(start);
    const uintptr_t first = (at + kHuge - 1) / kHuge * kHuge, last = (at + bytes) / kHuge * kHuge;
    if (first >= last) return 0;
    void* range = reinterpret_cast<void*>(first);
    return madvise(range, last - first, MADV_HUGEPAGE) == 0 && madvise(range, last - first, kCollapse) == 0;
#else
    return 0;
#endif
}
