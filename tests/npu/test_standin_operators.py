"""Operators on the stand-in's device: the same results as on the CPU, eagerly and in a graph."""

from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from torch.nn import functional

pytestmark = [  # what the wheel says once in a process
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning"),
]

HALVES, WHOLE = (torch.float16, torch.bfloat16), (torch.int64, torch.int32, torch.int16, torch.int8)
ANY: Final = """
a + b; a * b; a == b; a != b; a < b; a <= b; torch.where(m, a, b); a.sum(); a.sum(1); a[i]; a.index_select(0, i)
a.gather(1, g); a.index_copy_(0, d, b[:3]); a.__setitem__(d, b[:3]); a.t().contiguous(); a.clone(); a[1:, ::2].clone()
torch.cat((a, b)); torch.stack((a, b), 1); a.repeat(2, 1); a.flip(1); a.expand(2, 4, 6).clone(); a.to(torch.float32)
a.masked_fill_(m, 1); f.pad(a, (1, 2)); a.roll(1, 0); a.zero_(); a.fill_(1); torch.tril(a); torch.zeros_like(a)
_foreach_copy_([a, u], [b, u])
"""
NUMBERS: Final = """
3 - a; a - b; a / b; a * 3; a * 2.5; a // b; a % b; a % 4; a**2; torch.maximum(a, b); a.clamp(-2, 3); a.clamp_(min=1)
a > b; a >= 1; a.abs(); a.neg(); a.sign(); a.square(); a.logical_not(); a.max(); a.min(); a.max(1).values; a.amax(1)
a.amin((0, 1)); (a > 0).all(); (a > 5).any(0); a.sort(dim=1, stable=True); a.topk(3).values
a.repeat_interleave(2, dim=0)
a.masked_fill(m, 5); a.index_add_(0, d, b[:3]); a.add_(b); a.sub_(2); a.mul_(b); torch.full_like(a, 3); a.cumsum(1)
a.scatter(0, d[:, None].expand(3, 6), b[:3]); a.scatter_add(1, g, b[:, :3]); a.new_full((6,), 2) + a
a.index_fill_(0, i, 5)
torch.where(m, a, 0); a.clamp(min=b); torch.lerp(a.float(), b.float(), 0.25); torch.arange(1, 9, 2, device=a.device)
_foreach_add([a], [b]); _foreach_mul([a, b], 2); _foreach_add_([a], [b]); _foreach_maximum([a], [b])
"""
FLOATS: Final = """
a.ceil(); a.cos(); a.exp(); a.floor(); a.frac(); a.round(); b.rsqrt(); a.sigmoid(); a.sin(); b.sqrt(); a.tanh(); b.log()
b.reciprocal(); a.isfinite(); a.erf(); b.log2(); f.silu(a); f.relu(a); f.gelu(a); f.softplus(a); f.leaky_relu(a)
a.mean(-1, keepdim=True); torch.linalg.vector_norm(a, dim=1); a.logsumexp(1); a.softmax(-1); a.log_softmax(-1)
torch.addcmul(a, b, a, value=2); torch.addcdiv(a, b, b); f.embedding(i, a); f.layer_norm(a, (6,), b[0], b[1])
a @ b.t(); torch.addmm(b[:, :4], a, b.t()); torch.bmm(a[None], b.t()[None]); f.linear(a, b, b[0, :4]); a.exp_()
b.rsqrt_()
f.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]); torch.masked_fill(a, m, float("-inf"))
_foreach_exp([a, u]); _foreach_sqrt([b]); _foreach_div_([a], [b]); f.rms_norm(a, (6,), b[0])
"""
SINGLE: Final = """
u.acos(); u.asin(); u.atanh(); torch.atan2(a, b); torch.logaddexp(a, b); a.argmax(-1); a.argmin(1); a.max(1).indices
list(a.topk(3)); a.argsort(); a.var(1); a.std(1); list(torch.var_mean(a, 1)); a.norm(); a.nansum(1)
torch.nan_to_num(a / 0.0)
torch.searchsorted(s, a); torch.bucketize(a, s, right=True); f.conv2d(a[None, None], b[None, None, :2, :2])
a.cumprod(1)
torch.isclose(a, a); a.median(1).values; f.hardtanh(a); f.threshold(a, 0.5, 3); a.diff(dim=1)
"""
INTEGRAL: Final = """
(a & b) | ~(a ^ b); (a & 6) ^ 3; a.take(g); a.index_put_((i,), b[i], accumulate=True); a.bitwise_or_(b); a.prod(1)
(a > 0) ^ m; torch.logical_and(m, a > 0); m.all(1); torch.where(m, a, b).sum(1, dtype=torch.int32)
"""
ALONE: Final = """
a.nonzero(); torch.masked_select(a, m); a.__setitem__(m, 5); torch.tensor([torch.equal(a, a), torch.equal(a, b)])
a.repeat_interleave(i[:4], dim=0, output_size=int(i[:4].sum()))
"""
"""By the inputs of `made`; what no graph can hold comes last."""


