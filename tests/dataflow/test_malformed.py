"""Malformed batches: each is refused by an error that names the slot, and nothing is written."""

import functools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pytest
import torch

from slotgraph import BATCH, DecodeRunner, InputBuffers, Inputs, computed, copied
from slotgraph.backends import Backend, load
from slotgraph.errors import BatchError
from slotgraph.extend import Changed, Group, Ragged, fills
from tests.dataflow.test_ragged import FAULTS, PAGES, WIDTH

KINDS: Final = Group("full", "sliding")
pytestmark = pytest.mark.slotgraph_backends("cpu-capture", "cuda", "npu")


@fills("longest", "total")
def both_of(lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The longest request, and the lengths of all."""
    return lens.max().view(1), lens.sum().view(1)


class Mixed(Inputs):
    """A slot of each kind, of which each can be malformed."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, placement="host")
    scale: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1)
    grid: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int16, pad=0)
    tables: Mapping[str, torch.Tensor] = copied(BATCH, PAGES, dtype=torch.int32, pad=-1, ragged=True, group=KINDS)
    longest: torch.Tensor = computed(both_of, shape=1, dtype=torch.int32, again=("lens",))
    total: torch.Tensor = computed(both_of, shape=1, dtype=torch.int64, again=("lens",))
    most: int = 3


GOOD: Final[dict[str, Any]] = {
    "ids": [1, 2],
    "lens": [5, 6],
    "scale": [0.5, 2.0],
    "grid": [[1] * WIDTH, [2] * WIDTH],
    "tables": {"full": [[5], [6, 7]], "sliding": [[8, 9], []]},
}
HUGE: Final = 10**400
ROWS: Final[dict[str, Any]] = {  # in place of two numbers, or of two rows
    "nothing": None,
    "a text": "ab",
    "bytes": b"ab",
    "a number": 3,
    "a set": {1, 2},
    "a mapping": {0: 1, 1: 2},
    "a range": range(2),
    "an iterator": iter([1, 2]),
    "a function": len,
    "a type": int,
    "a list with nothing": [1, None],
    "a list with a text": [1, "b"],
    "a list with a bool": [True, 2],
    "a list with a complex number": [1, 2j],
    "a list with a huge number": [1, HUGE],
    "a list of sets": [{1}, {2}],
    "a list of three": [1, 2, 3],
    "a list of tensors": [torch.ones(2), torch.ones(2)],
    "nested too deep": [[[1]], [[2]]],
    "rows of two lengths": [[1], [2, 3]],
    "an array of texts": np.array(["a", "b"]),
    "an array of objects": np.array([1, None], dtype=object),
    "an array of complex numbers": np.array([1j, 2j]),
    "a masked array": np.ma.array([1, 2], mask=[True, False]),
    "an array of dates": np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]"),
    "an array of four dims": np.ones((1, 1, 1, 2), np.int16),
    "a tensor of no dims": torch.tensor(1),
    "a tensor of complex numbers": torch.tensor([1j, 2j]),
    "a tensor of bools": torch.tensor([True, False]),
    "a tensor on meta": torch.zeros(2, device="meta"),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a nested tensor": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "ragged rows": Ragged(np.array([1, 2, 3]), offsets=[0, 1, 3]),
    "changed rows": Changed([[1], [2, 3]], rows=[0]),
}
DENSE: Final = [(slot, what) for slot in ("ids", "lens", "scale", "grid") for what in ROWS]
MEMBERS: Final = [(member, what) for member in ("full", "sliding") for what in FAULTS]


@functools.cache
def refusing(name: str, lowering: str) -> tuple[DecodeRunner[Any], InputBuffers[Any]]:
    """A runner and buffers."""
    backend = load(name)()
    runner = DecodeRunner(
        Mixed,
        lambda view: view.ids + view.total,
        buckets=[4],
        sizes={PAGES: WIDTH},
        backend=backend,
        lowering=lowering,
        progress=False,
    )
    runner.capture()
    sizes = {BATCH: 4, PAGES: WIDTH}
    return runner, InputBuffers(Mixed, sizes, backend=backend, lowering=lowering)


def refused(backend: Backend, bad: dict[str, Any], says: str) -> None:
    """In calls and in buffers, whose slots keep the good batch, which fits again: by copies, and by the kernel."""
    for lowering in {"foreach", "in_graph"}.intersection(backend.capabilities.lowerings):
        runner, buffers = refusing(backend.name, lowering)
        runner(GOOD)
        buffers.fill(GOOD)
        memory = [buffer.tensor for own in (runner.graphs.buffers, buffers._layer.buffers) for buffer in own]
        before = [tensor.clone() for tensor in memory]
        for call in (runner, runner.fill, buffers.fill, buffers.fill_unpadded):
            with pytest.raises(BatchError, match=says):
                call(bad)
        for tensor, wanted in zip(memory, before, strict=True):
            assert torch.equal(tensor, wanted)
        assert runner(GOOD).tolist() == [12, 13]


@pytest.mark.parametrize(("slot", "what"), DENSE)
def test_a_dense_slot(backend: Backend, slot: str, what: str) -> None:
    """Of one number or of one row for each request, on the device or on the host, by any value."""
    refused(backend, {**GOOD, slot: ROWS[what]}, f"'{slot}'")


@pytest.mark.parametrize(("member", "what"), MEMBERS)
def test_a_member_of_a_group(backend: Backend, member: str, what: str) -> None:
    """By its own name, and the row."""
    pages, says = FAULTS[what]
    refused(backend, {**GOOD, "tables": {**GOOD["tables"], member: pages}}, f"slot 'tables.{member}': .*{says}")


@pytest.mark.parametrize("slot", GOOD)
@pytest.mark.parametrize("rows", [0, 1, 3, 5])
def test_another_number_of_rows(backend: Backend, slot: str, rows: int) -> None:
    """The error names the axis."""
    row: Any = {"grid": [1] * WIDTH, "tables": [1], "scale": 1.0}.get(slot, 1)
    value: Any = [row] * rows
    bad = {**GOOD, slot: {"full": value, "sliding": value} if slot == "tables" else value}
    refused(backend, bad, f"(BATCH|'{slot})")
