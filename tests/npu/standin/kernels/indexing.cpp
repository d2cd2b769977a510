// Reading and writing at places that are data themselves.
#include <algorithm>

#include "kernel.h"

using namespace standin;

namespace {
// ATen indexes with int64 alone in some operators; the device takes int32 too.
Tensor places(const Tensor& index) { return index.scalar_type() == at::kInt ? index.to(at::kLong) : index; }

// The wheel passes an empty tensor for a dimension that is not indexed.
bool given(const Tensor& index) { return index.defined() && index.numel() > 0; }

// Whether an index holds a place; where none does, nothing is read or written.
bool any_given(const Tensors& indices) { return std::any_of(indices.begin(), indices.end(), given); }

c10::List<std::optional<Tensor>> places(const Tensors& indices) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& index : indices) list.push_back(given(index) ? std::optional(places(index)) : std::nullopt);
    return list;
}

// The numbers that stand for `reduce` in the scatter operators.
Tensor scattered(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, int64_t reduce) {
    if (reduce == 1) return at::scatter(self, dim, places(index), source, "add");
    if (reduce == 2) return at::scatter(self, dim, places(index), source, "multiply");
    return at::scatter(self, dim, places(index), source);
}

Tensor scattered(const Tensor& self, int64_t dim, const Tensor& index, const Scalar& value, int64_t reduce) {
    if (reduce == 1) return at::scatter(self, dim, places(index), value, "add");
    if (reduce == 2) return at::scatter(self, dim, places(index), value, "multiply");
    return at::scatter(self, dim, places(index), value);
}
}  // namespace

KERNEL(Index, [](Tensor self, Tensors indices, Out out) {
    if (any_given(indices)) out = at::index(self, places(indices));
})
KERNEL(IndexPutImpl, [](Out self, Tensors indices, Tensor values, bool accumulate, bool /*unsafe*/) {
    if (any_given(indices)) self.tensor.index_put_(places(indices), values, accumulate);
})
KERNEL(IndexSelect, [](Tensor self, int64_t dim, Tensor index, Out out) {
    out = at::index_select(self, dim, places(index));
})
KERNEL(IndexCopy, [](Tensor self, int64_t dim, Tensor index, Tensor source, Out out) {
    out = at::index_copy(self, dim, places(index), source);
})
KERNEL(InplaceIndexCopy, [](Out self, int64_t dim, Tensor index, Tensor source) {
    self.tensor.index_copy_(dim, places(index), source);
})
KERNEL(IndexAdd, [](Tensor self, int64_t dim, Tensor index, Tensor source, Scalar alpha, Out out) {
    out = at::index_add(self, dim, places(index), source, alpha);
})
KERNEL(IndexFill, [](Tensor self, int64_t dim, Tensor index, Scalar value, Out out) {
    out = at::index_fill(self, dim, places(index), value);
})
KERNEL(InplaceIndexFill, [](Out self, int64_t dim, Tensor index, Scalar value) {
    self.tensor.index_fill_(dim, places(index), value);
})
KERNEL(Gather, [](Tensor self, int64_t dim, Tensor index, Out out) { out = at::gather(self, dim, places(index)); })
KERNEL(Scatter, [](Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduce, Out out) {
    out = scattered(self, dim, index, source, reduce);
})
KERNEL(InplaceScatter, [](Out self, int64_t dim, Tensor index, Tensor source, int64_t reduce) {
    self = scattered(self.tensor, dim, index, source, reduce);
})
KERNEL(InplaceScatterValue, [](Out self, int64_t dim, Tensor index, Scalar value, int64_t reduce) {
    self = scattered(self.tensor, dim, index, value, reduce);
})
KERNEL(ScatterAdd, [](Tensor self, int64_t dim, Tensor index, Tensor source, Out out) {
    out = at::scatter_add(self, dim, places(index), source);
})
KERNEL(Take, [](Tensor self, Tensor index, Out out) { out = at::take(self, places(index)); })
KERNEL(InplacePut, [](Out self, Tensor index, Tensor source, bool accumulate) {
    self.tensor.put_(places(index), source, accumulate);
})

KERNEL(InplaceMaskedFillScalar, [](Out self, Tensor mask, Scalar value) { self.tensor.masked_fill_(mask, value); })
KERNEL(InplaceMaskedFillTensor, [](Out self, Tensor mask, Tensor value) {
    self = at::where(mask, value.to(self.tensor.scalar_type()), self.tensor);
})
KERNEL(InplaceMaskedScatter, [](Out self, Tensor mask, Tensor source) { self.tensor.masked_scatter_(mask, source); })
KERNEL(MaskedSelect, [](Tensor self, Tensor mask, Found out) { out = at::masked_select(self, mask); })
KERNEL(Nonzero, [](Tensor self, Found out) { out = at::nonzero(self); })

KERNEL(Embedding, [](Tensor weight, Tensor indices, Out out) { out = at::embedding(weight, places(indices)); })
KERNEL(OneHot, [](Tensor self, int64_t classes, Tensor on, Tensor off, int64_t axis, Out out) {
    const auto hot = self.unsqueeze(axis).eq(at::arange(classes, self.options()));
    out = at::where(hot, on, off);
})
KERNEL(RepeatInterleave, [](Tensor self, Tensor repeats, int64_t size, Out out) {
    out = at::repeat_interleave(self, repeats, std::nullopt, size);
})
KERNEL(RepeatInterleaveWithDim, [](Tensor self, Tensor repeats, int64_t dim, int64_t size, Out out) {
    out = at::repeat_interleave(self, repeats, dim, size);
})
KERNEL(RepeatInterleaveInt, [](Tensor self, int64_t repeats, int64_t size, Out out) {
    out = at::repeat_interleave(self, repeats, std::nullopt, size);
})
KERNEL(RepeatInterleaveIntWithDim, [](Tensor self, int64_t repeats, int64_t dim, int64_t size, Out out) {
    out = at::repeat_interleave(self, repeats, dim, size);
})
KERNEL(RepeatInterleaveTensor, [](Tensor repeats, int64_t size, Out out) {
    out = at::repeat_interleave(repeats, std::optional<int64_t>(size));
})

KERNEL(SearchSorted, [](Tensor sorted, Tensor self, bool int32, bool right, Tensor sorter, Out out) {
    const auto order = sorter.defined() ? std::optional(sorter) : std::nullopt;
    out = at::searchsorted(sorted, self, int32, right, std::nullopt, order);
})
KERNEL(SearchSorteds, [](Tensor sorted, Scalar self, bool int32, bool right, Tensor sorter, Out out) {
    const auto order = sorter.defined() ? std::optional(sorter) : std::nullopt;
    out = at::searchsorted(sorted, self, int32, right, std::nullopt, order);
})
KERNEL(IsInTensorScalar, [](Tensor elements, Scalar test, bool unique, bool invert, Out out) {
    out = at::isin(elements, test, unique, invert);
})
KERNEL(IsInScalarTensor, [](Scalar element, Tensor tests, bool unique, bool invert, Out out) {
    out = at::isin(element, tests, unique, invert);
})
