// For every byte that was accessed, the accesses that a later one may race with, and the races that were found.
#include "runtime/races.h"

#include <unistd.h>

#include <cstdio>
#include <set>

#include "runtime/call_stack.h"
#include "runtime/control.h"
#include "runtime/memory.h"
#include "runtime/order.h"
#include "runtime/overlap.h"
#include "runtime/trace.h"

namespace emulator {

namespace {

constexpr size_t most_found = 1000;
constexpr size_t most_accesses = 16;  // to the same bytes
constexpr int exit_status = 66;       // of a program with races, as that of the compilers' sanitizers

// What accesses memory.
struct Use {
    std::string name;
    uint32_t call = 0, replay_call = 0;
    int stream = -1;
    uint32_t graph = 0;
    bool frees = false;
    auto key() const { return std::tuple(name, call, replay_call, stream, graph); }
};

struct Seen {
    uint32_t timeline;
    uint64_t number;  // on the timeline
    bool writes;
    std::shared_ptr<const Use> use;
    std::shared_ptr<const Operand> gaps;  // null for an operand without gaps
};

struct Segment {
    uintptr_t end;
    std::vector<Seen> accesses;
};

struct Found {
    std::string first, second, text;
};

struct Races {  // guarded by order_mutex()
    std::map<uintptr_t, Segment> segments;  // by their first byte
    std::vector<Found> found;
    std::set<std::pair<decltype(Use().key()), decltype(Use().key())>> known;
    std::string fetched;
    bool prints = false;
};
Races& races() {
    static auto* only = new Races;
    return *only;
}

std::string described(const Use& use, bool writes) {
    const char* verb = use.frees ? "frees" : writes ? "writes" : "reads";
    std::string text = use.name + " " + verb + " them" +
                       (use.stream < 0 ? " from the host" : format(" on stream %d", use.stream));
    if (use.graph) text += format(", in a replay of graph %u", use.graph);
    auto append = [&](const char* title, uint32_t call) {
        text += title;
        auto frames = frames_of(call);
        for (auto& frame : frames) text += "\n    " + frame;
        if (frames.empty()) text += "\n    (no Python stack)";
    };
    append(use.graph ? "; captured at" : "; called at", use.call);
    if (use.graph) append("\n  replayed at", use.replay_call);
    return text;
}

void report(const Seen& first, const Seen& second, uintptr_t begin, uintptr_t end) {
    auto& self = races();
    if (self.found.size() >= most_found || !self.known.emplace(first.use->key(), second.use->key()).second) return;
    auto* address = reinterpret_cast<const void*>(begin);
    int device = owner(address);
    auto where = device < 0 ? std::string("in host memory") : format("on device %d", device);
    auto text = format("emulated-cann: race on %zu bytes from %p, ", static_cast<size_t>(end - begin), address);
    text += where + "\n  " + described(*second.use, second.writes) + "\n  without an order after:\n  " +
            described(*first.use, first.writes) +
            "\n  Order them with wait_stream, an event or synchronize. If they use different tensors, the second has the "
            "memory of the first: call record_stream on the first, or keep it until its work is over.\n";
    if (self.prints) std::fputs(text.c_str(), stderr);
    self.found.push_back({first.use->name, second.use->name, text});
}

// Begins a segment at an address within one.
std::map<uintptr_t, Segment>::iterator split(uintptr_t at) {
    auto& segments = races().segments;
    auto after = segments.lower_bound(at);
    if (after == segments.begin() || (after != segments.end() && after->first == at)) return after;
    auto& holder = std::prev(after)->second;
    if (holder.end <= at) return after;
    after = segments.emplace_hint(after, at, holder);
    holder.end = at;
    return after;
}

// Removes the accesses that the new one makes superfluous, and adds it.
void add(std::vector<Seen>& accesses, const Seen& access, const Times& before) {
    std::erase_if(accesses, [&](const Seen& each) {
        if (each.writes && !access.writes) return false;
        bool is_covered = !access.gaps || (each.gaps && each.gaps->address == access.gaps->address &&
                                           each.gaps->shape == access.gaps->shape &&
                                           each.gaps->strides == access.gaps->strides);
        return is_covered && before.cover(each.timeline, each.number);
    });
    if (accesses.size() == most_accesses) accesses.erase(accesses.begin());
    accesses.push_back(access);
}

void touch(const Operand& operand, const Seen& access, const Times& before) {
    auto begin = reinterpret_cast<uintptr_t>(operand.address), end = begin + operand.bytes;
    auto& segments = races().segments;
    auto each = split(begin);
    split(end);
    bool replaces = access.writes && !access.gaps;
    for (uintptr_t at = begin; at < end;) {
        if (each == segments.end() || each->first > at) {
            uintptr_t until = each == segments.end() ? end : std::min(end, each->first);
            each = segments.emplace_hint(each, at, Segment{until, {}});
        }
        auto& segment = each->second;
        for (auto& other : segment.accesses) {
            if (!(other.writes || access.writes) || before.cover(other.timeline, other.number)) continue;
            if (access.gaps || other.gaps) {
                Operand all{reinterpret_cast<const void*>(at), segment.end - at, Access::read, 0, {}};
                if (access.gaps && !do_overlap(*access.gaps, other.gaps ? *other.gaps : all)) continue;
                if (!access.gaps && !do_overlap(*other.gaps, all)) continue;
            }
            report(other, access, at, segment.end);
        }
        at = segment.end;
        if (!replaces) add(segment.accesses, access, before);
        each = replaces ? segments.erase(each) : std::next(each);
    }
    if (replaces) segments.emplace_hint(each, begin, Segment{end, {access}});
}

void touch_all(Timeline& timeline, const Use& use, const std::vector<Operand>& operands) {
    auto shared = std::make_shared<const Use>(use);
    uint64_t number = timeline.tick();
    for (auto& operand : operands) {
        if (!operand.address || !operand.bytes) continue;
        auto gaps = operand.strides.empty() ? nullptr : std::make_shared<const Operand>(operand);
        bool writes = operand.access != Access::read;
        touch(operand, {timeline.id, number, writes, shared, gaps}, timeline.times);
    }
}

}  // namespace

void access_memory(const Context& context, const std::string& name, uint32_t call,
                   const std::vector<Operand>& operands) {
    if (!finding_races()) return;
    Use use{.name = name, .call = call, .stream = context.stream.id};
    if (context.replay) {
        use.graph = context.replay->root().graph->id;
        use.replay_call = context.replay->root().call;
    }
    std::lock_guard lock(order_mutex());
    touch_all(timeline_of(context), use, operands);
}

void free_in_order(const void* address, size_t bytes) {
    if (!finding_races()) return;
    Use use{.name = "aclrtFree", .call = call_stack_if_locked(), .frees = true};
    std::lock_guard lock(order_mutex());
    touch_all(host_timeline(), use, {{address, bytes, Access::write, 0, {}}});
}

}  // namespace emulator

using namespace emulator;

extern "C" {

int emulated_cann_races(int on) {
    std::lock_guard lock(order_mutex());
    bool before = finding_races();
    if (before == (on != 0)) return before;
    record_calls(on);
    find_races(on);
    races().segments.clear();
    if (on) {
        races().found.clear();
        races().known.clear();
    }
    return before;
}

const char* emulated_cann_races_found() {
    std::lock_guard lock(order_mutex());
    std::string all;
    for (auto& each : races().found) {
        all += (all.empty() ? "" : ", ") + ("{\"first\": " + quoted(each.first)) + ", \"second\": " +
               quoted(each.second) + ", \"text\": " + quoted(each.text) + "}";
    }
    races().fetched = "[" + all + "]";
    return races().fetched.c_str();
}

void emulated_cann_report_races() {
    races().prints = true;
    emulated_cann_races(1);
    std::atexit([] {
        std::lock_guard lock(order_mutex());
        if (races().found.empty()) return;
        std::fprintf(stderr, "emulated-cann: races: %zu\n", races().found.size());
        std::fflush(nullptr);
        flush_trace();
        _exit(exit_status);
    });
}

}  // extern "C"
