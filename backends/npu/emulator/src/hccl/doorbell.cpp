#include "hccl/doorbell.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "runtime/launch.h"

namespace emulator {

namespace {

// While a stream waits, it checks so often for time limits and for processes that have ended.
constexpr long check_nanoseconds = 20'000'000;

std::mutex& creation() {
    static auto* only = new std::mutex;
    return *only;
}
std::atomic<Doorbell*> current{nullptr};

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
    static_assert(sizeof(word) == sizeof(uint32_t));
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
}

Bell& bell_of(const SharedMemory& memory) { return *reinterpret_cast<Bell*>(memory.data()); }

}  // namespace

Peer::Peer(int process, int descriptor)
    : process(process), memory(process, descriptor, sizeof(Bell)), handle(-1) {
    if (process == getpid()) return;
    handle = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
    if (handle < 0) ended = true;
}

Peer::~Peer() {
    if (handle >= 0) close(handle);
}

void Peer::ring() {
    Bell& bell = bell_of(memory);
    ++bell.rings;
    if (bell.listening) futex(bell.rings, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Peer::has_ended() {
    if (ended || process == getpid()) return ended;
    pollfd readable{handle, POLLIN, 0};
    if (poll(&readable, 1, 0) == 1) ended = true;
    return ended;
}

std::shared_ptr<Doorbell> Doorbell::get() {
    static auto* only = new std::weak_ptr<Doorbell>;
    std::lock_guard lock(creation());
    auto found = only->lock();
    if (!found) *only = found = std::make_shared<Doorbell>();
    return found;
}

Doorbell::Doorbell() : memory("hccl-doorbell", sizeof(Bell)) {
    current = this;
    set_doorbell(&bell_of(memory).rings, listen);
    thread = std::thread([this] { run(); });
}

Doorbell::~Doorbell() {
    {
        std::lock_guard lock(creation());
        if (current == this) {  // otherwise a new doorbell has replaced this one
            current = nullptr;
            set_doorbell(nullptr, nullptr);
        } else {
            look_again();  // takes the machine's lock, so no call of `listen` uses this doorbell any more
        }
    }
    {
        std::lock_guard lock(mutex);
        stopping = true;
    }
    changed.notify_all();
    thread.join();
}

// Called with the machine's lock held, so the doorbell exists.
void Doorbell::listen(uint32_t seen) {
    Doorbell* self = current;
    if (!self) return;
    std::lock_guard lock(self->mutex);
    self->seen = seen;
    if (!self->armed) {
        self->armed = true;
        self->changed.notify_one();
    }
}

void Doorbell::run() {
    pthread_setname_np(pthread_self(), "npu-hccl");
    Bell& bell = bell_of(memory);
    std::unique_lock lock(mutex);
    while (true) {
        changed.wait(lock, [&] { return armed || stopping; });
        if (stopping) return;
        armed = false;
        uint32_t last = seen;
        lock.unlock();
        timespec limit{0, check_nanoseconds};
        bell.listening = 1;
        futex(bell.rings, FUTEX_WAIT, last, &limit);
        bell.listening = 0;
        look_again();
        lock.lock();
    }
}

}  // namespace emulator
