"""Operators that make one element of each: arithmetic, functions, comparisons, and the same on lists of tensors."""

from typing import Any

import torch
from torch.nn import functional

from tests.npu.operators import (
    ALL,
    FLOATS,
    NUMBERS,
    WHOLE,
    A,
    B,
    foreach,
    into,
    mask,
    named,
    op,
    places,
    positive,
    values,
)

HIDDEN: Any = torch  # type checkers do not see its operators on lists

ONE = [torch.float32]
SMALL_POSITIVE = values(4, 6, low=0, high=1)

ARITHMETIC = [
    op("add", torch.add, A, B, dtypes=ALL),
    op("add_broadcast", torch.add, A, values(6), dtypes=NUMBERS),
    op("add_alpha", lambda a, b: torch.add(a, b, alpha=2), A, B),
    op("add_number", lambda a: a + 3, A, dtypes=NUMBERS),
    op("add_", into(lambda a, b: a.add_(b)), A, B, dtypes=NUMBERS),
    op("add_number_", into(lambda a: a.add_(2)), A),
    op("number_minus", lambda a: 3 - a, A, dtypes=NUMBERS),
    op("sub", torch.sub, A, B, dtypes=NUMBERS),
    op("sub_number", lambda a: a - 2, A),
    op("sub_", into(lambda a, b: a.sub_(b)), A, B),
    op("mul", torch.mul, A, B, dtypes=ALL),
    op("mul_number", lambda a: a * 3, A, dtypes=NUMBERS),
    op("mul_number_float", lambda a: a * 2.5, A, dtypes=NUMBERS),
    op("mul_", into(lambda a, b: a.mul_(b)), A, B),
    op("mixed_types", lambda a, i: a * i + i, A, places(4, 6, below=9, dtype=torch.int32), dtypes=NUMBERS),
    op("div", torch.div, A, B, dtypes=NUMBERS),
    op("div_number", lambda a: a / 4, A, dtypes=NUMBERS),
    op("div_", into(lambda a, b: a.div_(b)), A, B, dtypes=FLOATS),
    op("div_floor", lambda a, b: torch.div(a, b, rounding_mode="floor"), A, B),
    op("div_trunc", lambda a: torch.div(a, 4, rounding_mode="trunc"), A),
    op("floor_divide", lambda a, b: a // b, A, B, dtypes=NUMBERS),
    op("floor_divide_number", lambda a: a // 3, A, dtypes=NUMBERS),
    op("remainder", lambda a, b: a % b, A, B, dtypes=NUMBERS),
    op("remainder_number", lambda a: a % 4, A, dtypes=NUMBERS),
    op("remainder_number_", into(lambda a: a.remainder_(4)), A),
    op("number_remainder", lambda b: torch.remainder(7, b), B),
    op("fmod", torch.fmod, A, B),
    op("fmod_number", lambda a: torch.fmod(a, 4), A),
    op("pow", torch.pow, B, values(4, 6, low=0, high=3)),
    op("pow_number", lambda a: a**2, A, dtypes=NUMBERS),
    op("number_pow", lambda a: 2**a, values(4, 6, low=0, high=5)),
    op("maximum", torch.maximum, A, B, dtypes=NUMBERS),
    op("minimum", torch.minimum, A, B, dtypes=NUMBERS),
    op("clamp", lambda a: a.clamp(-2, 3), A, dtypes=NUMBERS),
    op("clamp_", into(lambda a: a.clamp_(-2, 3)), A, dtypes=NUMBERS),
    op("clamp_min", lambda a: a.clamp(min=1), A, dtypes=NUMBERS),
    op("clamp_max", lambda a: a.clamp(max=1), A, dtypes=NUMBERS),
    op("clamp_tensors", torch.clamp, A, values(4, 6, high=0), B),
    op("clamp_min_tensor", lambda a, b: a.clamp(min=b), A, B),
    op("clamp_max_tensor", lambda a, b: a.clamp(max=b), A, B),
    op("lerp", torch.lerp, A, B, A, dtypes=FLOATS),
    op("lerp_number", lambda a, b: torch.lerp(a, b, 0.25), A, B, dtypes=FLOATS),
    op("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=2), A, B, A, dtypes=FLOATS),
    op("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=2), A, B, B, dtypes=FLOATS),
    *(
        op(call.__name__, call, SMALL_POSITIVE, dtypes=ONE)
        for call in (torch.acos, torch.asin, torch.atanh, torch.erfinv)
    ),
    op("logaddexp", torch.logaddexp, A, B, dtypes=FLOATS),
    op("rsub", torch.rsub, A, B),
    op("atan2", torch.atan2, A, B, dtypes=FLOATS),
]

UNARY_FLOAT = named(
    torch,
    """
    ceil cos cosh erf erfc exp exp2 expm1 floor frac round rsqrt sigmoid sin sinh sqrt tan tanh trunc reciprocal
    log log10 log1p log2 asinh acosh atan sinc isneginf isposinf signbit isfinite isnan isinf
    """,
)
UNARY_ANY: list[Any] = [torch.abs, torch.neg, torch.sign, torch.square]
ACTIVATIONS = named(functional, "silu relu gelu mish hardswish hardsigmoid softplus leaky_relu elu")

INPLACE = named(
    torch.Tensor,
    """
    abs_ acos_ asin_ asinh_ atan_ atanh_ ceil_ cos_ cosh_ erf_ erfc_ erfinv_ exp_ exp2_ expm1_ floor_ frac_ log_
    log10_ log1p_ log2_ reciprocal_ relu_ rsqrt_ sigmoid_ sin_ sinc_ sinh_ sqrt_ tan_ tanh_
    """,
)
BINARY_INPLACE = named(
    torch.Tensor, "atan2_ clamp_min_ clamp_max_ eq_ floor_divide_ fmod_ ge_ gt_ le_ lt_ ne_ pow_ remainder_"
)
NUMBER_INPLACE: list[Any] = [call for call in BINARY_INPLACE if call is not torch.Tensor.atan2_]
BITS_INPLACE: list[Any] = [torch.Tensor.bitwise_and_, torch.Tensor.bitwise_or_, torch.Tensor.bitwise_xor_]
MASKS_INPLACE: list[Any] = [torch.Tensor.logical_and_, torch.Tensor.logical_or_, torch.Tensor.logical_xor_]
UNARY = [
    *(op(call.__name__, call, positive(4, 6), dtypes=FLOATS) for call in UNARY_FLOAT),
    *(op(call.__name__, call, A, dtypes=NUMBERS) for call in UNARY_ANY),
    *(op(call.__name__, call, A, dtypes=FLOATS) for call in ACTIVATIONS),
    *(op(call.__name__, into(call), SMALL_POSITIVE, dtypes=ONE) for call in INPLACE),
    *(op(call.__name__, into(call), A, B, dtypes=ONE) for call in BINARY_INPLACE),
    *(op(f"{call.__name__}with_number", into(lambda a, f=call: f(a, 2)), A, dtypes=ONE) for call in NUMBER_INPLACE),
    *(op(call.__name__, into(call), A, B, dtypes=[torch.int64, torch.bool]) for call in BITS_INPLACE),
    *(
        op(f"{call.__name__}with_number", into(lambda a, f=call: f(a, 6)), A, dtypes=[torch.int64])
        for call in BITS_INPLACE
    ),
    *(op(call.__name__, into(call), mask(4, 6), mask(4, 6)) for call in MASKS_INPLACE),
    op("div_number_", into(lambda a: a.div_(4)), A, dtypes=ONE),
    op("div_floor_", into(lambda a, b: a.div_(b, rounding_mode="floor")), A, B),
    op("div_floor_number_", into(lambda a: a.div_(4, rounding_mode="floor")), A),
    op("mul_number_", into(lambda a: a.mul_(3)), A),
    op("sub_number_", into(lambda a: a.sub_(3)), A),
    op("addcmul_", into(lambda a, b, c: a.addcmul_(b, c)), A, B, A, dtypes=ONE),
    op("addcdiv_", into(lambda a, b, c: a.addcdiv_(b, c)), A, B, B, dtypes=ONE),
    op("hardtanh", functional.hardtanh, A, dtypes=FLOATS),
    op("threshold", lambda a: functional.threshold(a, 0.5, 3), A, dtypes=FLOATS),
    op("exp_of_whole", torch.exp, values(4, 6, high=3), dtypes=[torch.int64]),
    op("sqrt_of_whole", torch.sqrt, B, dtypes=[torch.int64]),
    op("nan_to_num", lambda a: torch.nan_to_num(a / 0.0, nan=1.0), A, dtypes=ONE),
]

COMPARISONS = [
    *(op(name, getattr(torch, name), A, values(4, 6, low=-2, high=3), dtypes=ALL) for name in ("eq", "ne", "lt", "le")),
    *(op(name, getattr(torch, name), A, B, dtypes=NUMBERS) for name in ("gt", "ge")),
    op("eq_number", lambda a: a == 1, A, dtypes=ALL),
    op("ne_number", lambda a: a != 1, A, dtypes=NUMBERS),
    op("lt_number", lambda a: a < 1, A, dtypes=NUMBERS),
    op("le_number", lambda a: a <= 1, A, dtypes=NUMBERS),
    op("gt_number", lambda a: a > 1, A, dtypes=NUMBERS),
    op("ge_number", lambda a: a >= 1, A, dtypes=NUMBERS),
    op("isclose", torch.isclose, A, A, dtypes=ONE),
    op("where", torch.where, mask(4, 6), A, B, dtypes=ALL),
    op("where_number", lambda m, a: torch.where(m, a, 0), mask(4, 6), A, dtypes=NUMBERS),
    op("where_mask_is_kept", lambda a, b: torch.where(a > b, a, b), A, B, dtypes=NUMBERS),
    *(op(name, getattr(torch, name), mask(4, 6), mask(4, 6)) for name in ("logical_and", "logical_or", "logical_xor")),
    op("logical_not", torch.logical_not, A, dtypes=NUMBERS),
    op("logical_not_", into(lambda a: a.logical_not_()), mask(4, 6)),
    op("masks", lambda a, b: (a & b) | ~(a ^ b), mask(4, 6), mask(4, 6)),
    op("bits", lambda a, b: (a & b) | ~(a ^ b), A, B, dtypes=WHOLE),
    op("bits_number", lambda a: ((a & 6) | 1) ^ 3, A, dtypes=WHOLE),
    op("shift_tensor", lambda a, b: (a << b) >> b, B, positive(4, 6), dtypes=[torch.int64, torch.int32]),
    op("shift", lambda a: (a << 2) >> 1, B, dtypes=[torch.int64, torch.int32]),
    op("equal", lambda a, b: torch.tensor([torch.equal(a, b), torch.equal(a, a)]), A, B, dtypes=ALL, graph=False),
    op("allclose", lambda a, b: torch.tensor([torch.allclose(a, b)]), A, B, dtypes=ONE, graph=False),
]

EACH = named(
    HIDDEN,
    """
    _foreach_abs _foreach_cos _foreach_exp _foreach_neg _foreach_reciprocal _foreach_sigmoid _foreach_sign
    _foreach_sin _foreach_tanh _foreach_log _foreach_sqrt
    """,
)
PAIRS = named(
    HIDDEN, "_foreach_add _foreach_div _foreach_maximum _foreach_minimum _foreach_mul _foreach_pow _foreach_sub"
)
LISTS = [
    *(op(call.__name__, lambda *t, f=call: f(t), B, positive(5), dtypes=FLOATS) for call in EACH),
    *(
        op(call.__name__, lambda *t, f=call: f(t[:2], t[2:]), B, positive(5), B, positive(5), dtypes=NUMBERS)
        for call in PAIRS
    ),
    *(op(f"{call.__name__}_number", lambda *t, f=call: f(t, 2), B, positive(5), dtypes=FLOATS) for call in PAIRS),
    *(op(f"{call.__name__}_numbers", lambda *t, f=call: f(t, [2, 3]), B, positive(5)) for call in PAIRS),
    op("foreach_copy_", foreach(HIDDEN._foreach_copy_), A, values(5), B, values(5), dtypes=ALL),
    op("foreach_zero_", foreach(lambda a, _: HIDDEN._foreach_zero_(a)), A, values(5), A, values(5), dtypes=NUMBERS),
    op("foreach_add_", foreach(HIDDEN._foreach_add_), A, values(5), B, values(5), dtypes=NUMBERS),
    op("foreach_add_number_", foreach(lambda a, _: HIDDEN._foreach_add_(a, 2)), A, values(5), A, A, dtypes=NUMBERS),
    op("foreach_sub_", foreach(HIDDEN._foreach_sub_), A, values(5), B, values(5), dtypes=NUMBERS),
    op("foreach_mul_number_", foreach(lambda a, _: HIDDEN._foreach_mul_(a, 2)), A, values(5), A, A, dtypes=NUMBERS),
    op("foreach_div_", foreach(HIDDEN._foreach_div_), A, values(5), B, positive(5), dtypes=FLOATS),
]
