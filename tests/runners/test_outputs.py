"""Outputs: views of the live rows in whatever structure the step returned, refused where rows do not follow."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, Inputs, copied, output
from slotgraph.dataflow.axes import Dim
from slotgraph.dataflow.errors import CaptureError, ConfigError

WIDTH = 3


class TokenInputs(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-5)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-9)


class Pair(NamedTuple):
    token: torch.Tensor
    request: torch.Tensor | None


class Named(OrderedDict[str, Any]):
    """As transformers has them: a mapping whose keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        """A key as an attribute."""
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@attrs.define
class Parcel:
    token: torch.Tensor


@dataclasses.dataclass(frozen=True)
class DataParcel:
    token: torch.Tensor


class PlainParcel:
    def __init__(self, token: torch.Tensor) -> None:
        self.token = token


def batch_of(requests: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    """Random requests of `width` tokens each."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(1, 99, (requests * width,), generator=draw),
        "lens": torch.randint(1, 99, (requests,), generator=draw),
    }


def runner_of(
    step: Callable[[TokenInputs], Any], backend: str, width: int = 1, **more: Any
) -> DecodeRunner[TokenInputs]:
    """A captured runner for 4 and 8 requests."""
    runner = DecodeRunner(TokenInputs, step, buckets=[4, 8], backend=backend, width=width, **more)
    runner.capture()
    return runner


def flat(outputs: Any) -> list[Any]:
    """The leaves of lists, tuples and mappings, in order."""
    if isinstance(outputs, dict):
        return [leaf for value in outputs.values() for leaf in flat(value)]
    if isinstance(outputs, list | tuple):
        return [leaf for value in outputs for leaf in flat(value)]
    return [outputs]


STRUCTURES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], type]] = {
    "tensor": (lambda one, _: one, torch.Tensor),
    "tuple": (lambda one, two: (one, two), tuple),
    "list": (lambda one, two: [two, one, two], list),
    "dict": (lambda one, two: {"one": one, "two": {"nested": [two]}}, dict),
    "namedtuple": (Pair, Pair),
    "namedtuple with nothing": (lambda one, _: Pair(one, None), Pair),
    "with values": (lambda one, two: {"name": "x", "count": 3, "none": None, "rows": (one, two)}, dict),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_live_rows_of_a_structure(cpu: str, kind: str) -> None:
    """Each tensor of a structure comes with its live rows, on every path; the structure and all else stay."""
    make, wanted = STRUCTURES[kind]
    runner = runner_of(lambda view: make(view.ids * 2, view.lens[:, None] + 1), cpu)
    for requests in (3, 8, 1, 20, 4, 3, 0):
        batch = batch_of(requests, 1, seed=requests)
        outputs = runner(batch)
        assert isinstance(outputs, wanted)
        for got, answer in zip(flat(outputs), flat(make(batch["ids"] * 2, batch["lens"][:, None] + 1)), strict=True):
            assert torch.equal(got, answer) if isinstance(answer, torch.Tensor) else got == answer


@pytest.mark.parametrize("requests", [3, 20], ids=["graph", "eager"])
def test_mapping_of_its_own_kind(cpu: str, requests: int) -> None:
    """A mapping that is more than a dict has its live rows, its kind and its attributes on both paths."""
    runner = runner_of(lambda view: Named(logits=view.ids * 2), cpu)
    batch = batch_of(requests, 1, seed=1)
    outputs = runner(batch)
    assert torch.equal(outputs["logits"], batch["ids"] * 2)
    assert isinstance(outputs, Named)


@pytest.mark.parametrize(
    "kind",
    [
        Parcel,
        DataParcel,
        PlainParcel,
    ],
)
def test_object_that_holds_tensors(cpu: str, kind: Callable[[torch.Tensor], Any]) -> None:
    """An object that holds tensors has live rows too, or is refused at capture: never padded rows."""
    runner = DecodeRunner(TokenInputs, lambda view: kind(view.ids * 2), buckets=[4, 8], backend=cpu)
    try:
        runner.capture()
    except CaptureError as error:
        assert "Parcel" in str(error)  # noqa: PT017 - one of two good answers
        return
    for requests in (3, 8, 20):
        batch = batch_of(requests, 1, seed=2)
        assert torch.equal(runner(batch).token, batch["ids"] * 2)


AXES: list[Any] = [
    pytest.param(TOKENS, lambda view: view.ids * 2, id="TOKENS"),
    pytest.param(BATCH, lambda view: view.lens * 2, id="BATCH"),
]


@pytest.mark.parametrize(("axis", "step"), AXES)
def test_rows_follow_their_axis(cpu: str, axis: Axis, step: Callable[[Any], torch.Tensor]) -> None:
    """With several tokens a request, rows follow TOKENS or BATCH as it was said."""
    runner = runner_of(step, cpu, WIDTH, output_rows=axis)
    for requests in (3, 8, 2, 9):
        batch = batch_of(requests, WIDTH, seed=requests)
        assert torch.equal(runner(batch), batch["ids" if axis == TOKENS else "lens"] * 2)


def test_whole_outputs(cpu: str) -> None:
    """With None, outputs come whole: padded rows, shapes that follow no axis, and numbers without a dim."""
    runner = runner_of(lambda view: (view.ids * 2, view.lens.sum(), view.ids[:2]), cpu, output_rows=None)
    batch = batch_of(3, 1, seed=3)
    rows, total, two = runner(batch)
    assert rows.tolist() == [*(batch["ids"] * 2).tolist(), -10]
    assert int(total) == int(batch["lens"].sum()) - 9
    assert torch.equal(two, batch["ids"][:2])


@pytest.mark.parametrize(
    ("step", "got"),
    [
        (lambda view: view.lens, r"\[8\]"),
        (lambda view: view.ids.sum(), r"\[\]"),
        (lambda view: (view.ids, view.ids[:-1]), r"\[23\]"),
        (lambda view: {"a": view.ids[None]}, r"\[1, 24\]"),
    ],
    ids=["other axis", "no dim", "one row less", "rows second"],
)
def test_wrong_rows_are_refused_at_capture(cpu: str, step: Callable[[TokenInputs], Any], got: str) -> None:
    """An output whose rows do not follow the axis is refused at capture, with its shape and the way out."""
    runner = DecodeRunner(TokenInputs, step, buckets=[8], backend=cpu, width=WIDTH)
    with pytest.raises(CaptureError, match=rf"bucket 8.*shape {got}, expected 24 rows.*pass output_rows=|{got}.*24"):
        runner.capture()


@pytest.mark.parametrize("bad", [Axis("PAGES"), "BATCH", Dim.of(BATCH)])
def test_other_axes_are_refused(cpu: str, bad: Any) -> None:
    """Rows follow TOKENS, BATCH or nothing."""
    with pytest.raises(ConfigError, match="output_rows is TOKENS, BATCH or None, got"):
        DecodeRunner(TokenInputs, lambda view: view.ids, buckets=[4], backend=cpu, output_rows=bad)


class LogitsInputs(TokenInputs):
    logits: torch.Tensor = output(TOKENS, 2, dtype=torch.int64)


def test_output_slot(cpu: str) -> None:
    """A step that writes its result to an output slot gives that slot's live rows, at one address for all steps."""

    def step(view: LogitsInputs) -> torch.Tensor:
        view.logits.copy_(torch.stack([view.ids, view.ids * 3], 1))
        return view.logits

    runner = DecodeRunner(LogitsInputs, step, buckets=[4, 8], backend=cpu)
    runner.capture()
    addresses = set()
    for requests in (3, 8, 4):
        batch = batch_of(requests, 1, seed=requests)
        outputs = runner(batch)
        addresses.add(outputs.data_ptr())
        assert torch.equal(outputs, torch.stack([batch["ids"], batch["ids"] * 3], 1))
    assert len(addresses) == 1


def test_structure_that_the_caller_changes(cpu: str) -> None:
    """What a caller takes out of a structure, or puts in, is back to what the step returned at the next replay."""
    runner = runner_of(lambda view: {"rows": view.ids * 2, "list": [view.lens]}, cpu)
    for requests in (3, 3, 8, 8, 3):
        batch = batch_of(requests, 1, seed=requests)
        outputs = runner(batch)
        assert torch.equal(outputs.pop("rows"), batch["ids"] * 2)
        outputs["list"].append("mine")
        assert len(outputs["list"]) == 2


def test_shape_that_the_caller_changes(cpu: str) -> None:
    """A tensor that a caller reshapes in place has its own shape again at the next replay."""
    runner = runner_of(lambda view: view.ids * 2, cpu)
    for _ in range(2):
        batch = batch_of(3, 1, seed=4)
        outputs = runner(batch)
        assert torch.equal(outputs, batch["ids"] * 2)
        outputs.unsqueeze_(0)


def test_structure_that_the_step_keeps() -> None:
    """A step that returns the same dict each time, with new tensors in it, gives this step's rows, not the first's."""
    kept: dict[str, torch.Tensor] = {}

    def step(view: TokenInputs) -> dict[str, torch.Tensor]:
        kept["rows"] = view.ids * 2
        return kept

    runner = runner_of(step, "cpu")
    for seed in (1, 2, 3):
        batch = batch_of(3, 1, seed=seed)
        assert torch.equal(runner(batch)["rows"], batch["ids"] * 2)
