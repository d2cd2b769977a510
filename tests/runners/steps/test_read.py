"""What `read=` of `steps()` may return: parts of the step's outputs, whose values are there only later."""

import collections
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import attrs
import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.errors import ConfigError
from tests.runners.models import decoder

COUNTER = itertools.count()
TENS = torch.tensor([1, 10, 100])


class Number(Inputs):
    number: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-1, then=lambda number: number + 1)


class Made(NamedTuple):
    ids: torch.Tensor
    table: torch.Tensor
    scale: float


@attrs.frozen
class Parcel:
    ids: torch.Tensor


def step_of(view: Number) -> Made:
    """A row of numbers, three numbers a row, and a constant."""
    return Made(view.number * 2, view.number[:, None] * TENS, 0.5)


def ready(backend: str, step: Callable[[Number], Any] = step_of, **options: Any) -> DecodeRunner[Number]:
    """A captured runner."""
    given: dict[str, Any] = {"output_rows": BATCH, **options}
    made: DecodeRunner[Number] = decoder(Number, step, backend=backend, buckets=(2, 4), **given)
    return made


PARTS: Final[dict[str, Callable[[Made], Any]]] = {
    "one": lambda made: made.ids,
    "all": lambda made: made,
    "first row": lambda made: made.ids[0],
    "a column": lambda made: made.table[:, 1],
    "every other": lambda made: made.table[:, ::2],
    "turned": lambda made: made.table.t(),
    "split": lambda made: {"halves": [*torch.split(made.table, 2, 1)]},
    "reversed": lambda made: [made.table.unsqueeze(0), made.ids.view(-1, 1)],
    "own kinds": lambda made: collections.OrderedDict(a=Parcel(made.ids), b=(made.scale, None)),
    "nothing": lambda _: None,
    "without a change": lambda made: made.ids.contiguous().to(torch.int64),
}


def plain(value: Any) -> Any:
    """The same in numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, Parcel):
        return plain(value.ids)
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("options", [{}, {"lowering": "in_graph"}, {"lowering": "fused"}, {"debug": True}], ids=str)
def test_each_step_has_its_own_parts(cpu: str, name: str, options: dict[str, Any]) -> None:
    """Each step has its own values, also where requests have joined or left."""
    read, first = PARTS[name], torch.randint(1, 99, (2,), generator=torch.Generator().manual_seed(4))
    numbers = dict(zip("ab", first.tolist(), strict=True))
    tens = TENS.cpu()
    for step in ready(cpu, **options).steps({"number": first}, keys=[*"ab"], ahead=1, read=read):
        now = {key: numbers[key] + step.number for key in numbers if key != "c" or key in step.keys}
        rows = torch.tensor([now[key] for key in step.keys])
        want = Made(rows * 2, rows[:, None] * tens, 0.5)
        assert plain(step.outputs) == plain(read(want))
        if step.number == 2:
            step.join({"number": [50]}, ["c"])
            numbers["c"] = 50 - step.lands
        if step.number == 4:
            step.leave(["a"])
        if step.number == 7:
            break


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
def test_each_step_has_its_own_parts_on_cuda(name: str, lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from the device's memory."""
    monkeypatch.setattr("tests.runners.steps.test_read.TENS", TENS.to("cuda"))
    test_each_step_has_its_own_parts("cuda", name, {"lowering": lowering})


WRONG: Final[dict[str, Callable[[Made], Any]]] = {
    "a number": lambda made: int(made.ids[0]),
    "a number of a tensor's size": lambda made: len(made.ids),
    "a list": lambda made: made.ids.tolist(),
    "an array": lambda made: made.ids.numpy(),
    "numbers in a dict": lambda made: {"a": made.ids, "b": made.ids.sum().item()},
    "another tensor": lambda made: made.ids + 1,
    "a copy": lambda made: made.ids.clone(),
    "another dtype": lambda made: made.ids.float(),
    "bytes of it": lambda made: made.ids.view(torch.int32),
    "rows that values choose": lambda made: made.ids[: int(made.ids[0]) % 2 + 1],
    "rows by a mask": lambda made: made.table[made.ids > 3],
    "a constant of its own": lambda made: (made.ids, 7),
    "a counter": lambda made: (made.ids, next(COUNTER)),
    "a text": lambda _: "ids",
    "an object": lambda made: SimpleNamespace(ids=made.ids),
    "a function": lambda made: made.ids.tolist,
    "a tensor of the module": lambda _: torch.ones(2),
    "what is not there": lambda made: made.nothing,  # type: ignore[attr-defined]
    "a branch on a value": lambda made: made.ids if made.ids[0] > 3 else made.table,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("lowering", ["foreach", "in_graph", "fused"])
def test_what_is_no_part_is_refused(cpu: str, name: str, lowering: str) -> None:
    """In the first step, with what came."""
    steps = ready(cpu, lowering=lowering).steps({"number": [3, 4]}, read=WRONG[name])
    with pytest.raises(ConfigError, match=r"^read= (makes a tensor|returns \w+, which is no part|raised \w+Error)"):
        next(steps)


def test_the_error_names_what_came_and_the_line() -> None:
    """An answer that is no part, and an error of the function's own."""
    runner = ready("cpu-capture")
    with pytest.raises(ConfigError, match=r"returns int, which is no part of what the step returns: .* step\.outputs"):
        next(runner.steps({"number": [3]}, read=lambda made: (made.ids, 3)))
    with pytest.raises(ConfigError, match=r"raised RuntimeError at test_read\.py:\d+, `.*`: .*before their values"):
        next(runner.steps({"number": [3]}, read=lambda made: made.ids.sum().item()))
    with pytest.raises(ConfigError, match=r"read: expected a function of a step's outputs.*got 'ids' of type str"):
        runner.steps({"number": [3]}, read="ids")  # type: ignore[call-overload]


@pytest.mark.parametrize("lowering", ["foreach", "fused"])
def test_outputs_that_cannot_be_copied_are_refused(cpu: str, lowering: str) -> None:
    """An object that may hold tensors of the device is not handed out as a step's own."""
    runner = ready(cpu, lambda view: SimpleNamespace(ids=view.number), output_rows=None, lowering=lowering)
    with pytest.raises(ConfigError, match="returned SimpleNamespace, which steps\\(\\) cannot copy to the host"):
        next(runner.steps({"number": [3]}))
