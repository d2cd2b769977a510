// Captures: which streams take part, which calls they forbid, and when one ends well.
//
// Unsafe calls are those that CANN's manual lists for aclmdlRICaptureBegin: blocking copies and fills, and asynchronous
// ones of pageable memory. A refused call spoils the capture, as the manual says.
#include <algorithm>
#include <utility>

#include "runtime.h"

namespace standin {

namespace {

std::vector<std::shared_ptr<Capture>>& captures() {
    static auto* all = new std::vector<std::shared_ptr<Capture>>;
    return *all;
}

thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

bool forbids(const Capture& capture) {
    if (capture.mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
    if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
    if (capture.thread == std::this_thread::get_id()) return true;
    return capture.mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && thread_mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
}

// How far each branch is known to be over when the capturing stream comes to its end.
void follow(const Graph& graph, size_t branch, size_t position, std::vector<size_t>& over) {
    if (over[branch] >= position) return;
    size_t from = std::exchange(over[branch], position);
    for (size_t i = from; i < position; ++i) {
        const Task& task = graph.branches[branch].tasks[i];
        if (task.kind == Task::Kind::join) follow(graph, task.branch, task.position, over);
    }
}

bool all_joined(const Graph& graph) {
    std::vector<size_t> over(graph.branches.size(), 0);
    follow(graph, 0, graph.branches[0].tasks.size(), over);
    for (size_t branch = 0; branch < over.size(); ++branch) {
        if (over[branch] < graph.branches[branch].tasks.size()) return false;
    }
    return true;
}

void leave(const std::shared_ptr<Capture>& capture) {
    for (Stream* stream : streams()) {
        if (stream->capture != capture) continue;
        stream->capture.reset();
        stream->in_group = false;
    }
    auto& all = captures();
    all.erase(std::remove(all.begin(), all.end(), capture), all.end());
}

bool under_way(const std::shared_ptr<Capture>& capture) {
    return std::find(captures().begin(), captures().end(), capture) != captures().end();
}

aclError give_up(const std::shared_ptr<Capture>& capture, aclError code, const char* text) {
    drop_graph(capture->graph);
    return fail(code, text);
}

}  // namespace

bool capturing() { return !captures().empty(); }

aclError refuse_unsafe(const char* call) {
    aclError refused = ACL_SUCCESS;
    for (auto& capture : captures()) {
        if (!forbids(*capture)) continue;
        capture->invalid = true;
        refused = fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, std::string(call) + " is not allowed during a capture");
    }
    return refused;
}

aclError refuse_captured(const std::shared_ptr<Capture>& capture, aclError code, const char* call) {
    if (!capture || !under_way(capture)) return ACL_SUCCESS;
    capture->invalid = true;
    return fail(code, std::string(call) + " is not allowed during a capture that it is part of");
}

// A wait that has to do with a capture: the stream joins the capture of the event, or the wait is none of the graph's.
aclError join_capture(Stream& stream, Event& event) {
    if (!event.capture && !event.record) return ACL_SUCCESS;  // never recorded: nothing to wait for
    if (!event.capture || !under_way(event.capture)) {
        if (!stream.capture) return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event belongs to a capture that has ended");
        stream.capture->invalid = true;
        return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a captured stream waits for an event from outside the capture");
    }
    if (stream.capture && stream.capture != event.capture) {
        return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "a captured stream waits for an event of another capture");
    }
    if (!stream.capture) {
        if (auto failed = add_branch(event.capture->graph, stream)) return failed;
        stream.capture = event.capture;
    }
    Task task;
    task.kind = Task::Kind::join;
    task.branch = event.branch;
    task.position = event.position;
    return submit(stream, std::move(task));
}

}  // namespace standin

using namespace standin;

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
    Lock lock(mutex());
    Stream& stream = stream_of(handle);
    trace("capture begins on stream " + std::to_string(stream.id) + " mode " + std::to_string(mode));
    if (!handle) return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
    if (stream.capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is captured already");
    auto graph = new_graph(stream);
    if (!graph) return settings().stream_error;
    stream.capture = std::make_shared<Capture>();
    stream.capture->graph = std::move(graph);
    stream.capture->mode = mode;
    stream.capture->thread = std::this_thread::get_id();
    stream.branch = 0;
    captures().push_back(stream.capture);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
    Lock lock(mutex());
    auto& capture = stream_of(handle).capture;
    *status = !capture           ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : capture->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                                 : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    if (model) *model = capture ? capture->graph.get() : nullptr;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
    Lock lock(mutex());
    Stream& stream = stream_of(handle);
    *model = nullptr;
    auto capture = stream.capture;
    if (!capture) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not captured");
    if (stream.branch != 0) return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture began on another stream");
    trace("capture ends on stream " + std::to_string(stream.id));
    leave(capture);
    if (capture->invalid) {
        return give_up(capture, ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "a call during the capture was not allowed");
    }
    if (!all_joined(*capture->graph)) {
        return give_up(capture, ACL_ERROR_RT_STREAM_UNJOINED, "a stream that joined the capture was not waited for");
    }
    *model = capture->graph.get();
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
    std::swap(*mode, thread_mode);
    return ACL_SUCCESS;
}
