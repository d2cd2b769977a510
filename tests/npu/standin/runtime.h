// The types that the parts of the stand-in runtime share. Signatures come from the headers in the torch_npu wheel, so
// that the compiler holds this code to the interface that the wheel was built for.
//
// Time is modelled as queues: a stream holds tasks, a task runs when somebody takes a step (scheduler.cpp). Eager
// streams take all steps they can at each submission; lazy ones only when the host waits or asks.
#pragma once

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "submit.h"

namespace standin {

// What the environment says; tests/npu/README.md has the table.
struct Settings {
    int devices = 1;
    bool lazy = false;
    bool trace = false;
    bool progress = true;
    long stream_limit = -1;
    aclError stream_error = ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
};
const Settings& settings();

// One lock for everything: calls come from Python's thread and from torch_npu's launching thread.
using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex& mutex();

aclError fail(aclError code, const std::string& text);
void trace(const std::string& line);

struct Capture;
struct Replay;
struct Stream;

// One record of an event. A wait is for the record before it and for no later one, so it holds that, not the event.
struct Record {
    Stream* stream = nullptr;
    bool done = false;
    double milliseconds = 0;
};

struct Event {
    std::shared_ptr<Record> record;        // the last one outside captures, if any
    std::shared_ptr<Capture> capture;      // recorded inside this capture ...
    size_t branch = 0;                     // ... after so many tasks of this branch
    size_t position = 0;
};

struct Task {
    enum class Kind { work, record, wait, await, join, replay };
    Kind kind = Kind::work;
    std::function<void()> work;            // work
    std::shared_ptr<Record> record;        // record, wait
    std::function<bool()> ready;           // await: over once this is true, whoever makes it so
    size_t branch = 0;                     // join: the branch of the same graph that must come first ...
    size_t position = 0;                   // ... as far as here
    std::shared_ptr<Replay> replay;        // replay
};

// What one stream did during a capture. Branch 0 belongs to the stream on which the capture began.
struct Branch {
    Stream* stream = nullptr;
    std::vector<Task> tasks;
};

struct Graph {
    uint32_t id = 0;
    std::vector<Branch> branches;
};

// A run of a graph: how far each branch has come. Tasks are looked up when their turn comes, so an update that runs
// while a replay is under way, or waits in a queue, is seen by that replay, as on the device.
struct Replay {
    std::shared_ptr<Graph> graph;
    std::vector<size_t> reached;
    std::vector<bool> stepping;
};

struct Capture {
    std::shared_ptr<Graph> graph;
    aclmdlRICaptureMode mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    std::thread::id thread;
    bool invalid = false;                  // a refused call came in between: the capture cannot be ended well any more
};

// The tasks between a group's begin and end, all of one branch; an update puts others in their place.
struct TaskGroup {
    std::weak_ptr<Graph> graph;
    size_t branch = 0;
    size_t begin = 0;
    size_t end = 0;
};

struct Stream {
    int32_t id = 0;
    int32_t device = 0;
    std::deque<Task> queue;
    bool stepping = false;                 // guards against streams that wait for one another
    std::string error;                     // what a task threw; told at the next call that looks
    std::shared_ptr<Capture> capture;
    size_t branch = 0;
    size_t group_begin = 0;
    bool in_group = false;
    TaskGroup* update = nullptr;
    size_t updated = 0;
};

// devices.cpp
int32_t current_device();

// streams.cpp
Stream& stream_of(aclrtStream handle);     // null is the current device's default stream
std::vector<Stream*>& streams();
aclError submit(Stream& stream, Task task);

// scheduler.cpp
bool step(Stream& stream);
void settle();                             // takes every step that can be taken, on every stream
aclError finish(Stream& stream);           // runs the stream dry, or says what it stands still for
aclError finish_all();
aclError thrown(Stream& stream);           // the error of a task that threw, once

// captures.cpp
bool capturing();                          // on any stream
aclError refuse_unsafe(const char* call);  // 0 unless a capture forbids this call on this thread
aclError refuse_captured(const std::shared_ptr<Capture>& capture, aclError code, const char* call);
aclError join_capture(Stream& stream, Event& event);

// graphs.cpp
std::shared_ptr<Graph> new_graph(Stream& origin);  // null, with an error set, where STANDIN_STREAM_LIMIT is reached
aclError add_branch(const std::shared_ptr<Graph>& graph, Stream& stream);
void drop_graph(const std::shared_ptr<Graph>& graph);

// memory.cpp
void finish_before_free();

}  // namespace standin
