// How an operator is written: KERNEL(Name, [](parameters) { body });
//
// The parameters are those of the public aclnnName interface, in its order, results last, as C++ types:
//   Tensor (undefined where the caller gave none), Out, Found, Tensors, Outs, Scalar, MaybeScalar, Scalars, Ints, Type,
//   Text, and plain numbers.
// KERNEL makes the two functions that the wheel looks up.  aclnnNameGetWorkspaceSize reads the arguments, which are
// destroyed soon after, and keeps copies; aclnnName submits the work to the stream.  The body runs when the runtime
// says so, and reads its tensors' data then: at once, later, or at each replay of a graph.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../submit.h"
#include "descriptors.h"

namespace standin {

using Tensor = at::Tensor;
using Tensors = std::vector<at::Tensor>;
using Scalar = at::Scalar;
using MaybeScalar = std::optional<at::Scalar>;
using Scalars = std::vector<at::Scalar>;
using Ints = std::vector<int64_t>;
using Type = at::ScalarType;
using Text = std::string;

// A tensor to write: `out = value` casts, and refuses a value of another shape, which copy_ would broadcast.
struct Out {
    at::Tensor tensor;
    void operator=(const at::Tensor& value) const;
};
using Outs = std::vector<Out>;

// A tensor to write whose result may be smaller than it: the caller asks aclGetViewShape how much there is.
struct Found {
    aclTensor* handle;
    at::Tensor tensor;
    void operator=(const at::Tensor& value) const;
};

inline at::Tensor tensor_of(const aclTensor* handle) { return handle ? handle->view : at::Tensor(); }

// How a parameter comes through the C interface, and what is kept of it.
template <class Parameter>
struct Argument {
    static_assert(std::is_arithmetic_v<Parameter>);
    using Handle = Parameter;
    static Parameter read(Handle value) { return value; }
};

template <>
struct Argument<Tensor> {
    using Handle = const aclTensor*;
    static Tensor read(Handle handle) { return tensor_of(handle); }
};

template <>
struct Argument<Out> {
    using Handle = const aclTensor*;
    static Out read(Handle handle) { return Out{tensor_of(handle)}; }
};

template <>
struct Argument<Found> {
    using Handle = aclTensor*;
    static Found read(Handle handle) { return Found{handle, tensor_of(handle)}; }
};

template <>
struct Argument<Tensors> {
    using Handle = const aclTensorList*;
    static Tensors read(Handle handle) {
        Tensors tensors;
        for (const auto* tensor : handle->tensors) tensors.push_back(tensor_of(tensor));
        return tensors;
    }
};

template <>
struct Argument<Outs> {
    using Handle = const aclTensorList*;
    static Outs read(Handle handle) {
        Outs outs;
        for (const auto* tensor : handle->tensors) outs.push_back(Out{tensor_of(tensor)});
        return outs;
    }
};

template <>
struct Argument<Scalar> {
    using Handle = const aclScalar*;
    static Scalar read(Handle handle) { return handle->value; }
};

template <>
struct Argument<MaybeScalar> {
    using Handle = const aclScalar*;
    static MaybeScalar read(Handle handle) { return handle ? MaybeScalar(handle->value) : std::nullopt; }
};

template <>
struct Argument<Scalars> {
    using Handle = const aclScalarList*;
    static Scalars read(Handle handle) { return handle->values; }
};

template <>
struct Argument<Ints> {
    using Handle = const aclIntArray*;
    static Ints read(Handle handle) { return handle ? handle->values : Ints(); }
};

template <>
struct Argument<Type> {
    using Handle = int;
    static Type read(Handle code) { return scalar_type(code); }
};

template <>
struct Argument<Text> {
    using Handle = const char*;
    static Text read(Handle text) { return text ? text : ""; }
};

// What GetWorkspaceSize hands to the call that follows it (aclOpExecutor).
struct Prepared {
    std::function<void()> work;
};

// Remembers why arguments cannot be read, and answers the code for it.
int refused(const char* name, const std::exception& error);

// Puts the prepared work on the stream, once; what it throws is told by the runtime, at once or at a later call.
int submit(const char* name, Prepared* prepared, void* stream);

template <class Body, const char* Name, class Call = decltype(&Body::operator())>
struct Kernel;

template <class Body, const char* Name, class... Parameters>
struct Kernel<Body, Name, void (Body::*)(Parameters...) const> {
    static int prepare(
        typename Argument<std::decay_t<Parameters>>::Handle... handles, uint64_t* workspace, Prepared** prepared
    ) {
        *workspace = 0;
        try {
            auto kept = std::make_tuple(Argument<std::decay_t<Parameters>>::read(handles)...);
            *prepared = new Prepared{[kept = std::move(kept)] { std::apply(Body{}, kept); }};
            return 0;
        } catch (const std::exception& error) {
            return refused(Name, error);
        }
    }
};

}  // namespace standin

// The C signature of GetWorkspaceSize follows from the parameters of the body, which a macro cannot spell.  So the
// symbol is an ifunc: the linker asks `resolve_` for the address, and gets the function that the template made.
#define KERNEL(NAME, ...)                                                                                        \
    static constexpr char name_##NAME[] = "aclnn" #NAME;                                                         \
    using Body_##NAME = decltype(__VA_ARGS__);                                                                   \
    extern "C" {                                                                                                 \
    static void (*resolve_##NAME())() {                                                                          \
        return reinterpret_cast<void (*)()>(&standin::Kernel<Body_##NAME, name_##NAME>::prepare);                \
    }                                                                                                            \
    __attribute__((visibility("default"), ifunc("resolve_" #NAME))) void aclnn##NAME##GetWorkspaceSize();        \
    }                                                                                                            \
    STANDIN_EXPORT int aclnn##NAME(void*, uint64_t, standin::Prepared* prepared, void* stream) {                 \
        return standin::submit(name_##NAME, prepared, stream);                                                   \
    }
