// Operators over lists of tensors (torch._foreach_*): the same work for each, in one launch.
#include "kernel.h"

using namespace standin;

namespace {
template <class Work>
void each(const Tensors& tensors, const Outs& outs, Work work) {
    TORCH_CHECK(tensors.size() == outs.size(), "lists of ", tensors.size(), " and ", outs.size(), " tensors");
    for (size_t index = 0; index < tensors.size(); ++index) outs[index] = work(tensors[index], index);
}
}  // namespace

KERNEL(ForeachCopy, [](Tensors sources, Outs outs) { each(sources, outs, [](const Tensor& x, size_t) { return x; }); })
KERNEL(ForeachZeroInplace, [](Tensors tensors) {
    for (auto& tensor : tensors) tensor.zero_();
})

#define EACH(NAME, FUNCTION)                                                               \
    KERNEL(Foreach##NAME, [](Tensors tensors, Outs outs) {                                 \
        each(tensors, outs, [](const Tensor& x, size_t) { return at::FUNCTION(x); });      \
    })

EACH(Abs, abs)
EACH(Cos, cos)
EACH(Exp, exp)
EACH(Log, log)
EACH(Neg, neg)
EACH(Reciprocal, reciprocal)
EACH(Sigmoid, sigmoid)
EACH(Sign, sign)
EACH(Sin, sin)
EACH(Sqrt, sqrt)
EACH(Tanh, tanh)

// With one number for all, and with a number for each.
#define EACH_WITH_NUMBER(NAME, FUNCTION)                                                                           \
    KERNEL(Foreach##NAME##ScalarV2, [](Tensors tensors, Scalar other, Outs outs) {                                 \
        each(tensors, outs, [&](const Tensor& x, size_t) { return at::FUNCTION(x, other); });                      \
    })                                                                                                             \
    KERNEL(Foreach##NAME##ScalarList, [](Tensors tensors, Scalars others, Outs outs) {                             \
        each(tensors, outs, [&](const Tensor& x, size_t index) { return at::FUNCTION(x, others.at(index)); });     \
    })

#define EACH_WITH_LIST(NAME, FUNCTION)                                                                             \
    KERNEL(Foreach##NAME##List, [](Tensors tensors, Tensors others, Outs outs) {                                   \
        each(tensors, outs, [&](const Tensor& x, size_t index) { return at::FUNCTION(x, others.at(index)); });     \
    })

// A sum takes a factor for the second operand.
#define EACH_SUM(NAME, FUNCTION)                                                                                      \
    KERNEL(Foreach##NAME##ListV2, [](Tensors tensors, Tensors others, Scalar alpha, Outs outs) {                      \
        each(tensors, outs, [&](const Tensor& x, size_t index) { return at::FUNCTION(x, others.at(index), alpha); }); \
    })

EACH_WITH_NUMBER(Add, add)
EACH_WITH_NUMBER(Div, div)
EACH_WITH_NUMBER(Mul, mul)
EACH_WITH_NUMBER(Pow, pow)
EACH_WITH_NUMBER(Sub, sub)
EACH_WITH_LIST(Div, div)
EACH_WITH_LIST(Maximum, maximum)
EACH_WITH_LIST(Minimum, minimum)
EACH_WITH_LIST(Mul, mul)
EACH_WITH_LIST(Pow, pow)
EACH_SUM(Add, add)
EACH_SUM(Sub, sub)
