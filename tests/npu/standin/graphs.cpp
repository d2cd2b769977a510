// Graphs after their capture: replay, destruction, the limit on device streams, and task groups with their updates.
#include <map>

#include "runtime.h"

namespace standin {

namespace {

// By handle; a replay in a queue holds its graph too, so destroying one under way is safe.
std::map<void*, std::shared_ptr<Graph>>& graphs() {
    static auto* all = new std::map<void*, std::shared_ptr<Graph>>;
    return *all;
}

std::shared_ptr<Graph> graph_of(aclmdlRI handle) {
    auto found = graphs().find(handle);
    return found == graphs().end() ? nullptr : found->second;
}

// Each stream that takes part in a capture takes one of the device's for as long as the graph lives.
aclError take_stream(const std::string& call) {
    long taken = 0;
    for (auto& [handle, graph] : graphs()) taken += static_cast<long>(graph->branches.size());
    if (settings().stream_limit < 0 || taken < settings().stream_limit) return ACL_SUCCESS;
    // The wording of CANN's own reports.
    if (settings().stream_error == ACL_ERROR_RT_NO_STREAM_RESOURCE) {
        return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE,
                    "Insufficient_Stream_Resources(EL0009): The stream resources are insufficient.\n"
                    "        Solution: Close applications not in use.\n"
                    "        " + call + " execution failed, reason=driver error:no stream resource");
    }
    return fail(settings().stream_error,
                "EE9999: Inner Error!\n        [SqCqManage]Alloc sq cq fail\n"
                "        " + call + " execution failed, reason=driver error:resource alloc fail");
}

}  // namespace

aclError add_branch(const std::shared_ptr<Graph>& graph, Stream& stream) {
    auto* call = graph->branches.empty() ? "rtStreamBeginCapture" : "rtStreamWaitEvent";
    if (auto failed = take_stream(call)) return failed;
    Branch branch;
    branch.stream = &stream;
    stream.branch = graph->branches.size();
    graph->branches.push_back(std::move(branch));
    return ACL_SUCCESS;
}

std::shared_ptr<Graph> new_graph(Stream& origin) {
    static uint32_t made = 0;
    auto graph = std::make_shared<Graph>();
    if (add_branch(graph, origin)) return nullptr;
    graph->id = ++made;
    graphs()[graph.get()] = graph;
    return graph;
}

void drop_graph(const std::shared_ptr<Graph>& graph) { graphs().erase(graph.get()); }

}  // namespace standin

using namespace standin;

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream_handle) {
    Lock lock(mutex());
    auto graph = graph_of(handle);
    if (!graph) return fail(ACL_ERROR_RT_INVALID_HANDLE, "no such graph");
    Stream& stream = stream_of(stream_handle);
    trace("replay of graph " + std::to_string(graph->id) + " on stream " + std::to_string(stream.id));
    Task task;
    task.kind = Task::Kind::replay;
    task.replay = std::make_shared<Replay>();
    task.replay->reached.resize(graph->branches.size());
    task.replay->stepping.resize(graph->branches.size());
    task.replay->graph = std::move(graph);
    return submit(stream, std::move(task));
}

aclError aclmdlRIDestroy(aclmdlRI handle) {
    Lock lock(mutex());
    auto graph = graph_of(handle);
    if (!graph) return fail(ACL_ERROR_RT_INVALID_HANDLE, "no such graph");
    trace("graph " + std::to_string(graph->id) + " destroyed");
    drop_graph(graph);
    return ACL_SUCCESS;
}

aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
    Lock lock(mutex());
    auto graph = graph_of(handle);
    if (!graph) return fail(ACL_ERROR_RT_INVALID_HANDLE, "no such graph");
    *id = graph->id;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
    Lock lock(mutex());
    Stream& stream = stream_of(handle);
    if (!stream.capture || stream.in_group) {
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group begins on a captured stream, and not in another");
    }
    stream.in_group = true;
    stream.group_begin = stream.capture->graph->branches[stream.branch].tasks.size();
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
    Lock lock(mutex());
    Stream& stream = stream_of(handle);
    if (!stream.capture || !stream.in_group) {
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group has begun on this stream");
    }
    stream.in_group = false;
    auto& graph = stream.capture->graph;
    size_t end = graph->branches[stream.branch].tasks.size();
    // Never freed, as in CANN, which has no call for it.
    *group = new TaskGroup{graph, stream.branch, stream.group_begin, end};
    trace("task group of " + std::to_string(end - stream.group_begin) + " in graph " + std::to_string(graph->id));
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
    Lock lock(mutex());
    Stream& stream = stream_of(handle);
    if (stream.capture || stream.update) {
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "an update begins on a stream that does nothing else");
    }
    auto* chosen = static_cast<TaskGroup*>(group);
    if (chosen->graph.expired()) return fail(ACL_ERROR_RT_INVALID_HANDLE, "an update of a graph that was destroyed");
    stream.update = chosen;
    stream.updated = 0;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
    Lock lock(mutex());
    Stream& stream = stream_of(handle);
    if (!stream.update) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no update has begun on this stream");
    TaskGroup& group = *stream.update;
    stream.update = nullptr;
    if (stream.updated == group.end - group.begin) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED,
                "an update of " + std::to_string(stream.updated) + " tasks for a group of " +
                    std::to_string(group.end - group.begin));
}
