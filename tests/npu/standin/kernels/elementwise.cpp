// One element in, one element out: arithmetic, comparisons, logic, bits, rounding, functions, activations.
#include "kernel.h"

using namespace standin;

#define UNARY(NAME, FUNCTION) KERNEL(NAME, [](Tensor self, Out out) { out = at::FUNCTION(self); })
#define UNARY_INPLACE(NAME, FUNCTION) KERNEL(Inplace##NAME, [](Out self) { self = at::FUNCTION(self.tensor); })
#define BOTH(NAME, FUNCTION) UNARY(NAME, FUNCTION) UNARY_INPLACE(NAME, FUNCTION)

UNARY(Abs, abs)
UNARY(Acosh, acosh)
UNARY(BitwiseNot, bitwise_not)
UNARY(Gelu, gelu)
UNARY(Hardsigmoid, hardsigmoid)
UNARY(Hardswish, hardswish)
UNARY(IsFinite, isfinite)
UNARY(IsNegInf, isneginf)
UNARY(IsPosInf, isposinf)
UNARY(Mish, mish)
UNARY(Neg, neg)
UNARY(Round, round)
UNARY(Sign, sign)
UNARY(Signbit, signbit)
UNARY(Silu, silu)
UNARY(Trunc, trunc)
BOTH(Acos, acos)
BOTH(Asin, asin)
BOTH(Asinh, asinh)
BOTH(Atan, atan)
BOTH(Atanh, atanh)
BOTH(Ceil, ceil)
BOTH(Cos, cos)
BOTH(Cosh, cosh)
BOTH(Erf, erf)
BOTH(Erfc, erfc)
BOTH(Erfinv, erfinv)
BOTH(Exp, exp)
BOTH(Exp2, exp2)
BOTH(Expm1, expm1)
BOTH(Floor, floor)
BOTH(Frac, frac)
BOTH(Log, log)
BOTH(Log10, log10)
BOTH(Log1p, log1p)
BOTH(Log2, log2)
BOTH(LogicalNot, logical_not)
BOTH(Reciprocal, reciprocal)
BOTH(Relu, relu)
BOTH(Rsqrt, rsqrt)
BOTH(Sigmoid, sigmoid)
BOTH(Sin, sin)
BOTH(Sinc, sinc)
BOTH(Sinh, sinh)
BOTH(Sqrt, sqrt)
BOTH(Tan, tan)
BOTH(Tanh, tanh)

// NAME on two tensors or on a tensor and a number, as the last parameter says, and the same in place.
#define APART(NAME, OTHER, FUNCTION) \
    KERNEL(NAME, [](Tensor self, OTHER other, Out out) { out = at::FUNCTION(self, other); })
