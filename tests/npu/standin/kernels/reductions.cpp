// Many elements in, fewer out: sums, extremes, sorts, running sums, softmax.
#include "kernel.h"

using namespace standin;

namespace {
// No dims mean all of them.
Ints all_dims(const Tensor& self, const Ints& dims) {
    if (!dims.empty()) return dims;
    Ints every(self.dim());
    for (size_t dim = 0; dim < every.size(); ++dim) every[dim] = static_cast<int64_t>(dim);
    return every;
}
}  // namespace

KERNEL(ReduceSum, [](Tensor self, Ints dims, bool keep, Type type, Out out) { out = at::sum(self, dims, keep, type); })
KERNEL(ReduceNansum, [](Tensor self, Ints dims, bool keep, Type type, Out out) {
    out = at::nansum(self, dims, keep, type);
})
KERNEL(Mean, [](Tensor self, Ints dims, bool keep, Type type, Out out) { out = at::mean(self, dims, keep, type); })
KERNEL(Prod, [](Tensor self, Type type, Out out) { out = at::prod(self, type); })
KERNEL(ProdDim, [](Tensor self, int64_t dim, bool keep, Type type, Out out) { out = at::prod(self, dim, keep, type); })
KERNEL(All, [](Tensor self, Ints dims, bool keep, Out out) { out = at::all(self, all_dims(self, dims), keep); })
KERNEL(Any, [](Tensor self, Ints dims, bool keep, Out out) { out = at::any(self, all_dims(self, dims), keep); })
KERNEL(Amax, [](Tensor self, Ints dims, bool keep, Out out) { out = at::amax(self, dims, keep); })
KERNEL(Amin, [](Tensor self, Ints dims, bool keep, Out out) { out = at::amin(self, dims, keep); })
KERNEL(Max, [](Tensor self, Out out) { out = at::max(self); })
KERNEL(Min, [](Tensor self, Out out) { out = at::min(self); })
KERNEL(ArgMax, [](Tensor self, int64_t dim, bool keep, Out out) { out = at::argmax(self, dim, keep); })
KERNEL(ArgMin, [](Tensor self, int64_t dim, bool keep, Out out) { out = at::argmin(self, dim, keep); })
KERNEL(LogSumExp, [](Tensor self, Ints dims, bool keep, Out out) { out = at::logsumexp(self, dims, keep); })
KERNEL(LinalgVectorNorm, [](Tensor self, Scalar order, Ints dims, bool keep, Type type, Out out) {
    out = at::linalg_vector_norm(self, order, all_dims(self, dims), keep, type);
})
KERNEL(VarCorrection, [](Tensor self, Ints dims, int64_t correction, bool keep, Out out) {
    out = at::var(self, all_dims(self, dims), Scalar(correction), keep);
})
KERNEL(Std, [](Tensor self, Ints dims, int64_t correction, bool keep, Out out) {
    out = at::std(self, all_dims(self, dims), Scalar(correction), keep);
})

KERNEL(Aminmax, [](Tensor self, Ints dims, bool keep, Out low, Out high) {
    low = at::amin(self, all_dims(self, dims), keep);
    high = at::amax(self, all_dims(self, dims), keep);
})
KERNEL(VarMean, [](Tensor self, Ints dims, int64_t correction, bool keep, Out variance, Out mean) {
    variance = at::var(self, all_dims(self, dims), Scalar(correction), keep);
    mean = at::mean(self, all_dims(self, dims), keep);
})
KERNEL(Median, [](Tensor self, Out out) { out = at::median(self); })
KERNEL(Trace, [](Tensor self, Out out) { out = at::trace(self); })

// Operators with two results, values and places.
#define PAIR(NAME, FUNCTION)                                                                                         \
    KERNEL(NAME, [](Tensor self, int64_t dim, bool keep, Out values, Out indices) {                                  \
        const auto found = at::FUNCTION(self, dim, keep);                                                            \
        values = std::get<0>(found);                                                                                 \
        indices = std::get<1>(found);                                                                                \
    })

PAIR(MaxDim, max)
PAIR(MedianDim, median)
PAIR(MinDim, min)
KERNEL(TopkV2, [](Tensor self, int64_t count, int64_t dim, bool largest, bool sorted, int64_t /*policy*/, Out values,
                  Out indices) {
    const auto found = at::topk(self, count, dim, largest, sorted);
    values = std::get<0>(found);
    indices = std::get<1>(found);
})
KERNEL(Sort, [](Tensor self, bool stable, int64_t dim, bool descending, Out values, Out indices) {
    const auto found = at::sort(self, stable, dim, descending);
    values = std::get<0>(found);
    indices = std::get<1>(found);
})

KERNEL(Cumsum, [](Tensor self, int64_t dim, Type type, Out out) { out = at::cumsum(self, dim, type); })
KERNEL(Cumprod, [](Tensor self, Scalar dim, Type type, Out out) { out = at::cumprod(self, dim.toLong(), type); })
KERNEL(Cummax, [](Tensor self, int64_t dim, Out values, Out indices) {
    const auto found = at::cummax(self, dim);
    values = std::get<0>(found);
    indices = std::get<1>(found);
})
KERNEL(Cummin, [](Tensor self, int64_t dim, Out values, Out indices) {
    const auto found = at::cummin(self, dim);
    values = std::get<0>(found);
    indices = std::get<1>(found);
})
KERNEL(Softmax, [](Tensor self, int64_t dim, Out out) { out = at::softmax(self, dim, out.tensor.scalar_type()); })
KERNEL(LogSoftmax, [](Tensor self, int64_t dim, Out out) {
    out = at::log_softmax(self, dim, out.tensor.scalar_type());
})
KERNEL(Bincount, [](Tensor self, Tensor weights, int64_t at_least, Out out) {
    out = at::bincount(self, weights.defined() ? std::optional(weights) : std::nullopt, at_least);
})
