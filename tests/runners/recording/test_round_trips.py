"""What is replayed is what was brought: every kind of value, through a file, byte for byte."""

import functools
import pathlib
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import BATCH, EagerRunner, Inputs, copied
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import SlotGraphError
from slotgraph.runners.recording.records import RecordedFile, RecordedValue, plain_from_text, plain_to_text
from slotgraph.runners.recording.replaying import batch_of
from tests.strategies import HIDDEN, Round, declarations, rounds, same_bytes
from tests.strategies import batch_of as drawn_batch

KINDS = ("tensor", "array", "list")
END: Any = ["end"]


def as_kind(value: torch.Tensor, kind: str) -> Any:
    """A tensor's values in another kind of box; the tensor itself where that kind does not hold its dtype."""
    if kind == "array" and value.dtype != torch.bfloat16:
        return value.numpy()
    if kind == "list" and value.dtype in (torch.int64, torch.float64, torch.bool) and value.dim():
        return value.tolist()
    return value


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are of the same kind and hold the same bytes."""
    if isinstance(one, torch.Tensor):
        mine, theirs = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (one, other))
        return same_bytes(mine, theirs)
    if isinstance(one, np.ndarray):
        facts = [(array.dtype, array.shape, array.tobytes()) for array in (one, np.asarray(other))]
        return isinstance(other, np.ndarray) and facts[0] == facts[1]
    return type(one) is type(other) and repr(one) == repr(other)


@settings(max_examples=60)
@given(data=st.data())
def test_any_declaration(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Random declarations and batches of any size, absent slots, layouts and holders come back as they were brought."""
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    inputs: type[Inputs] = data.draw(declarations())
    capacity = {axis: data.draw(st.integers(0, 5)) for axis in inputs.slotgraph.varying} | {HIDDEN: 4}
    turn: Round = data.draw(rounds(inputs, capacity))
    batch, side = drawn_batch(inputs, Capabilities(), turn)
    sources = inputs.slotgraph.sources
    plain = {n: s.read(batch, side) for n, s in sources.items() if n not in turn.absent}
    changed = {n: as_kind(value, data.draw(st.sampled_from(KINDS))) for n, value in plain.items()}
    batch, side = drawn_batch(inputs, Capabilities(), turn, changed)
    fixed = {HIDDEN: 4} if HIDDEN in inputs.slotgraph.axes else {}
    runner = EagerRunner(inputs, lambda view: vars(view)["tag"], backend="cpu", sizes=fixed)
    with slotgraph.record(runner, file, last=1):
        try:
            runner(batch, **side)
        except SlotGraphError:  # no number of an axis that the drawn slots bear: recorded as it was refused
            assert RecordedFile.read(file).steps[0].raised is not None
    step = RecordedFile.read(file).steps[0]
    sample = batch_of(step, runner.stage)
    for name, source in sources.items():
        wanted = None if name in turn.absent else source.read(batch, side)
        assert same_value(wanted, source.read(sample.batch, sample.side)), name
    assert step.absent == tuple(n for n in sources if n in turn.absent)
    assert sample.batch["tag"] == turn.seed % 7


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)], ids=str)
def test_dtypes(tmp_path: pathlib.Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every dtype of a batch comes back, of no rows and of no dims too; whether a slot can hold it or not."""

    class Any1(Inputs):
        rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        value: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0)

    value = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    value = (value % 2).bool()[..., 0] if dtype == torch.bool else value.view(dtype)[..., 0].contiguous()
    runner = EagerRunner(Any1, lambda view: view.rows, backend="cpu")
    with slotgraph.record(runner, tmp_path / "one.safetensors"), pytest.raises(SlotGraphError):
        runner({"rows": [1], "value": value})
    found = batch_of(RecordedFile.read(tmp_path / "one.safetensors").steps[0], runner.stage)
    assert same_bytes(found.batch["value"], value)


plain_leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
plain_values = st.recursive(
    plain_leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner), max_leaves=12
)


@given(plain_values)
def test_plain_data(value: object) -> None:
    """Plain data comes back equal and of the same types, infinity among it; a tuple as a list."""
    assert repr(plain_from_text(plain_to_text(value))) == repr(value)
    assert plain_from_text(plain_to_text((1, np.float32(0.5)))) == [1, 0.5]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "builtins.object"),
        (types.SimpleNamespace(a=1), "SimpleNamespace"),
        ({frozenset([1]): 2}, "keys must be"),
        ({1, 2}, "builtins.set"),
        (b"bytes", "builtins.bytes"),
        (1j, "complex"),
        (functools.reduce(lambda inner, _: [inner], range(100_000), END), "recursion"),
        (functools.reduce(lambda inner, _: [inner, inner], range(20), END), "more than 4,194,304 letters"),
        (1 << 20_000, "4300 digits"),
        (torch.float32, "torch.dtype"),
        (np.array(["text"]), "numpy.str_"),
        (np.array([1], dtype=">i4"), "byte order"),
        (torch.empty(2, device="meta"), "tensor of torch.float32 on meta"),
        (torch.eye(2).to_sparse(), "a torch.sparse_coo tensor"),
        (torch.ones(2, dtype=torch.complex64), "a torch.strided tensor of torch.complex64"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 else "",
)
def test_what_cannot_be_kept(value: object, why: str) -> None:
    """What is no data is left out, and the record says what it was; nothing raises."""
    found = RecordedValue.of("x", value, torch.device("cpu"))
    assert (found.name, found.kind, found.data, found.elements) == ("x", "other", "", None)
    assert why in found.why