#define BINARY(NAME, OTHER, FUNCTION) \
    APART(NAME, OTHER, FUNCTION)      \
    KERNEL(Inplace##NAME, [](Out self, OTHER other) { self = at::FUNCTION(self.tensor, other); })
#define BINARIES(NAME, FUNCTION) BINARY(NAME##Tensor, Tensor, FUNCTION) BINARY(NAME##Scalar, Scalar, FUNCTION)

APART(BitwiseOrScalar, Scalar, bitwise_or)
APART(BitwiseOrTensor, Tensor, bitwise_or)
APART(LeftShift, Tensor, bitwise_left_shift)
APART(LeftShifts, Scalar, bitwise_left_shift)
APART(LogAddExp, Tensor, logaddexp)
APART(LogicalXor, Tensor, logical_xor)
APART(Maximum, Tensor, maximum)
APART(Minimum, Tensor, minimum)
APART(RightShift, Tensor, bitwise_right_shift)
BINARIES(BitwiseAnd, bitwise_and)
BINARIES(BitwiseXor, bitwise_xor)
BINARIES(Eq, eq)
BINARIES(Fmod, fmod)
BINARIES(Ge, ge)
BINARIES(Gt, gt)
BINARIES(Le, le)
BINARIES(Lt, lt)
BINARIES(Ne, ne)
BINARY(Atan2, Tensor, atan2)
BINARY(Div, Tensor, div)
BINARY(Divs, Scalar, div)
BINARY(FloorDivide, Tensor, floor_divide)
BINARY(FloorDivides, Scalar, floor_divide)
BINARY(LogicalAnd, Tensor, logical_and)
BINARY(LogicalOr, Tensor, logical_or)
BINARY(Mul, Tensor, mul)
BINARY(Muls, Scalar, mul)
BINARY(PowTensorScalar, Scalar, pow)
BINARY(PowTensorTensor, Tensor, pow)
BINARY(RemainderTensorScalar, Scalar, remainder)
BINARY(RemainderTensorTensor, Tensor, remainder)
KERNEL(PowScalarTensor, [](Scalar self, Tensor exponent, Out out) { out = at::pow(self, exponent); })
KERNEL(RemainderScalarTensor, [](Scalar self, Tensor other, Out out) { out = at::remainder(self, other); })

// NAME with a factor for the second operand.
#define SUM(NAME, OTHER, FUNCTION)                                                                                     \
    KERNEL(NAME, [](Tensor self, OTHER other, Scalar alpha, Out out) { out = at::FUNCTION(self, other, alpha); })      \
    KERNEL(Inplace##NAME, [](Out self, OTHER other, Scalar alpha) { self = at::FUNCTION(self.tensor, other, alpha); })

SUM(Add, Tensor, add)
SUM(Adds, Scalar, add)
SUM(Sub, Tensor, sub)
SUM(Subs, Scalar, sub)
KERNEL(Rsub, [](Tensor self, Tensor other, Scalar alpha, Out out) { out = at::rsub(self, other, alpha); })
KERNEL(Rsubs, [](Tensor self, Scalar other, Scalar alpha, Out out) { out = at::rsub(self, other, alpha); })
namespace {
// The numbers that stand for rounding_mode in aclnnDivMod.
std::optional<std::string_view> rounding(int64_t mode) {
    if (mode == 1) return "trunc";
    if (mode == 2) return "floor";
    return std::nullopt;
}
}  // namespace

KERNEL(DivMod, [](Tensor self, Tensor other, int64_t mode, Out out) { out = at::div(self, other, rounding(mode)); })
KERNEL(DivMods, [](Tensor self, Scalar other, int64_t mode, Out out) { out = at::div(self, other, rounding(mode)); })
KERNEL(InplaceDivMod, [](Out self, Tensor other, int64_t mode) {
    self = at::div(self.tensor, other, rounding(mode));
})
KERNEL(InplaceDivMods, [](Out self, Scalar other, int64_t mode) {
    self = at::div(self.tensor, other, rounding(mode));
})

KERNEL(Clamp, [](Tensor self, MaybeScalar low, MaybeScalar high, Out out) { out = at::clamp(self, low, high); })
KERNEL(ClampMin, [](Tensor self, Scalar low, Out out) { out = at::clamp_min(self, low); })
KERNEL(ClampMax, [](Tensor self, Scalar high, Out out) { out = at::clamp_max(self, high); })
KERNEL(InplaceClampMax, [](Out self, Scalar high) { self = at::clamp_max(self.tensor, high); })
KERNEL(ClampTensor, [](Tensor self, Tensor low, Tensor high, Out out) { out = at::clamp(self, low, high); })
KERNEL(ClampMinTensor, [](Tensor self, Tensor low, Out out) { out = at::clamp_min(self, low); })
KERNEL(ClampMaxTensor, [](Tensor self, Tensor high, Out out) { out = at::clamp_max(self, high); })
KERNEL(InplaceClampMinTensor, [](Out self, Tensor low) { self = at::clamp_min(self.tensor, low); })
KERNEL(InplaceClampMaxTensor, [](Out self, Tensor high) { self = at::clamp_max(self.tensor, high); })

KERNEL(SWhere, [](Tensor condition, Tensor self, Tensor other, Out out) { out = at::where(condition, self, other); })
KERNEL(Equal, [](Tensor self, Tensor other, Out out) { out = at::scalar_tensor(at::equal(self, other), at::kBool); })
KERNEL(IsClose, [](Tensor self, Tensor other, double relative, double absolute, bool equal_nan, Out out) {
    out = at::isclose(self, other, relative, absolute, equal_nan);
})
KERNEL(NanToNum, [](Tensor self, float nan, float positive, float negative, Out out) {
    out = at::nan_to_num(self, nan, positive, negative);
})
KERNEL(Lerp, [](Tensor self, Tensor end, Tensor weight, Out out) { out = at::lerp(self, end, weight); })
KERNEL(Lerps, [](Tensor self, Tensor end, Scalar weight, Out out) { out = at::lerp(self, end, weight); })
KERNEL(Addcmul, [](Tensor self, Tensor one, Tensor two, Scalar value, Out out) {
    out = at::addcmul(self, one, two, value);
})
KERNEL(Addcdiv, [](Tensor self, Tensor one, Tensor two, Scalar value, Out out) {
    out = at::addcdiv(self, one, two, value);
})
KERNEL(InplaceAddcmul, [](Out self, Tensor one, Tensor two, Scalar value) {
    self = at::addcmul(self.tensor, one, two, value);
})
KERNEL(InplaceAddcdiv, [](Out self, Tensor one, Tensor two, Scalar value) {
    self = at::addcdiv(self.tensor, one, two, value);
})

KERNEL(Elu, [](Tensor self, Scalar alpha, Scalar scale, Scalar input_scale, Out out) {
    out = at::elu(self, alpha, scale, input_scale);
})
KERNEL(Hardtanh, [](Tensor self, Scalar low, Scalar high, Out out) { out = at::hardtanh(self, low, high); })
KERNEL(LeakyRelu, [](Tensor self, Scalar slope, Out out) { out = at::leaky_relu(self, slope); })
KERNEL(Softplus, [](Tensor self, Scalar beta, Scalar threshold, Out out) {
    out = at::softplus(self, beta, threshold);
})
KERNEL(Threshold, [](Tensor self, Scalar threshold, Scalar value, Out out) {
    out = at::threshold(self, threshold, value);
})
