// Which task runs next. As little as possible runs before its time, so that a wait that was left out shows:
//   - a stream runs only its own tasks, and of a stream whose event it waits for, only those up to the record;
//   - a graph runs the branch of the capturing stream first, the others when it joins them, or at its end;
//   - a wait for a value lets every other stream run as far as it can: behind the write that it waits for, updates of a
//     later replay may be queued already, and the device would not hold those back either.
#include <chrono>
#include <exception>

#include "runtime.h"

namespace standin {

namespace {

// Marks a stream or a branch as taking a step while in scope.
class Stepping {
public:
    explicit Stepping(std::function<void(bool)> mark) : mark_(std::move(mark)) { mark_(true); }
    ~Stepping() { mark_(false); }
    Stepping(const Stepping &) = delete;
    Stepping& operator=(const Stepping &) = delete;

private:
    std::function<void(bool)> mark_;
};

double now() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void run_work(const Task& task, Stream& stream) {
    try {
        if (task.work) task.work();
    } catch (const std::exception& error) {
        stream.error = error.what();
        trace("a task threw: " + stream.error);
    }
}

void run_record(Record& record) {
    record.milliseconds = now();
    record.done = true;
}

bool recorded(const Record& record) {
    while (!record.done && step(*record.stream)) {
    }
    return record.done;
}

bool awaited(const Task& task, Stream& waiting) {
    if (task.ready()) return true;
    for (Stream* other : streams()) {
        while (other != &waiting && step(*other)) {
        }
    }
    return task.ready();
}

bool step_branch(Replay& replay, size_t branch, Stream& stream);

bool joined(Replay& replay, const Task& task, Stream& stream) {
    while (replay.reached[task.branch] < task.position && step_branch(replay, task.branch, stream)) {
    }
    return replay.reached[task.branch] >= task.position;
}

// Runs a task that is no replay; false where it has to wait.
bool run(const Task& task, Stream& stream) {
    switch (task.kind) {
        case Task::Kind::work: run_work(task, stream); return true;
        case Task::Kind::record: run_record(*task.record); return true;
        case Task::Kind::wait: return recorded(*task.record);
        default: return awaited(task, stream);
    }
}

bool step_branch(Replay& replay, size_t branch, Stream& stream) {
    auto& tasks = replay.graph->branches[branch].tasks;
    size_t& reached = replay.reached[branch];
    if (reached >= tasks.size() || replay.stepping[branch]) return false;
    Stepping here([&](bool on) { replay.stepping[branch] = on; });
    // Copied: a task that runs meanwhile may be an update of this very one.
    Task task = tasks[reached];
    if (!(task.kind == Task::Kind::join ? joined(replay, task, stream) : run(task, stream))) return false;
    ++reached;
    return true;
}

bool step_replay(Replay& replay, Stream& stream) {
    for (size_t branch = 0; branch < replay.reached.size(); ++branch) {
        if (step_branch(replay, branch, stream)) return true;
    }
    return false;
}

bool complete(const Replay& replay) {
    for (size_t branch = 0; branch < replay.reached.size(); ++branch) {
        if (replay.reached[branch] < replay.graph->branches[branch].tasks.size()) return false;
    }
    return true;
}

aclError stands_still(const Stream& stream) {
    const Task& task = stream.queue.front();
    std::string waiting = task.kind == Task::Kind::replay
                              ? "the graph waits for an event that nobody records (graph " +
                                    std::to_string(task.replay->graph->id) + ")"
                              : "the stream waits for an event that nobody records";
    return fail(ACL_ERROR_RT_TASK_TIMEOUT,
                "stream " + std::to_string(stream.id) + " stands still, a device would hang: " + waiting);
}

}  // namespace

bool step(Stream& stream) {
    if (stream.queue.empty() || stream.stepping) return false;
    Stepping here([&](bool on) { stream.stepping = on; });
    Task& task = stream.queue.front();
    if (task.kind == Task::Kind::replay) {
        bool moved = step_replay(*task.replay, stream);
        bool over = complete(*task.replay);
        if (over) stream.queue.pop_front();
        return moved || over;
    }
    if (!run(task, stream)) return false;
    stream.queue.pop_front();
    return true;
}

void settle() {
    for (bool moved = true; moved;) {
        moved = false;
        for (Stream* stream : streams()) {
            while (step(*stream)) moved = true;
        }
    }
}

aclError thrown(Stream& stream) {
    if (stream.error.empty()) return ACL_SUCCESS;
    std::string text;
    text.swap(stream.error);
    return fail(ACL_ERROR_RT_AICORE_EXCEPTION, "a task on stream " + std::to_string(stream.id) + " failed: " + text);
}

aclError finish(Stream& stream) {
    while (step(stream)) {
    }
    if (auto failed = thrown(stream)) return failed;
    return stream.queue.empty() ? ACL_SUCCESS : stands_still(stream);
}

aclError finish_all() {
    settle();
    for (Stream* stream : streams()) {
        if (auto failed = finish(*stream)) return failed;
    }
    return ACL_SUCCESS;
}

}  // namespace standin
