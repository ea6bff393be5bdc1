#include "hccl/rendezvous.h"

#include <unistd.h>

#include <cstdlib>
#include <map>
#include <cstring>
#include <random>
#include <thread>

#include "runtime/errors.h"

DOCUMENTED(
    "hcomm: docs/zh/api_ref/comm_mgr_c/HcclCommInitRootInfoConfig.md"
    "; hcomm: docs/en/error_codes/EI0015-Communication_Error_Ranktable_Detect.md"
    "; hccl: docs/zh/user_guide/hccl_env/HCCL_CONNECT_TIMEOUT.md");

namespace emulator {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto interval = std::chrono::microseconds(500);

struct RootInfo {
    char magic[24] = "emulated HCCL root info";
    uint64_t token = 0;
    int process = 0, descriptor = 0;
};
static_assert(sizeof(RootInfo) <= sizeof(HcclRootInfo));

// The control memory of root infos that this process made, until its ranks have connected.
struct Roots {
    std::mutex mutex;
    std::map<uint64_t, SharedMemory> open;
};
Roots& roots() {
    static auto* only = new Roots;
    return *only;
}

// Returns an object whose destruction closes the file of the control memory.
std::shared_ptr<void> keep_open(uint64_t token, Offer* offer = nullptr) {
    return {new char, [token, offer](void* object) {
                if (offer) offer->valid = 0;
                std::lock_guard lock(roots().mutex);
                roots().open.erase(token);
                delete static_cast<char*>(object);
            }};
}

uint64_t new_token() {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
}

SharedMemory new_control(uint64_t token) {
    SharedMemory memory("hccl-control", sizeof(Control));
    reinterpret_cast<Control*>(memory.data())->token = token;
    return memory;
}

double seconds(const char* variable, double otherwise) {
    const char* text = std::getenv(variable);
    if (!text || !*text) return otherwise;
    char* rest = nullptr;
    double value = std::strtod(text, &rest);
    if (*rest || value < 0 || value > 2147483647) {
        DOCUMENTED("hcomm: docs/en/error_codes/EI0001-Config_Error_Invalid_Environment_Variable.md");
        throw HcclError(HCCL_E_PARA, format("%s must be a number of seconds from 0 to 2147483647, not %s", variable, text));
    }
    return value;
}

size_t buffer_of(const Settings& settings) {
    constexpr size_t mebibyte = size_t{1} << 20;
    if (settings.buffer != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET) return settings.buffer * mebibyte;
    const char* text = std::getenv("HCCL_BUFFSIZE");
    if (!text || !*text) return HCCL_COMM_DEFAULT_BUFFSIZE * mebibyte;
    char* rest = nullptr;
    unsigned long value = std::strtoul(text, &rest, 10);
    if (*rest || value < 1) {
        DOCUMENTED("hcomm: docs/en/error_codes/EI0001-Config_Error_Invalid_Environment_Variable.md");
        throw HcclError(HCCL_E_PARA, format("HCCL_BUFFSIZE must be a number of MiB of at least 1, not %s", text));
    }
    return value * mebibyte;
}

}  // namespace

void make_root_info(HcclRootInfo& info) {
    RootInfo root;
    root.token = new_token();
    root.process = getpid();
    auto memory = new_control(root.token);
    root.descriptor = memory.descriptor();
    std::memset(&info, 0, sizeof(info));
    std::memcpy(info.internal, &root, sizeof(root));
    std::lock_guard lock(roots().mutex);
    roots().open.emplace(root.token, std::move(memory));
}

Rendezvous Rendezvous::of_root(const HcclRootInfo& info, uint32_t ranks, uint32_t rank, int device,
                               const Settings& settings) {
    RootInfo root;
    std::memcpy(&root, info.internal, sizeof(root));
    if (std::memcmp(root.magic, RootInfo().magic, sizeof(root.magic))) {
        throw HcclError(HCCL_E_PARA, "the root info is not one that HcclGetRootInfo wrote");
    }
    Rendezvous result;
    result.communicator = std::make_shared<Communicator>(rank, ranks, device);
    result.communicator->shared = SharedMemory(root.process, root.descriptor, sizeof(Control));
    if (result.communicator->control().token != root.token) {
        throw HcclError(HCCL_E_PARA, "the root info was used before, for another communicator");
    }
    if (root.process == getpid()) result.opening = keep_open(root.token);
    Settings named = settings;
    if (named.name.empty()) named.name = format("hccl_%016lx", static_cast<unsigned long>(root.token));
    result.publish(named);
    return result;
}

