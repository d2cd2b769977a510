// Events, and values in device memory that a stream waits for.
//
// torch_npu's ExternalEvent is such a value: wait() waits for 1 and writes 0, record() writes 1. So it may be waited
// for before anybody records it, both become nodes of a graph, and one record serves one replay.
#include "runtime.h"

namespace standin {

namespace {

Event& event_of(aclrtEvent handle) { return *static_cast<Event*>(handle); }

aclError create(aclrtEvent* handle) {
    *handle = new Event;
    return ACL_SUCCESS;
}

Task task_of(Task::Kind kind, const std::shared_ptr<Record>& record) {
    Task task;
    task.kind = kind;
    task.record = record;
    return task;
}

bool complete(const Event& event) { return !event.record || event.record->done; }

std::string on_stream(const char* what, const Stream& stream) {
    return std::string(what) + " on stream " + std::to_string(stream.id) + (stream.capture ? ", captured" : "");
}

bool matches(uint64_t found, uint64_t value, uint32_t flag) {
    switch (flag) {
        case ACL_STREAM_WAIT_VALUE_GEQ: return found >= value;
        case ACL_STREAM_WAIT_VALUE_EQ: return found == value;
        case ACL_STREAM_WAIT_VALUE_AND: return (found & value) != 0;
        default: return ~(found | value) != 0;
    }
}

}  // namespace

}  // namespace standin

using namespace standin;

aclError aclrtCreateEvent(aclrtEvent* handle) { return create(handle); }

aclError aclrtCreateEventWithFlag(aclrtEvent* handle, uint32_t) { return create(handle); }

aclError aclrtCreateEventExWithFlag(aclrtEvent* handle, uint32_t) { return create(handle); }

aclError aclrtDestroyEvent(aclrtEvent handle) {
    Lock lock(mutex());
    delete &event_of(handle);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    Lock lock(mutex());
    Event& event = event_of(handle);
    Stream& stream = stream_of(stream_handle);
    trace(on_stream("record", stream));
    event.capture = stream.capture;
    if (stream.capture) {
        event.branch = stream.branch;
        event.position = stream.capture->graph->branches[stream.branch].tasks.size();
        return ACL_SUCCESS;
    }
    event.record = std::make_shared<Record>();
    event.record->stream = &stream;
    return submit(stream, task_of(Task::Kind::record, event.record));
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    Lock lock(mutex());
    Event& event = event_of(handle);
    Stream& stream = stream_of(stream_handle);
    trace(on_stream("wait", stream));
    if (event.capture || stream.capture) return join_capture(stream, event);
    if (complete(event)) return ACL_SUCCESS;
    return submit(stream, task_of(Task::Kind::wait, event.record));
}

// A wait names its record, so there is nothing to clear.
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    Lock lock(mutex());
    Event& event = event_of(handle);
    if (auto refused = refuse_captured(event.capture, ACL_ERROR_RT_EVENT_CAPTURED, "synchronising an event")) {
        return refused;
    }
    while (!complete(event) && step(*event.record->stream)) {
    }
    if (event.record) {
        if (auto failed = thrown(*event.record->stream)) return failed;
    }
    if (complete(event)) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_TASK_TIMEOUT, "the host waits for an event on a stream that stands still");
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
    Lock lock(mutex());
    Event& event = event_of(handle);
    if (auto refused = refuse_captured(event.capture, ACL_ERROR_RT_EVENT_CAPTURED, "querying an event")) {
        return refused;
    }
    if (!complete(event) && settings().progress) step(*event.record->stream);
    *status = complete(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
    Lock lock(mutex());
    auto& from = event_of(start).record, &to = event_of(end).record;
    if (!from || !to || !from->done || !to->done) {
        return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the time between events of which one has not come yet");
    }
    *milliseconds = static_cast<float>(to->milliseconds - from->milliseconds);
    return ACL_SUCCESS;
}

aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag, aclrtStream handle) {
    Stream& stream = stream_of(handle);
    trace(on_stream("wait for a value", stream));
    Task task;
    task.kind = Task::Kind::await;
    task.ready = [=, found = static_cast<volatile uint64_t*>(address)] { return matches(*found, value, flag); };
    return submit(stream, std::move(task));
}

aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream handle) {
    Stream& stream = stream_of(handle);
    trace(on_stream(value ? "write of a value" : "write of zero", stream));
    Task task;
    task.work = [=, place = static_cast<uint64_t*>(address)] { *place = value; };
    return submit(stream, std::move(task));
}