def made(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Random inputs: `a` of any sign and `b` of one, `u` below 1, a mask, places, distinct places, an order."""
    torch.manual_seed(seed)
    values = [torch.randint(low, 10, (4, 6)).to(dtype) for low in (-9 if dtype.is_signed else 0, 1)]
    one, other = (value + torch.rand(4, 6).to(dtype) if dtype.is_floating_point else value for value in values)
    return {
        "a": one,
        "b": other,
        "u": torch.rand(4, 6),
        "m": torch.rand(4, 6) < 0.5,
        "i": torch.randint(0, 4, (5,)),
        "g": torch.randint(0, 6, (4, 3)),
        "d": torch.randperm(4)[:3],
        "s": torch.rand(7).sort().values * 9,
    }


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the device, in every second place of a larger tensor."""
    room = torch.empty((*tensor.shape, 2), dtype=tensor.dtype, device="npu")
    room[..., 1].copy_(tensor)
    return room[..., 1]


def results(expression: str, inputs: Mapping[str, torch.Tensor]) -> list[Any]:
    """What an expression gives, and what it leaves of its first input."""
    hidden = {name: getattr(torch, name) for name in dir(torch) if name.startswith("_foreach")}
    found = eval(expression, {"torch": torch, "f": functional, **hidden, **inputs})  # noqa: S307 - of the tables above
    return [*(found if isinstance(found, tuple | list) else [found]), inputs["a"]]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Types, shapes and numbers alike; rounded ones nearly: the wheel cuts some operators into others than the CPU."""
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one.cpu(), other, equal_nan=True)
        else:
            assert one == other


def cases(table: str, *dtypes: torch.dtype) -> list[Any]:
    """A case for each line and type: operators of one line are cheap, and named where they fail."""
    return [(one, dtype) for one in table.strip().splitlines() for dtype in dtypes]


IN_GRAPHS: Final = [
    *cases(ANY, torch.float32, torch.bool, torch.uint8, *HALVES, *WHOLE),
    *cases(NUMBERS, torch.float32, *HALVES, torch.int64, torch.int32),
    *cases(FLOATS, torch.float32, *HALVES),
    *cases(SINGLE, torch.float32),
    *cases(INTEGRAL, torch.int64, torch.int32),
]


@pytest.mark.modes("eager", "lazy")
@pytest.mark.parametrize(("line", "dtype"), [*IN_GRAPHS, *cases(ALONE, torch.float32, torch.int64)])
def test_operators(npu: Any, line: str, dtype: torch.dtype) -> None:
    """Operators give on the device what they give on the CPU, wherever their inputs lie, and in each replay.

    A replay reads what its inputs hold then, not what they held at capture; so does a stream that runs late.
    """
    for expression in line.split("; "):
        expected = results(expression, made(dtype, 0))
        inputs = {name: value.to("npu") for name, value in made(dtype, 0).items()}
        assert_same(results(expression, inputs), expected)
        assert_same(results(expression, {name: spread(value) for name, value in made(dtype, 0).items()}), expected)
        if (line, dtype) not in IN_GRAPHS:
            continue
        graph = npu.NPUGraph()
        with npu.graph(graph):
            found = results(expression, inputs)
        for seed in (1, 2):
            others = made(dtype, seed)
            for name, place in inputs.items():
                place.copy_(others[name])
            graph.replay()
            assert_same(found, results(expression, others))
