"""What cpu-capture refuses and lets pass: as seen in CUDA captures (torch 2.11, H200), unless a line says otherwise."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.dataflow.errors import CaptureError

HIDDEN: Any = torch  # what is not exported, or typed more narrowly than it is


class Tensors:
    """What the cases work on; all of it random, some of it with structure."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.x, self.y, self.p = torch.randn(4, 4), torch.randn(4, 4), torch.rand(4, 4) * 0.8 + 0.1
        self.row, self.scalar = torch.randn(4), torch.rand(())
        self.mask = torch.rand(4, 4) > 0.5
        self.mask[0, 0], self.mask[0, 1] = True, False
        self.index, self.count, self.one = torch.randperm(4), torch.full((4,), 2), torch.tensor(1)
        self.square = torch.randn(4, 4) + 6 * torch.eye(4)
        self.heads = torch.randn(2, 2, 4, 4)


REFUSED = """
x[0, 0].item(); x.tolist(); x.numpy(); np.asarray(x); x.cpu(); x.to("cpu"); x.to(device="cpu", dtype=torch.float64)
1 if scalar else 2; int(one); float(scalar); complex(scalar); range(one); f"{x}"; repr(x); 3 in x; torch.zeros(one)
x[:one]; x[one]; torch.full((3,), scalar); torch.is_nonzero(scalar); torch.allclose(x, y); torch.equal(x, x)
mask.nonzero(); torch.argwhere(mask); torch.where(mask); x.masked_select(mask); x[mask]; x[mask[0]]
torch.unique(index); torch.unique_consecutive(index); torch.bincount(index, minlength=6); torch.histc(x, 4)
torch.repeat_interleave(x, count, dim=0); functional.one_hot(index); torch.tensor(2.0, device=x.device)
torch.tensor([1.0, 2.0]); torch.as_tensor(2.0, device=x.device); x.new_tensor([1.0]); torch.from_numpy(np.ones(3)) + 1
x[[0, 2]]; x.__setitem__((0, 0), 1.0); x.__setitem__(index, 1.0); x.__setitem__(mask, scalar)
x.__setitem__(mask[0], row); x.masked_fill_(mask, scalar); x.index_fill_(0, index, scalar)
torch.linalg.cholesky(square @ square.T); torch.linalg.inv(square)
torch.linalg.solve(square, x); torch.linalg.svd(square); torch.linalg.eigh(square); torch.linalg.eig(square)
torch.linalg.lstsq(square, x); torch.linalg.pinv(square); torch.linalg.matrix_exp(square)
torch.rand(3, generator=torch.Generator()); x.to_sparse()
"""
MOVED = """
x.clone().resize_(2); x.set_(y); setattr(x, "data", y); (x + 1, x.untyped_storage().resize_(4096))
torch.add(x, y, out=torch.empty(0)); copy.deepcopy(x); x.sum().backward(); torch.autograd.grad(x.sum(), x)
torch.tensor(1.0).add_(scalar); torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)
"""
"""What CUDA captures and this backend refuses, because it moves addresses, or is not recorded here."""


def cases(table: str) -> list[str]:
    """The expressions of a table."""
    return table.strip().replace("\n", "; ").split("; ")


def value_of(expression: str, tensors: Tensors, **names: Any) -> Any:
    """What an expression gives, of tensors by their names."""
    return eval(expression, {"torch": torch, "functional": functional, **names, **vars(tensors)})  # noqa: S307 - ours


@pytest.mark.parametrize("expression", cases(REFUSED) + cases(MOVED))
def test_refused(expression: str) -> None:
    """The capture fails with the operation and what to do instead, and the step's tensors keep their bytes."""
    tensors = Tensors()
    before = {key: value.clone() for key, value in vars(tensors).items()}
    with pytest.raises(CaptureError, match=r"a captured step cannot use .+: \w+"):
        CpuCaptureBackend().capture(lambda: value_of(expression, tensors, np=np, copy=copy))
    for key, value in before.items():
        assert torch.equal(getattr(tensors, key), value)


def test_a_refusal_names_the_operation_and_the_way_out() -> None:
    """The message is one that a reader can act on."""
    value = torch.randn(4)
    with pytest.raises(CaptureError, match=r"cannot use Tensor\.item: keep the value on the device \(torch\.where"):
        CpuCaptureBackend().capture(value[0].item)
    with pytest.raises(CaptureError, match=r"cannot use aten\.index\.Tensor: its shape depends on values"):
        CpuCaptureBackend().capture(lambda: value[value > 0])
