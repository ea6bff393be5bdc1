// Communicators: creation, destruction and queries.
#include <unistd.h>

#include <cstring>
#include <functional>
#include <set>
#include <utility>

#include "acl/acl.h"
#include "hccl/hccl.h"
#include "hccl/interface.h"
#include "hccl/rendezvous.h"

DOCUMENTED(
    "hcomm: docs/zh/api_ref/comm_mgr_c/HcclCommInitRootInfoConfig.md"
    "; hcomm: docs/zh/api_ref/comm_mgr_c/data_type_definition/HcclCommConfig.md");

namespace emulator {

namespace {

int device_of_thread() {
    int32_t device = 0;
    return aclrtGetDevice(&device) ? 0 : device;
}

uint64_t hash_of(const std::string& text) { return std::hash<std::string>()(text); }

Settings settings_of(const HcclCommConfig* config) {
    Settings settings;
    if (!config) return settings;
    uint32_t magic = 0;
    std::memcpy(&magic, config->reserved + sizeof(size_t), sizeof(magic));
    if (magic != HCCL_COMM_CONFIG_MAGIC_WORD) {
        throw HcclError(HCCL_E_PARA, "HcclCommConfigInit must initialize the configuration of a communicator");
    }
    settings.name.assign(config->hcclCommName, strnlen(config->hcclCommName, COMM_NAME_MAX_LENGTH - 1));
    if (config->hcclExecTimeOut != HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET) settings.limit = config->hcclExecTimeOut;
    settings.buffer = config->hcclBufferSize;
    return settings;
}

void check_rank(uint32_t rank, uint32_t ranks) {
    if (rank >= ranks) throw HcclError(HCCL_E_PARA, format("rank %u must be less than the number of ranks, %u", rank, ranks));
    if (ranks > max_ranks) {
        OURS("a limit");
        throw HcclError(HCCL_E_NOT_SUPPORT, format("a communicator has at most %u ranks, not %u", max_ranks, ranks));
    }
}

// Ranks of this thread that enter communicators together.
struct Entering {
    Rendezvous rendezvous;
    HcclComm* handle;
};
thread_local std::vector<Entering> entering;

HcclResult enter_all(std::vector<Entering> all) {
    for (auto& each : all) each.rendezvous.map();
    for (auto& each : all) *each.handle = keep(each.rendezvous.finish());
    return HCCL_SUCCESS;
}

HcclResult enter_group() {
    return guarded([] { return enter_all(std::exchange(entering, {})); });
}

HcclResult enter(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig* config,
                 HcclComm* handle) {
    return guarded([&] {
        if (!root || !handle) throw HcclError(HCCL_E_PTR, "the root info and the communicator must not be null");
        join_group(GroupKind::management, "HcclCommInitRootInfo");
        check_rank(rank, ranks);
        auto settings = settings_of(config);
        entering.push_back({Rendezvous::of_root(*root, ranks, rank, device_of_thread(), settings), handle});
        if (!in_group()) return enter_all(std::exchange(entering, {}));
        at_group_end(enter_group);
        return HCCL_SUCCESS;
    });
}

}  // namespace

}  // namespace emulator

using namespace emulator;

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
    return guarded([&] {
        if (!info) throw HcclError(HCCL_E_PTR, "the root info must not be null");
        make_root_info(*info);
        return HCCL_SUCCESS;
    });
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, HcclComm* handle) {
    return enter(ranks, root, rank, nullptr, handle);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* handle) {
    return enter(ranks, root, rank, config, handle);
}

HcclResult HcclCommInitAll(uint32_t count, int32_t* devices, HcclComm* handles) {
    return guarded([&] {
        DOCUMENTED("hcomm: docs/zh/api_ref/comm_mgr_c/HcclCommInitAll.md");
        if (!devices || !handles) throw HcclError(HCCL_E_PTR, "HcclCommInitAll: the arrays must not be null");
        uint32_t existing = 0;
        aclrtGetDeviceCount(&existing);
        std::set<int32_t> different(devices, devices + count);
        if (!count || different.size() != count || *different.begin() < 0 ||
            *different.rbegin() >= static_cast<int32_t>(existing)) {
            throw HcclError(HCCL_E_PARA, "HcclCommInitAll: the devices must exist, and be different");
        }
        check_rank(count - 1, count);
        HcclRootInfo root;
        make_root_info(root);
        std::vector<Entering> all;
        for (uint32_t rank = 0; rank < count; ++rank) {
            all.push_back({Rendezvous::of_root(root, count, rank, devices[rank], {}), handles + rank});
        }
        return enter_all(std::move(all));
    });
}

