"""Assignments to a view: the step's own are its affair, all others are refused, since no graph would see them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, InputBuffers, Inputs, computed, copied
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.errors import CaptureError, ReplayError
from tests.runners.kinds import RUNNERS, batch_of, captured, tensors_of
from tests.runners.models import decoder


class Placed(Inputs):
    """A view's documentation."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    live: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int64)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    note: int = 3


def placed_step(view: Placed) -> torch.Tensor:
    """A number a row."""
    return view.ids * 100 + view.positions


def placed(step: Callable[[Placed], Any] = placed_step, **options: Any) -> DecodeRunner[Placed]:
    """A captured runner."""
    given: dict[str, Any] = {"backend": "cpu-capture", "buckets": (2, 4), **options}
    made: DecodeRunner[Placed] = decoder(Placed, step, **given)
    return made


BATCH_OF_TWO: Final = {"ids": [1, 2], "positions": [7, 8], "lens": [1, 1]}


@pytest.mark.parametrize("lowering", LADDER)
def test_what_a_graph_would_not_see_is_refused(cpu: str, lowering: str) -> None:
    """The view stays as it was filled, and the error's way out works."""
    runner = placed(backend=cpu, lowering=lowering)
    for other in (torch.tensor([50, 60]), [50, 60], None):
        view = runner.fill(BATCH_OF_TWO)
        with pytest.raises(
            ReplayError, match=r"view\.positions was assigned, .*view\.positions\.copy_\(value\), before"
        ):
            view.positions = other  # type: ignore[assignment]
        assert runner.replay(view).tolist() == [107, 208]
    view = runner.fill(BATCH_OF_TWO)
    view.positions.copy_(torch.tensor([50, 60]))
    view.ids += 1  # Python assigns the same tensor
    view.ids[1] = 9
    assert runner.replay(view).tolist() == [250, 960]
    with pytest.raises(ReplayError, match=r"view\.live was assigned"):
        view.live = torch.tensor([1])
    with pytest.raises(ReplayError, match=r"view\.note was assigned, .*: give it in the batch"):
        view.note = 4
    with pytest.raises(ReplayError, match=r"view\.position was assigned, .*or declare it as a slot"):
        view.position = torch.tensor([50, 60])  # type: ignore[attr-defined]
    part = view.narrow(BATCH, 0, 1)
    with pytest.raises(ReplayError, match=r"view\.ids was assigned"):
        part.ids = torch.tensor([5])


@pytest.mark.parametrize("name", RUNNERS)
def test_views_of_every_runner_refuse_assignments(name: str) -> None:
    """Filled ones, the second by the short way, and those of batches that no graph takes."""
    runner = captured(name)
    for rows in (2, 2, 2, 30, 30):
        batch = batch_of(name, rows, rows)
        view = runner.fill(batch)
        with pytest.raises(ReplayError, match=r"view\.tokens\.copy_\(value\)"):
            view.tokens = view.tokens + 1
        answer = tensors_of(runner.replay(view))
        assert all(map(torch.equal, answer, tensors_of(runner(batch))))


def test_a_producer_writes_into_the_slots_memory() -> None:
    """It writes into the slot's memory."""
    view = placed().inputs(4)
    with pytest.raises(ReplayError, match=r"view\.ids\.copy_\(value\)"):
        view.ids = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize("lowering", LADDER)
def test_a_step_may_assign_to_its_own_view(cpu: str, lowering: str) -> None:
    """A step may keep what it likes on its view, in a capture and eagerly, and the layers that it calls, too."""

    def layer(view: Any) -> None:
        view.hidden = view.ids * 10
        view.positions = view.positions + 1
        part = view.narrow(BATCH, 0, 1, tokens=(0, 1))
        part.ids = part.ids + 1

    def step(view: Any) -> torch.Tensor:
        layer(view)
        hidden: torch.Tensor = view.hidden + view.positions
        return hidden

    runner = placed(step, backend=cpu, lowering=lowering)
    for _ in range(3):
        assert runner(BATCH_OF_TWO).tolist() == [18, 29]
        assert runner.replay(runner.fill(BATCH_OF_TWO)).tolist() == [18, 29]
    large = {"ids": [*range(9)], "positions": [*range(9)], "lens": [1] * 9}
    assert runner(large).tolist() == [11 * one + 1 for one in range(9)]
    assert runner.replay(runner.fill(large)).tolist() == [11 * one + 1 for one in range(9)]
    eager = EagerRunner(Placed, step, backend=cpu)
    assert eager(BATCH_OF_TWO).tolist() == eager.replay(eager.fill(BATCH_OF_TWO)).tolist() == [18, 29]


