// What all kernels share: writing results, errors, and the dispatcher's state while they run.
#include "kernel.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <stdexcept>

namespace standin {
namespace {

constexpr int kInvalidParameter = 161002;  // ACLNN_ERR_PARAM_INVALID

// ATen adds a backtrace to its texts.
std::string reason(const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    return torch_error ? torch_error->what_without_backtrace() : error.what();
}

// The thread that happens to run a kernel may record gradients, or be inside a mode of the user's: neither is for us.
struct PlainTensors {
    c10::impl::ExcludeDispatchKeyGuard keys{
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})
    };
    at::NoGradGuard gradients;
};

at::Tensor shaped(const at::Tensor& value, const at::Tensor& place) {
    TORCH_CHECK(
        value.numel() == place.numel(), "the kernel made ", value.sizes(), " where the caller made room for ",
        place.sizes()
    );
    return value.reshape(place.sizes());
}

}  // namespace

void Out::operator=(const at::Tensor& value) const { tensor.copy_(shaped(value, tensor)); }

void Found::operator=(const at::Tensor& value) const {
    handle->written = value.sizes().vec();
    const auto room = tensor.flatten().narrow(0, 0, value.numel());
    room.copy_(value.flatten());
}

int refused(const char* name, const std::exception& error) {
    const auto text = std::string(name) + ": " + reason(error);
    return standin_fail(kInvalidParameter, text.c_str());
}

int submit(const char* name, Prepared* prepared, void* stream) {
    standin_trace(name);
    const std::unique_ptr<Prepared> owned(prepared);
    std::function<void()> work = [name, run = owned->work] {
        const PlainTensors plain;
        try {
            run();
        } catch (const std::exception& error) {
            throw std::runtime_error(std::string(name) + ": " + reason(error));
        }
    };
    return standin_submit(stream, &work);
}

}  // namespace standin