HcclResult HcclCreateSubCommConfig(HcclComm* handle, uint32_t count, uint32_t* members, uint64_t id, uint32_t rank,
                                   HcclCommConfig* config, HcclComm* result) {
    return guarded([&] {
        DOCUMENTED("hcomm: docs/zh/api_ref/comm_mgr_c/HcclCreateSubCommConfig.md");
        if (auto reason = not_allowed("HcclCreateSubCommConfig"); !reason.empty()) {
            throw HcclError(HCCL_E_NOT_SUPPORT, reason);
        }
        if (!handle || !result) throw HcclError(HCCL_E_PTR, "HcclCreateSubCommConfig: a communicator is null");
        auto whole = communicator_of(*handle, "HcclCreateSubCommConfig");
        if (!members && id == 0xFFFFFFFF) {  // this rank is in none
            *result = nullptr;
            return HCCL_SUCCESS;
        }
        if (!members) throw HcclError(HCCL_E_PTR, "HcclCreateSubCommConfig: the ranks are null");
        if (whole->is_part) {
            throw HcclError(HCCL_E_NOT_SUPPORT, whole->name + " is part of a communicator, and cannot be divided again");
        }
        check_rank(rank, count);
        std::vector<uint32_t> ranks(members, members + count);
        std::set<uint32_t> different(ranks.begin(), ranks.end());
        if (different.size() != count || *different.rbegin() >= whole->ranks || ranks[rank] != whole->rank) {
            throw HcclError(HCCL_E_PARA, format("HcclCreateSubCommConfig: the ranks must be different ranks of %s, and "
                                                "number %u of them rank %u, which calls it",
                                                whole->name.c_str(), rank, whole->rank));
        }
        auto settings = settings_of(config);
        if (settings.name.empty()) settings.name = whole->name + format("_sub_%lu", static_cast<unsigned long>(id));
        std::string list;
        for (uint32_t each : ranks) list += std::to_string(each) + ",";
        settings.hash = hash_of(list);
        uint64_t key = hash_of(settings.name + "/" + std::to_string(ranks[0]));
        auto rendezvous = Rendezvous::of_part(*whole, ranks, rank, key, settings);
        rendezvous.map();
        *result = keep(rendezvous.finish());
        return HCCL_SUCCESS;
    });
}

HcclResult HcclCommDestroy(HcclComm handle) {
    return guarded([&] {
        communicator_of(handle, "HcclCommDestroy");
        forget(handle)->close();
        return HCCL_SUCCESS;
    });
}

HcclResult HcclCommGetHandleWithName(const char* name, HcclComm* handle) {
    return guarded([&] {
        DOCUMENTED("hcomm: docs/zh/api_ref/comm_mgr_c/HcclCommGetHandleWithName.md");
        auto found = find_communicator(std::string(name), device_of_thread());
        if (!found) throw HcclError(HCCL_E_NOT_FOUND, format("this device has no communicator %s", name));
        *handle = found.get();
        return HCCL_SUCCESS;
    });
}

HcclResult HcclGetCommName(HcclComm handle, char* name) {
    return guarded([&] {
        std::strcpy(name, communicator_of(handle, "HcclGetCommName")->name.c_str());
        return HCCL_SUCCESS;
    });
}

HcclResult HcclGetRankSize(HcclComm handle, uint32_t* count) {
    return guarded([&] {
        *count = communicator_of(handle, "HcclGetRankSize")->ranks;
        return HCCL_SUCCESS;
    });
}

HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
    return guarded([&] {
        *rank = communicator_of(handle, "HcclGetRankId")->rank;
        return HCCL_SUCCESS;
    });
}

// Reports only that another rank was lost, and only on ranks whose call it failed. torch_npu ends the process then.
HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
    return guarded([&] {
        *error = communicator_of(handle, "HcclGetCommAsyncError")->error;
        return HCCL_SUCCESS;
    });
}

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

// Reductions are always deterministic, and the emulator has no other units than the CPU.
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclGetConfig(HcclConfig config, HcclConfigValue* value) {
    value->value = config == HCCL_DETERMINISTIC;
    return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult code) {
    static const char* const names[] = {"success",         "invalid parameter", "null pointer",       "out of memory",
                                        "internal error",  "not supported",     "not found",          "unavailable",
                                        "system call",     "timeout",           "file cannot be opened"};
    static_assert(sizeof(names) / sizeof(names[0]) == HCCL_E_OPEN_FILE_FAILURE + 1);
    if (code == HCCL_E_RUNTIME) return "the runtime failed";
    if (code == HCCL_E_REMOTE) return "another rank failed";
    return code <= HCCL_E_OPEN_FILE_FAILURE ? names[code] : "unknown error";
}

}  // extern "C"
