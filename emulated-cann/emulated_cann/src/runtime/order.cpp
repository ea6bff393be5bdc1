// Timelines of the host, of streams and of the lanes of replays, and what orders them.
#include "runtime/order.h"

#include <map>
#include <utility>

namespace emulator {

namespace {

struct Order {
    std::atomic<bool> on{false};
    std::mutex mutex;
    Timeline host{0};
    std::shared_ptr<const Times> snapshot;  // of the host's times; null if they have changed since
    std::map<std::string, Times> by_name;
    uint32_t timelines = 1;
};
Order& order() {
    static auto* only = new Order;
    return *only;
}

// The functions below require the mutex.

std::shared_ptr<Timeline> new_timeline(uint32_t id) { return std::make_shared<Timeline>(Timeline{id}); }

Timeline& timeline_of(Stream& stream) {
    if (!stream.timeline) stream.timeline = new_timeline(order().timelines++);
    return *stream.timeline;
}

void host_joins(const Times& from) {
    order().host.times.join(from);
    order().snapshot.reset();
}

}  // namespace

bool finding_races() { return order().on.load(std::memory_order_relaxed); }
void find_races(bool on) { order().on = on; }
std::mutex& order_mutex() { return order().mutex; }

Timeline& timeline_of(const Context& context) {
    if (context.stream.id < 0) {
        order().snapshot.reset();  // the caller changes it
        return order().host;
    }
    if (!context.replay) return timeline_of(context.stream);
    auto& timeline = context.replay->lanes[context.lane].timeline;
    return timeline ? *timeline : timeline_of(context.stream);
}

Timeline& host_timeline() {
    order().snapshot.reset();
    return order().host;
}

void order_after_host(Task& task) {
    if (!finding_races()) return;
    std::lock_guard lock(order().mutex);
    if (!order().snapshot) order().snapshot = std::make_shared<const Times>(order().host.times);
    task.issued = order().snapshot;
}

void begin_in_order(Stream& stream, const Task& task) {
    if (!finding_races() || !task.issued) return;
    std::lock_guard lock(order().mutex);
    auto& timeline = timeline_of(stream);
    if (timeline.issued == task.issued) return;
    timeline.times.join(*task.issued);
    timeline.issued = task.issued;
}

void release_to(Times& into, const Context& context) {
    if (!finding_races()) return;
    std::lock_guard lock(order().mutex);
    into.join(timeline_of(context).times);
}

void acquire_from(const Times& from, const Context& context) {
    if (!finding_races()) return;
    std::lock_guard lock(order().mutex);
    timeline_of(context).times.join(from);
}

void release_by_name(const std::string& name, const Context& context) {
    if (!finding_races()) return;
    std::lock_guard lock(order().mutex);
    order().by_name[name].join(timeline_of(context).times);
}

void acquire_by_name(const std::string& name, const Context& context) {
    if (!finding_races()) return;
    std::lock_guard lock(order().mutex);
    timeline_of(context).times.join(order().by_name[name]);
}

void host_acquires(const Times& from) {
    if (!finding_races()) return;
    std::lock_guard lock(order().mutex);
    host_joins(from);
}

void host_acquires(Stream& stream) {
    if (!finding_races()) return;
    std::lock_guard lock(order().mutex);
    host_joins(timeline_of(stream).times);
}

void run_on_host(const Context& context) {
    if (!finding_races()) return;
    std::lock_guard lock(order().mutex);
    auto& timeline = timeline_of(context);
    host_joins(timeline.times);
    timeline.times.join(order().host.times);
}

void fork_lanes(const Context& context, Replay& replay) {
    if (!finding_races() || replay.lanes.empty() || replay.lanes[0].timeline) return;
    std::lock_guard lock(order().mutex);
    timeline_of(context);
    replay.lanes[0].timeline = context.replay ? context.replay->lanes[context.lane].timeline : context.stream.timeline;
    if (!replay.lanes[0].timeline) return;  // the replay around it began before races were looked for
    replay.released.assign(replay.graph->edges.size(), {});
    for (size_t i = 1; i < replay.lanes.size(); ++i) {
        auto& id = replay.graph->lanes[i].timeline;
        if (!id) id = order().timelines++;
        replay.lanes[i].timeline = new_timeline(id);
        replay.lanes[i].timeline->times = replay.lanes[0].timeline->times;
    }
}

void join_lanes(Replay& replay) {
    if (!finding_races() || replay.lanes.empty() || !replay.lanes[0].timeline) return;
    std::lock_guard lock(order().mutex);
    auto& times = replay.lanes[0].timeline->times;
    for (size_t i = 1; i < replay.lanes.size(); ++i) times.join(replay.lanes[i].timeline->times);
}

}  // namespace emulator