def test_a_compiled_step_may_assign() -> None:
    """The compiler sees an ordinary assignment."""

    def step(view: Any) -> torch.Tensor:
        view.hidden = view.ids * 10
        hidden: torch.Tensor = view.hidden + view.positions
        return hidden

    runner = placed(torch.compile(step, backend="eager", fullgraph=True), warmups=2)
    assert runner(BATCH_OF_TWO).tolist() == [17, 28]


def test_batches_and_views_of_input_buffers_are_the_callers() -> None:
    """Their own steps see what they assign."""
    batch = Placed(ids=torch.tensor([1, 2]), positions=torch.tensor([7, 8]), lens=torch.tensor([1, 1]))
    batch.positions = torch.tensor([3, 4])
    assert placed()(batch).tolist() == [103, 204]
    buffers = InputBuffers(Placed, {BATCH: 4, TOKENS: 4}, backend="cpu-capture")
    for view in (buffers.fill(BATCH_OF_TWO), buffers.view()):
        view.positions = view.positions + 1
        assert placed_step(view)[:2].tolist() == [108, 209]


def test_a_view_is_an_instance_of_its_declaration() -> None:
    """One class for all runners, of the same name and documentation, with the same declaration and printed alike."""
    runner, batch = (
        placed(),
        Placed(ids=torch.tensor([1, 2]), positions=torch.tensor([7, 8]), lens=torch.tensor([1, 1])),
    )
    view = runner.fill(batch)
    kind = type(view)
    assert isinstance(view, Placed)
    assert kind is type(placed().fill(batch)) is type(runner.inputs(2))
    assert (kind.__name__, kind.__module__, kind.__doc__) == ("Placed", __name__, "A view's documentation.")
    assert kind.slotgraph is Placed.slotgraph
    assert repr(view) == "Placed(ids=int64[2], positions=int64[2], live=int64[1], lens=int64[2], note=3)"

    class Further(Placed):
        more: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)

    further = decoder(Further, lambda view: view.more, backend="cpu-capture", buckets=(2,))
    assert further.fill({**BATCH_OF_TWO, "more": [5, 6]}).more.tolist() == [5, 6]


def deeper(tensor: torch.Tensor) -> torch.Tensor:
    """A layer that writes what it is given."""
    return tensor.add_(1)  # here


def whole(view: Placed) -> torch.Tensor:
    """Writes one slot."""
    return deeper(view.positions) + view.ids


def part(view: Placed) -> torch.Tensor:
    """Writes a part of one, by an index, and reads the other."""
    view.positions[0] = 5  # here
    return view.positions + view.ids


def twice(view: Placed) -> torch.Tensor:
    """Writes one in two places, of which the first counts; a write that changes nothing is no fault."""
    view.ids.mul_(1)
    view.positions.mul_(3)  # here
    view.positions.sub_(1)
    return view.positions + view.ids


def line_of(step: Callable[..., Any]) -> int:
    """The line with the mark."""
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    first = step.__code__.co_firstlineno - 1
    return next(number + 1 for number in range(first, len(lines)) if lines[number].endswith("# here"))


@pytest.mark.parametrize("lowering", LADDER)
@pytest.mark.parametrize(
    ("step", "at"), [(whole, deeper), (part, part), (twice, twice)], ids=["whole", "part", "twice"]
)
def test_a_write_in_place_names_its_line(cpu: str, step: Any, at: Callable[..., Any], lowering: str) -> None:
    """The slot, the file and the line, and what to do."""
    runner = DecodeRunner(Placed, step, backend=cpu, buckets=(2,), lowering=lowering)
    with pytest.raises(CaptureError) as caught:
        runner.capture()
    said = str(caught.value)
    assert f"the step writes slot 'positions' at test_assigned_views.py:{line_of(at)}, `" in said
    assert "rewritten=True" in said
    assert "'ids'" not in said