Rendezvous Rendezvous::of_part(Communicator& whole, const std::vector<uint32_t>& members, uint32_t rank, uint64_t key,
                               const Settings& settings) {
    Rendezvous result;
    result.communicator = std::make_shared<Communicator>(rank, members.size(), whole.device);
    result.communicator->is_part = true;
    auto end = Clock::now() + std::chrono::duration<double>(seconds("HCCL_CONNECT_TIMEOUT", 120));
    Member& first = whole.member(members[0]);
    if (rank == 0) {
        uint64_t token = new_token();
        auto memory = new_control(token);
        Offer* place = nullptr;
        for (auto& offer : first.offers) {
            if (!offer.valid) place = &offer;
        }
        if (!place) {
            OURS("a limit");
            throw HcclError(HCCL_E_UNAVAIL, "a rank creates more than 16 parts of a communicator at once");
        }
        place->descriptor = memory.descriptor();
        place->token = token;
        place->key = key;
        place->valid = 1;
        result.communicator->shared = SharedMemory(getpid(), memory.descriptor(), sizeof(Control));
        result.opening = keep_open(token, place);
        std::lock_guard lock(roots().mutex);
        roots().open.emplace(token, std::move(memory));
    }
    while (!result.communicator->shared.data()) {
        for (auto& offer : first.offers) {
            if (!offer.valid || offer.key != key) continue;
            SharedMemory memory(first.process, offer.descriptor, sizeof(Control));
            if (reinterpret_cast<Control*>(memory.data())->token != offer.token) continue;
            result.communicator->shared = std::move(memory);
            break;
        }
        if (result.communicator->shared.data()) break;
        if (auto reason = whole.lost(members[0]); !reason.empty()) throw HcclError(HCCL_E_REMOTE, reason);
        if (Clock::now() > end) {
            throw HcclError(HCCL_E_TIMEOUT, format("rank %u of %s did not create this part of it within "
                                                   "HCCL_CONNECT_TIMEOUT",
                                                   members[0], whole.name.c_str()));
        }
        std::this_thread::sleep_for(interval);
    }
    result.publish(settings);
    return result;
}

void Rendezvous::publish(const Settings& settings) {
    Communicator& self = *communicator;
    self.name = settings.name;
    double limit = settings.limit >= 0 ? settings.limit : seconds("HCCL_EXEC_TIMEOUT", 1836);
    self.limit = std::chrono::duration<double>(limit);
    self.buffer_bytes = buffer_of(settings);
    end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                             std::chrono::duration<double>(seconds("HCCL_CONNECT_TIMEOUT", 120)));
    uint32_t none = 0;
    if (!self.control().ranks.compare_exchange_strong(none, self.ranks) && none != self.ranks) {
        fail_all(HCCL_E_PARA, format("all ranks must give the same number of ranks, but rank %u gives %u and another %u",
                                     self.rank, self.ranks, none));
    }
    Member& member = self.self();
    if (member.published) fail_all(HCCL_E_PARA, format("two callers say that they are rank %u", self.rank));
    self.outboxes.resize(self.ranks);
    self.outboxes[self.rank] = SharedMemory("hccl-outbox", rank_bytes(self.ranks));
    self.doorbell = SharedDoorbell::get();
    member.process = getpid();
    member.device = self.device;
    member.doorbell = self.doorbell->descriptor();
    member.outbox = self.outboxes[self.rank].descriptor();
    member.settings = settings.hash;
    std::strncpy(member.name, self.name.c_str(), sizeof(member.name) - 1);
    member.published = 1;
}

void Rendezvous::fail_all(HcclResult code, const std::string& reason) {
    communicator->break_off(0, reason);
    throw HcclError(code, reason);
}

void Rendezvous::await(const char* what, std::atomic<uint32_t> Member::* flag) {
    Communicator& self = *communicator;
    for (uint32_t other = 0; other < self.ranks; ++other) {
        while (!(self.member(other).*flag)) {
            if (auto reason = self.why_broken(0); !reason.empty()) throw HcclError(HCCL_E_REMOTE, reason);
            if (self.peers.size() == self.ranks) {
                if (auto reason = self.lost(other); !reason.empty()) fail_all(HCCL_E_REMOTE, reason);
            }
            if (Clock::now() > end) {
                fail_all(HCCL_E_TIMEOUT,
                         format("rank %u waited for rank %u of %u to %s for longer than HCCL_CONNECT_TIMEOUT, %.0f s",
                                self.rank, other, self.ranks, what, seconds("HCCL_CONNECT_TIMEOUT", 120)));
            }
            std::this_thread::sleep_for(interval);
        }
    }
}

void Rendezvous::map() {
    Communicator& self = *communicator;
    await("create the communicator", &Member::published);
    for (uint32_t other = 0; other < self.ranks; ++other) {
        Member& member = self.member(other);
        if (std::strcmp(member.name, self.self().name) != 0) {
            fail_all(HCCL_E_PARA, format("all ranks must give a communicator the same name, but rank %u calls it %s and "
                                         "rank %u %s",
                                         self.rank, self.self().name, other, member.name));
        }
        if (member.settings != self.self().settings) {
            fail_all(HCCL_E_PARA, format("ranks %u and %u create %s with different members", self.rank, other,
                                         self.name.c_str()));
        }
        self.peers.push_back(std::make_unique<Peer>(member.process, member.doorbell));
        if (other != self.rank) {
            self.outboxes[other] = SharedMemory(member.process, member.outbox, rank_bytes(self.ranks));
        }
    }
    self.self().mapped = 1;
}

CommunicatorPointer Rendezvous::finish() {
    Communicator& self = *communicator;
    await("map the shared memory", &Member::mapped);
    self.outboxes[self.rank].close_file();
    opening.reset();
    return communicator;
}

}  // namespace emulator
