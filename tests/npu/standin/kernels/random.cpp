// Random numbers: a generator seeded with the caller's seed and offset, so that the same two give the same numbers.
//
// Not the numbers of the device's generator, nor of the CPU's.  In a graph, seed and offset lie in tensors that each
// replay moves on, so that replays differ as they do on a device.
#include <ATen/CPUGeneratorImpl.h>

#include "kernel.h"

using namespace standin;

namespace {
at::Generator generator(int64_t seed, int64_t offset) {
    const auto mixed = static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ull ^ static_cast<uint64_t>(offset);
    return at::detail::createCPUGenerator(mixed);
}

at::Generator generator(const Tensor& seed, const Tensor& offset, int64_t more) {
    return generator(seed.item<int64_t>(), offset.item<int64_t>() + more);
}
}  // namespace

// NAME with a seed and an offset, and NAMETensor, which a graph holds.
#define RANDOM(NAME, FIRST, SECOND, ...)                                                                            \
    KERNEL(NAME, [](Out self, FIRST one, SECOND two, int64_t seed, int64_t offset) {                                \
        const auto source = generator(seed, offset);                                                                \
        __VA_ARGS__;                                                                                                \
    })                                                                                                              \
    KERNEL(NAME##Tensor, [](Out self, FIRST one, SECOND two, Tensor seed, Tensor offset, int64_t more) {            \
        const auto source = generator(seed, offset, more);                                                          \
        __VA_ARGS__;                                                                                                \
    })

RANDOM(InplaceNormal, float, float, self.tensor.normal_(one, two, source))
RANDOM(InplaceRandom, int64_t, int64_t, self.tensor.random_(one, two, source))
RANDOM(InplaceUniform, double, double, self.tensor.uniform_(one, two, source))

KERNEL(InplaceBernoulli, [](Out self, Scalar chance, int64_t seed, int64_t offset) {
    self.tensor.bernoulli_(chance.toDouble(), generator(seed, offset));
})
KERNEL(Randperm, [](int64_t count, int64_t seed, int64_t offset, Out out) {
    out = at::randperm(count, generator(seed, offset), at::kLong);
})
KERNEL(Multinomial, [](Tensor self, int64_t samples, bool replace, int64_t seed, int64_t offset, Out out) {
    out = at::multinomial(self, samples, replace, generator(seed, offset));
})
KERNEL(MultinomialTensor, [](Tensor self, int64_t samples, bool replace, Tensor seed, Tensor offset, int64_t more,
                             Out out) { out = at::multinomial(self, samples, replace, generator(seed, offset, more)); })
