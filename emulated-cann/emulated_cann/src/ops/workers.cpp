// Streams run concurrently, each on its own worker thread. Every worker limits ATen to one thread, because otherwise
// each would keep its own team of OpenMP threads.
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <link.h>

#include <cstring>

#include "runtime/launch.h"

namespace {

// torch bundles its own OpenMP library under a changed file name. The setting must go to that copy.
int set_to_one(dl_phdr_info* info, size_t, void*) {
    if (!std::strstr(info->dlpi_name, "/libgomp") && !std::strstr(info->dlpi_name, "/libiomp")) return 0;
    void* library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    void* function = library ? dlsym(library, "omp_set_num_threads") : nullptr;
    if (function) reinterpret_cast<void (*)(int)>(function)(1);  // applies to the calling thread only
    return 0;                                                    // continues: several may be loaded
}

void run_on_one_thread() {
    at::get_num_threads();  // initializes ATen's setting of this thread, which would otherwise override this one later
    dl_iterate_phdr(set_to_one, nullptr);
}

[[gnu::constructor]] void prepare_workers() { emulator::on_worker_start(run_on_one_thread); }

}  // namespace
