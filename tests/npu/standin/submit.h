// What a kernel library sees of the runtime: a way to put work on a stream, and a way to tell the trace.
//
// An operator reads its arguments when it is called (tensors, scalars and lists are destroyed right after), keeps
// copies, and submits a closure that touches the data. The runtime decides when it runs: at once (eager streams), at a
// synchronise (lazy streams), at each replay (a capture), or in place of an earlier one (a task update). So a closure
// may run never, once or many times, and must not read anything that belongs to the caller.
#pragma once

#include <functional>

#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))

// Puts *work (copied) on the stream; null is the default stream. Returns 0, or the error code to hand to the caller.
STANDIN_EXPORT int standin_submit(void* stream, std::function<void()>* work);

// One line of the trace, "standin: <line>" on stderr; does nothing unless STANDIN_TRACE is set.
STANDIN_EXPORT void standin_trace(const char* line);

// Fails the call being made: remembers the text for aclGetRecentErrMsg and returns the code.
STANDIN_EXPORT int standin_fail(int code, const char* text);
