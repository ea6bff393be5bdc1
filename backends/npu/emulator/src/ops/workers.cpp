// Streams run beside each other, one worker each, so every worker runs ATen on one thread: else each would keep a team
// of OpenMP threads of its own.
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <link.h>

#include <cstring>

#include "runtime/launch.h"

namespace {

// torch brings an OpenMP library of its own, under a name of its own: it is the one to talk to.
int set_to_one(dl_phdr_info* info, size_t, void*) {
    if (!std::strstr(info->dlpi_name, "/libgomp") && !std::strstr(info->dlpi_name, "/libiomp")) return 0;
    void* library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    void* function = library ? dlsym(library, "omp_set_num_threads") : nullptr;
    if (function) reinterpret_cast<void (*)(int)>(function)(1);  // a setting of the calling thread alone
    return 0;                                                    // there may be more than one
}

void run_on_one_thread() {
    at::get_num_threads();  // ATen's own setting of this thread, which would otherwise come later and win
    dl_iterate_phdr(set_to_one, nullptr);
}

[[gnu::constructor]] void prepare_workers() { emulator::on_worker_start(run_on_one_thread); }

}  // namespace
