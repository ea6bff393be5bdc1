// The layout of the memory that the ranks of a communicator share. Nothing in it is locked: a rank that is killed leaves
// counters that do not grow.
#pragma once

#include <atomic>

#include "hccl/hccl_types.h"

namespace emulator {

constexpr uint32_t max_ranks = 64;
// Address space for the data of a rank's collective, and for a message to another rank.
constexpr size_t slot_bytes = size_t{1} << 33, mailbox_bytes = size_t{1} << 32;
// A rank has two slots, so it can post the data of a collective while others still read that of the one before.
constexpr uint64_t slots = 2;

// What a rank calls. Calls of ranks that meet must be equal, byte by byte.
struct Call {
    char name[40] = "";       // of the interface
    uint32_t dtype = 0;       // HcclDataType
    uint32_t reduction = 0;   // HcclReduceOp + 1; 0 for none
    uint32_t root = 0;        // rank + 1; 0 for none
    uint32_t variant = 0;     // distinguishes calls that the fields above do not
    uint64_t count = 0;       // elements
};

// Elements that a rank sends to each rank and receives from each, of interfaces with counts. Each uses what it needs.
struct Counts {
    uint64_t send[max_ranks], send_offset[max_ranks], receive[max_ranks], receive_offset[max_ranks];
};

struct Posting {
    Call call;
    Counts counts;
};

// The start of the memory that a rank creates. Its slots follow, then its mailboxes, one for each receiver.
struct Outbox {
    Posting posted[slots];
    Call message[max_ranks];
};
constexpr size_t outbox_bytes = (sizeof(Outbox) + 4095) / 4096 * 4096;
constexpr size_t rank_bytes(uint32_t ranks) { return outbox_bytes + slots * slot_bytes + ranks * mailbox_bytes; }

// How other ranks find the communicator of a part of the ranks.
struct Offer {
    std::atomic<uint32_t> valid;
    int descriptor;
    uint64_t token;
    uint64_t key;
};

struct Member {
    std::atomic<uint32_t> published;  // the fields below may be read
    std::atomic<uint32_t> mapped;     // it has mapped the memory of all ranks
    std::atomic<uint32_t> left;       // its communicator is destroyed
    int process, device, doorbell, outbox;
    char name[COMM_NAME_MAX_LENGTH];
    uint64_t settings;  // a hash of what must be the same on all ranks
    Offer offers[16];
    // The number of the last collective of each slot, counted from 1, that the rank has got to this point with.
    alignas(64) std::atomic<uint64_t> posted[slots];
    std::atomic<uint64_t> combined[slots];
    alignas(64) std::atomic<uint64_t> finished[slots];
    // Numbers of messages, by receiver and by sender.
    alignas(64) std::atomic<uint64_t> sent[max_ranks];
    std::atomic<uint64_t> received[max_ranks];
};

enum : uint32_t { intact = 0, breaking = 1, broken = 2 };

struct Control {
    uint64_t token;  // detects a reused file descriptor
    std::atomic<uint32_t> ranks;
    std::atomic<uint32_t> state;   // intact, breaking (the fields below are being written), broken
    std::atomic<uint64_t> broken_at;  // collectives with a smaller number can still succeed
    char cause[2000];
    Member members[max_ranks];
};

}  // namespace emulator
