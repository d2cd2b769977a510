// Devices and contexts, and the settings of a device that the wheel makes at start and that mean nothing here.
#include <vector>

#include "runtime.h"

namespace standin {

namespace {

thread_local int32_t device = 0;

struct Context {
    int32_t device = 0;
    bool active = false;
};

std::vector<Context>& contexts() {
    static auto* all = [] {
        auto* made = new std::vector<Context>(settings().devices);
        for (size_t i = 0; i < made->size(); ++i) (*made)[i].device = static_cast<int32_t>(i);
        return made;
    }();
    return *all;
}

}  // namespace

int32_t current_device() { return device; }

}  // namespace standin

using namespace standin;

aclError aclInit(const char*) { return ACL_SUCCESS; }

aclError aclFinalize() { return ACL_SUCCESS; }

const char* aclrtGetSocName() { return "Ascend910B2"; }

aclError aclrtGetDeviceCount(uint32_t* count) {
    *count = static_cast<uint32_t>(settings().devices);
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t chosen) {
    if (chosen < 0 || chosen >= settings().devices) {
        return fail(ACL_ERROR_RT_INVALID_DEVICEID, "there is no device " + std::to_string(chosen));
    }
    Lock lock(mutex());
    device = chosen;
    contexts()[chosen].active = true;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* current) {
    if (settings().devices == 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set");
    *current = device;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetCurrentContext(aclrtContext* context) {
    if (settings().devices == 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set");
    *context = &contexts()[device];
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    device = static_cast<Context*>(context)->device;
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t asked, uint32_t* flags, int32_t* active) {
    if (flags) *flags = 0;
    *active = asked >= 0 && asked < settings().devices && contexts()[asked].active;
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
    *can = 0;
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
    *value = 0;
    return ACL_SUCCESS;
}
