// Device memory and pinned host memory, both plain host memory here, and the copies between them.
//
// Fresh and freed memory is filled with a pattern, and freed blocks are held back for a while: what reads memory that
// nobody wrote, or that was given back, reads garbage, not yesterday's values and not a crash elsewhere.
#include <cstdlib>
#include <cstring>
#include <map>

#include "runtime.h"

namespace standin {

namespace {

constexpr int poison = 0xA5;
constexpr size_t alignment = 512;
constexpr size_t device_bytes = size_t{8} << 30;
constexpr size_t held_back_bytes = size_t{256} << 20;

struct Block {
    size_t bytes = 0;
    int32_t device = -1;  // -1: pinned host memory
    bool owned = true;    // false: registered, the caller's own
};

struct Memory {
    std::map<const char*, Block> blocks;
    std::map<int32_t, size_t> used;
    std::deque<std::pair<void*, size_t>> freed;
    size_t freed_bytes = 0;
};

Memory& memory() {
    static auto* all = new Memory;
    return *all;
}

const Block* block_of(const void* pointer) {
    auto after = memory().blocks.upper_bound(static_cast<const char*>(pointer));
    if (after == memory().blocks.begin()) return nullptr;
    const auto& [begin, block] = *--after;
    return static_cast<const char*>(pointer) < begin + block.bytes ? &block : nullptr;
}

aclError allocate(void** pointer, size_t bytes, int32_t device) {
    Lock lock(mutex());
    size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    if (device >= 0 && memory().used[device] + rounded > device_bytes) {
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the device has no " + std::to_string(bytes) + " bytes left");
    }
    *pointer = std::aligned_alloc(alignment, rounded);
    if (!*pointer) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no memory left");
    std::memset(*pointer, poison, rounded);
    memory().blocks[static_cast<const char*>(*pointer)] = {rounded, device, true};
    if (device >= 0) memory().used[device] += rounded;
    trace("malloc " + std::to_string(bytes) + (device < 0 ? " pinned" : ""));
    return ACL_SUCCESS;
}

aclError release(void* pointer) {
    Lock lock(mutex());
    auto found = memory().blocks.find(static_cast<const char*>(pointer));
    if (found == memory().blocks.end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "free of memory never allocated");
    finish_before_free();
    auto [bytes, device, owned] = found->second;
    memory().blocks.erase(found);
    if (device >= 0) memory().used[device] -= bytes;
    if (!owned) return ACL_SUCCESS;
    std::memset(pointer, poison, bytes);
    memory().freed.emplace_back(pointer, bytes);
    memory().freed_bytes += bytes;
    while (memory().freed_bytes > held_back_bytes) {
        auto [oldest, size] = memory().freed.front();
        memory().freed.pop_front();
        memory().freed_bytes -= size;
        std::free(oldest);
    }
    return ACL_SUCCESS;
}

aclError register_host(void* pointer, size_t bytes) {
    Lock lock(mutex());
    memory().blocks[static_cast<const char*>(pointer)] = {bytes, -1, false};
    return ACL_SUCCESS;
}

aclError check_room(size_t room, size_t bytes) {
    if (bytes <= room) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                "a copy of " + std::to_string(bytes) + " bytes into room for " + std::to_string(room));
}

// A copy that names pageable memory is done in the call, after what the stream holds: the device cannot read it later.
aclError copy(void* to, const void* from, size_t bytes, Stream& stream) {
    if (block_of(to) && block_of(from)) {
        Task task;
        task.work = [=] { std::memmove(to, from, bytes); };
        return submit(stream, std::move(task));
    }
    if (auto refused = refuse_captured(stream.capture, ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC,
                                       "an asynchronous copy from or to pageable memory")) {
        return refused;
    }
    if (auto failed = finish(stream)) return failed;
    std::memmove(to, from, bytes);
    return ACL_SUCCESS;
}

}  // namespace

// Waits as the real free does, so that no queued task touches what is given back.
void finish_before_free() {
    if (!capturing()) finish_all();
}

}  // namespace standin

