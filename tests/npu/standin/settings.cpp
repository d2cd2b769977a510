// What the environment says, the trace, and the text of the last error.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace standin {

namespace {

long number(const char* name, long otherwise) {
    const char* text = std::getenv(name);
    return text && *text ? std::atol(text) : otherwise;
}

bool on(const char* name) { return number(name, 0) != 0; }

// CANN keeps it per thread too: torch_npu launches on a thread of its own.
thread_local std::string last_error;
thread_local std::string told_error;

}  // namespace

const Settings& settings() {
    static const Settings read = [] {
        Settings made;
        made.devices = static_cast<int>(number("STANDIN_NPU_COUNT", 1));
        made.lazy = on("STANDIN_LAZY");
        made.trace = on("STANDIN_TRACE");
        made.progress = !on("STANDIN_NO_PROGRESS");
        made.stream_limit = number("STANDIN_STREAM_LIMIT", -1);
        made.stream_error = static_cast<aclError>(number("STANDIN_STREAM_ERROR", ACL_ERROR_RT_RESOURCE_ALLOC_FAIL));
        return made;
    }();
    return read;
}

std::recursive_mutex& mutex() {
    static auto* shared = new std::recursive_mutex;  // never destroyed: threads of the wheel outlive main
    return *shared;
}

aclError fail(aclError code, const std::string& text) {
    last_error = text;
    trace("error " + std::to_string(code) + ": " + text);
    return code;
}

void trace(const std::string& line) {
    if (settings().trace) std::fprintf(stderr, "standin: %s\n", line.c_str());
}

}  // namespace standin

void standin_trace(const char* line) { standin::trace(line); }

int standin_fail(int code, const char* text) { return standin::fail(code, text); }

const char* aclGetRecentErrMsg() {
    // Handed out once, as CANN does, so that no old text explains a new error.
    using namespace standin;
    told_error.swap(last_error);
    last_error.clear();
    return told_error.empty() ? nullptr : told_error.c_str();
}
