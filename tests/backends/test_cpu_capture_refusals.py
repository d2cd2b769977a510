"""What cpu-capture refuses and lets pass: as seen in CUDA captures (torch 2.11, H200), unless a line says otherwise."""

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional

from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.dataflow.errors import CaptureError

HIDDEN: Any = torch  # what is not exported, or typed more narrowly than it is
Case = Callable[["Tensors"], Any]


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


REFUSED: dict[str, Case] = {
    "item": lambda t: t.x[0, 0].item(),
    "tolist": lambda t: t.x.tolist(),
    "numpy": lambda t: t.x.numpy(),
    "__array__": lambda t: np.asarray(t.x),
    "cpu": lambda t: t.x.cpu(),
    "to": lambda t: t.x.to("cpu"),
    "to by keyword": lambda t: t.x.to(device="cpu", dtype=torch.float64),
    "__bool__": lambda t: 1 if t.scalar else 2,
    "__int__": lambda t: int(t.one),
    "__float__": lambda t: float(t.scalar),
    "__complex__": lambda t: complex(t.scalar),
    "__index__": lambda t: range(cast("int", t.one)),
    "__format__": lambda t: f"{t.x}",
    "__repr__": lambda t: repr(t.x),
    "contains": lambda t: 3 in t.x,
    "a tensor as a size": lambda t: HIDDEN.zeros(t.one),
    "a tensor as a slice": lambda t: t.x[: t.one],
    "a 0-dim index": lambda t: t.x[t.one],
    "a tensor as a number": lambda t: HIDDEN.full((3,), t.scalar),
    "is_nonzero": lambda t: torch.is_nonzero(t.scalar),
    "allclose": lambda t: torch.allclose(t.x, t.y),
    "equal": lambda t: torch.equal(t.x, t.y),
    "nonzero": lambda t: t.mask.nonzero(),
    "argwhere": lambda t: torch.argwhere(t.mask),
    "where with one argument": lambda t: torch.where(t.mask),
    "masked_select": lambda t: t.x.masked_select(t.mask),
    "a mask as an index": lambda t: t.x[t.mask],
    "a row mask as an index": lambda t: t.x[t.mask[0]],
    "unique": lambda t: torch.unique(t.index),
    "unique_consecutive": lambda t: torch.unique_consecutive(t.index),
    "bincount": lambda t: torch.bincount(t.index, minlength=6),
    "histc without a range": lambda t: torch.histc(t.x, 4),
    "repeat_interleave without a size": lambda t: torch.repeat_interleave(t.x, t.count, dim=0),
    "one_hot without classes": lambda t: functional.one_hot(t.index),
    "torch.tensor on the device": lambda t: torch.tensor(2.0, device=t.x.device),
    "torch.tensor of a list": lambda _: torch.tensor([1.0, 2.0]),
    "torch.as_tensor": lambda t: torch.as_tensor(2.0, device=t.x.device),
    "new_tensor": lambda t: t.x.new_tensor([1.0]),
    "from_numpy": lambda _: torch.from_numpy(np.ones(3)) + 1,  # on CUDA its use is refused
    "a list as an index": lambda t: t.x[[0, 2]],
    "a number to one element": lambda t: t.x.__setitem__((0, 0), 1.0),
    "a number by indices": lambda t: t.x.__setitem__(t.index, 1.0),
    "a tensor by a mask": lambda t: t.x.__setitem__(t.mask, t.scalar),
    "a row by a mask": lambda t: t.x.__setitem__(t.mask[0], t.row),
    "masked_fill_ with a tensor": lambda t: t.x.masked_fill_(t.mask, t.scalar),
    "index_fill_ with a tensor": lambda t: t.x.index_fill_(0, t.index, t.scalar),
    "normal with tensors": lambda t: torch.normal(t.x, t.p),
    "isin with many": lambda t: torch.isin(t.index, torch.arange(100)),
    "cholesky": lambda t: torch.linalg.cholesky(t.square @ t.square.T),
    "inv": lambda t: torch.linalg.inv(t.square),
    "solve": lambda t: torch.linalg.solve(t.square, t.x),
    "svd": lambda t: torch.linalg.svd(t.square),
    "eigh": lambda t: torch.linalg.eigh(t.square),
    "eig": lambda t: torch.linalg.eig(t.square),
    "lstsq": lambda t: torch.linalg.lstsq(t.square, t.x),
    "pinv": lambda t: torch.linalg.pinv(t.square),
    "matrix_exp": lambda t: torch.linalg.matrix_exp(t.square),
    "another generator": lambda _: torch.rand(3, generator=torch.Generator()),
    "sparse": lambda t: t.x.to_sparse(),
    # From here on CUDA captures what this backend refuses, because it moves addresses, or is not recorded here.
    "resize_": lambda t: t.x.clone().resize_(2),
    "set_": lambda t: cast("Any", t.x).set_(t.y),
    "Tensor.data": lambda t: setattr(t.x, "data", t.y),
    "storage().resize_": lambda t: (t.x + 1, t.x.untyped_storage().resize_(4096)),
    "out= of another size": lambda t: torch.add(t.x, t.y, out=torch.empty(0)),
    "deepcopy": lambda t: copy.deepcopy(t.x),
    "backward": lambda t: cast("Any", t.x.sum()).backward(),
    "autograd.grad": lambda t: torch.autograd.grad(t.x.sum(), t.x),
    "a write into a constant": lambda t: torch.tensor(1.0).add_(t.scalar),
    "quantized": lambda _: HIDDEN._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """The capture fails with the operation and what to do instead, and the step's tensors keep their bytes."""
    tensors = Tensors()
    before = {key: value.clone() for key, value in vars(tensors).items()}
    with pytest.raises(CaptureError, match=r"a captured step cannot use .+: \w+"):
        CpuCaptureBackend().capture(lambda: REFUSED[name](tensors))
    for key, value in before.items():
        assert torch.equal(getattr(tensors, key), value)


def test_a_refusal_names_the_operation_and_the_way_out() -> None:
    """The message is one that a reader can act on."""
    value = torch.randn(4)
    with pytest.raises(CaptureError, match=r"cannot use Tensor\.item: keep the value on the device \(torch\.where"):
        CpuCaptureBackend().capture(value[0].item)
    with pytest.raises(CaptureError, match=r"cannot use aten\.index\.Tensor: its shape depends on values"):
        CpuCaptureBackend().capture(lambda: value[value > 0])