using namespace standin;

aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
    return allocate(pointer, bytes, current_device());
}

aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
    return allocate(pointer, bytes, current_device());
}

aclError aclrtFree(void* pointer) { return release(pointer); }

aclError aclrtMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, -1); }

aclError aclrtMallocHostWithCfg(void** pointer, uint64_t bytes, aclrtMallocConfig*) {
    return allocate(pointer, bytes, -1);
}

aclError aclrtFreeHost(void* pointer) { return release(pointer); }

aclError aclrtHostRegister(void* pointer, uint64_t bytes, aclrtHostRegisterType, void** mapped) {
    *mapped = pointer;
    return register_host(pointer, bytes);
}

aclError aclrtHostRegisterV2(void* pointer, uint64_t bytes, uint32_t) { return register_host(pointer, bytes); }

aclError aclrtHostUnregister(void* pointer) { return release(pointer); }

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
    Lock lock(mutex());
    *attributes = {};
    const Block* block = block_of(pointer);
    attributes->location.type = !block               ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                                : block->device < 0 ? ACL_MEM_LOCATION_TYPE_HOST
                                                    : ACL_MEM_LOCATION_TYPE_DEVICE;
    if (block && block->device >= 0) attributes->location.id = static_cast<uint32_t>(block->device);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
    Lock lock(mutex());
    *total = device_bytes;
    *free = device_bytes - memory().used[current_device()];
    return ACL_SUCCESS;
}

// The blocking copy is no stream's: the caller has synchronised before it, or reads what is not there yet.
aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
    Lock lock(mutex());
    trace("memcpy " + std::to_string(bytes) + " kind " + std::to_string(kind));
    if (auto refused = refuse_unsafe("aclrtMemcpy")) return refused;
    if (auto failed = check_room(room, bytes)) return failed;
    std::memmove(to, from, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream handle) {
    Lock lock(mutex());
    Stream& stream = stream_of(handle);
    trace("memcpy async " + std::to_string(bytes) + " kind " + std::to_string(kind) + " stream " +
          std::to_string(stream.id));
    if (auto failed = check_room(room, bytes)) return failed;
    return copy(to, from, bytes, stream);
}

aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
    Lock lock(mutex());
    if (auto refused = refuse_unsafe("aclrtMemset")) return refused;
    if (auto failed = check_room(room, bytes)) return failed;
    std::memset(to, value, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream handle) {
    Lock lock(mutex());
    if (auto failed = check_room(room, bytes)) return failed;
    Task task;
    task.work = [=] { std::memset(to, value, bytes); };
    return submit(stream_of(handle), std::move(task));
}

aclError aclrtMemcpyBatch(void** to, size_t* rooms, void** from, size_t* bytes, size_t count, aclrtMemcpyBatchAttr*,
                          size_t*, size_t, size_t* failed_at) {
    Lock lock(mutex());
    trace("memcpy batch of " + std::to_string(count));
    if (auto refused = refuse_unsafe("aclrtMemcpyBatch")) return refused;
    for (size_t i = 0; i < count; ++i) {
        if (failed_at) *failed_at = i;
        if (auto failed = check_room(rooms[i], bytes[i])) return failed;
        std::memmove(to[i], from[i], bytes[i]);
    }
    return ACL_SUCCESS;
}

aclError aclrtMemcpyBatchAsync(void** to, size_t* rooms, void** from, size_t* bytes, size_t count,
                               aclrtMemcpyBatchAttr*, size_t*, size_t, size_t* failed_at, aclrtStream handle) {
    Lock lock(mutex());
    trace("memcpy batch async of " + std::to_string(count));
    for (size_t i = 0; i < count; ++i) {
        if (failed_at) *failed_at = i;
        if (auto failed = check_room(rooms[i], bytes[i])) return failed;
        if (auto failed = copy(to[i], from[i], bytes[i], stream_of(handle))) return failed;
    }
    return ACL_SUCCESS;
}
