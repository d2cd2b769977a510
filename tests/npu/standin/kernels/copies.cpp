// Moving and making elements: copies, casts, fills, joins, repeats, ranges.
#include "kernel.h"

using namespace standin;

KERNEL(InplaceCopy, [](Out self, Tensor source) { self.tensor.copy_(source); })
KERNEL(Cast, [](Tensor self, Type type, Out out) { out = self.to(type); })
KERNEL(InplaceZero, [](Out self) { self.tensor.zero_(); })
KERNEL(InplaceOne, [](Out self) { self.tensor.fill_(1); })
KERNEL(InplaceFillScalar, [](Out self, Scalar value) { self.tensor.fill_(value); })
KERNEL(InplaceFillTensor, [](Out self, Tensor value) { self.tensor.copy_(value); })
KERNEL(InplaceFillDiagonal, [](Out self, Scalar value, bool wrap) { self.tensor.fill_diagonal_(value, wrap); })

KERNEL(Cat, [](Tensors tensors, int64_t dim, Out out) { out = at::cat(tensors, dim); })
KERNEL(Stack, [](Tensors tensors, int64_t dim, Out out) { out = at::stack(tensors, dim); })
KERNEL(Repeat, [](Tensor self, Ints repeats, Out out) { out = self.repeat(repeats); })
KERNEL(Flip, [](Tensor self, Ints dims, Out out) { out = at::flip(self, dims); })
KERNEL(Roll, [](Tensor self, Ints shifts, Ints dims, Out out) { out = at::roll(self, shifts, dims); })
KERNEL(ConstantPadNd, [](Tensor self, Ints pad, Scalar value, Out out) { out = at::constant_pad_nd(self, pad, value); })
KERNEL(Tril, [](Tensor self, int64_t diagonal, Out out) { out = at::tril(self, diagonal); })
KERNEL(Triu, [](Tensor self, int64_t diagonal, Out out) { out = at::triu(self, diagonal); })
KERNEL(InplaceTril, [](Out self, int64_t diagonal) { self = at::tril(self.tensor, diagonal); })
KERNEL(InplaceTriu, [](Out self, int64_t diagonal) { self = at::triu(self.tensor, diagonal); })

KERNEL(Arange, [](Scalar start, Scalar end, Scalar step, Out out) {
    out = at::arange(start, end, step, out.tensor.options());
})
KERNEL(Linspace, [](Scalar start, Scalar end, int64_t steps, Out out) {
    out = at::linspace(start, end, steps, out.tensor.options());
})
KERNEL(Eye, [](int64_t rows, int64_t columns, Out out) { out = at::eye(rows, columns, out.tensor.options()); })
