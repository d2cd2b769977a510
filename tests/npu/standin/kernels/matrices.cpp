// Products of matrices, layer norm, convolution.
#include "kernel.h"

using namespace standin;

// The last number of each product picks the precision of the matrix unit; here there is one.
#define PRODUCT(NAME, FUNCTION) \
    KERNEL(NAME, [](Tensor self, Tensor other, Out out, int8_t) { out = at::FUNCTION(self, other); })

PRODUCT(BatchMatMul, bmm)
PRODUCT(Matmul, matmul)
PRODUCT(Mm, mm)
PRODUCT(Mv, mv)
KERNEL(Dot, [](Tensor self, Tensor other, Out out) { out = at::dot(self, other); })

#define PRODUCT_AND_SUM(NAME, FUNCTION)                                                                         \
    KERNEL(NAME, [](Tensor self, Tensor one, Tensor two, Scalar beta, Scalar alpha, Out out, int8_t) {          \
        out = at::FUNCTION(self, one, two, beta, alpha);                                                        \
    })

PRODUCT_AND_SUM(Addmm, addmm)
PRODUCT_AND_SUM(Baddbmm, baddbmm)
KERNEL(InplaceAddmm, [](Out self, Tensor one, Tensor two, Scalar beta, Scalar alpha, int8_t) {
    self = at::addmm(self.tensor, one, two, beta, alpha);
})
KERNEL(Addmv, [](Tensor self, Tensor matrix, Tensor vector, Scalar alpha, Scalar beta, Out out, int8_t) {
    out = at::addmv(self, matrix, vector, beta, alpha);
})
KERNEL(LayerNorm, [](Tensor input, Ints shape, Tensor weight, Tensor bias, double epsilon, Out out, Out mean,
                     Out deviation) {
    const auto results = at::native_layer_norm(input, shape, weight, bias, epsilon);
    out = std::get<0>(results);
    if (mean.tensor.defined()) mean = std::get<1>(results);
    if (deviation.tensor.defined()) deviation = std::get<2>(results);
})
KERNEL(Convolution, [](Tensor input, Tensor weight, Tensor bias, Ints stride, Ints padding, Ints dilation,
                       bool transposed, Ints output_padding, int64_t groups, Out out, int8_t) {
    const auto added = bias.defined() ? std::optional(bias) : std::nullopt;
    out = at::convolution(input, weight, added, stride, padding, dilation, transposed, output_padding, groups);
})
