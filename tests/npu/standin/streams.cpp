// Streams, and how a task reaches one: into a queue, into a capture, or as an update of a captured task.
#include <map>

#include "runtime.h"

namespace standin {

namespace {

Stream* new_stream(int32_t device) {
    static int32_t made = 0;
    auto* stream = new Stream;  // kept after its end: an event may still name it
    stream->id = made++;
    stream->device = device;
    streams().push_back(stream);
    return stream;
}

// An update is itself a task: it takes effect when the update stream comes to it, not when the host asks for it.
aclError submit_update(Stream& stream, Task task) {
    TaskGroup& group = *stream.update;
    size_t place = group.begin + stream.updated++;
    if (place >= group.end) {
        return fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "an update holds more tasks than were captured in its group");
    }
    Task update;
    update.work = [graph = group.graph.lock(), branch = group.branch, place, task = std::move(task)] {
        trace("update of task " + std::to_string(place) + " in graph " + std::to_string(graph->id));
        graph->branches[branch].tasks[place] = task;
    };
    stream.queue.push_back(std::move(update));
    return ACL_SUCCESS;
}

aclError destroy(aclrtStream handle) {
    Lock lock(mutex());
    return finish(stream_of(handle));
}

}  // namespace

std::vector<Stream*>& streams() {
    static auto* all = new std::vector<Stream*>;
    return *all;
}

Stream& stream_of(aclrtStream handle) {
    static auto* defaults = new std::map<int32_t, Stream*>;
    if (handle) return *static_cast<Stream*>(handle);
    Lock lock(mutex());
    Stream *&stream = (*defaults)[current_device()];
    if (!stream) stream = new_stream(current_device());
    return *stream;
}

aclError submit(Stream& stream, Task task) {
    Lock lock(mutex());
    if (stream.capture) {
        if (stream.capture->invalid) return fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture is invalid");
        stream.capture->graph->branches[stream.branch].tasks.push_back(std::move(task));
        return ACL_SUCCESS;
    }
    if (stream.update) {
        if (auto failed = submit_update(stream, std::move(task))) return failed;
    } else {
        stream.queue.push_back(std::move(task));
    }
    if (settings().lazy) return ACL_SUCCESS;
    settle();
    return thrown(stream);
}

}  // namespace standin

using namespace standin;

int standin_submit(void* handle, std::function<void()>* work) {
    Task task;
    task.work = *work;
    return submit(stream_of(handle), std::move(task));
}

aclError aclrtCreateStream(aclrtStream* handle) {
    Lock lock(mutex());
    *handle = new_stream(current_device());
    return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream* handle, uint32_t, uint32_t) { return aclrtCreateStream(handle); }

aclError aclrtDestroyStream(aclrtStream handle) { return destroy(handle); }

aclError aclrtDestroyStreamForce(aclrtStream handle) { return destroy(handle); }

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
    *id = stream_of(handle).id;
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream handle) {
    Lock lock(mutex());
    Stream& stream = stream_of(handle);
    trace("synchronise stream " + std::to_string(stream.id));
    if (auto refused = refuse_captured(stream.capture, ACL_ERROR_RT_STREAM_CAPTURED, "synchronising a stream")) {
        return refused;
    }
    return finish(stream);
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t) { return aclrtSynchronizeStream(handle); }

aclError aclrtSynchronizeDevice() {
    Lock lock(mutex());
    trace("synchronise device");
    if (auto refused = refuse_unsafe("synchronising the device")) return refused;
    return finish_all();
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
    Lock lock(mutex());
    Stream& stream = stream_of(handle);
    if (auto refused = refuse_captured(stream.capture, ACL_ERROR_RT_STREAM_CAPTURED, "querying a stream")) {
        return refused;
    }
    if (settings().progress) step(stream);
    *status = stream.queue.empty() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return thrown(stream);
}
