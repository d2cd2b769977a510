"""Class D: host values and addresses that a graph keeps from its capture."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, Inputs, Step, computed, copied
from slotgraph.backends import load
from slotgraph.dataflow.errors import CaptureError, ReplayError
from tests.regressions.engines import BACKEND, captured, draw


@attrs.frozen(eq=False)
class Addressed:
    """A graph as a device has it: of its inputs it keeps where they lay at capture, and nothing else."""

    step: Callable[[torch.Tensor], torch.Tensor]
    place: torch.Tensor

    @classmethod
    def of(cls, step: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> "Addressed":
        """Capture a step on a tensor."""
        return cls(step, tensor.detach())

    def replay(self) -> torch.Tensor:
        """Run it on what lies there now."""
        return self.step(self.place)


class Scaled(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    longest: int


class Known(Scaled):
    longest: int = 1


def test_vllm_53915_what_the_engine_has_replaced_since() -> None:
    """A graph goes on with the metadata of its capture, while each step makes new ones that nobody reads."""
    ids, metadata = torch.zeros(4, dtype=torch.int64), {"longest": 1}
    graph = load(BACKEND)().capture(lambda: ids * metadata["longest"])
    ids.copy_(draw(2, 9, (4,), 1))
    metadata = {"longest": 7}
    graph.replay()
    assert not torch.equal(graph.outputs, ids * metadata["longest"])

    def step(view: Any) -> torch.Tensor:
        result: torch.Tensor = view.ids * view.longest
        return result

    with pytest.raises(CaptureError, match="longest"):  # a field that capture would freeze
        captured(Scaled, step)
    runner = captured(Known, step)  # or one with a value that graphs saw
    batch = {"ids": draw(2, 9, (3,), 2)}
    assert torch.equal(runner({**batch, "longest": 7}), batch["ids"] * 7)
    assert runner.decide({**batch, "longest": 7}).why == "field_differs"
    assert torch.equal(runner(batch), batch["ids"])

    class Copied(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        factor: torch.Tensor = computed(lambda longest: longest, shape=1, dtype=torch.int64)
        longest: int

    graphed = captured(Copied, lambda view: view.ids * view.factor)  # or a slot, which each fill writes
    assert torch.equal(graphed({**batch, "longest": 7}), batch["ids"] * 7)
    assert graphed.stats()["steps"] == {"graph": 1, "eager": 0}


class Placed(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    places: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def test_trtllm_15534_a_workspace_that_is_given_back() -> None:
    """Memory that a kernel was captured with is given back at its return, and is someone else's at the next replay."""
    heap = torch.zeros(8)  # of which a caching allocator hands out the same part again
    workspace = heap[:4]
    graph = Addressed.of(lambda place: place.mul_(2), workspace)
    del workspace
    other = heap[:4].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    graph.replay()
    assert other.tolist() != [1.0, 2.0, 3.0, 4.0]

    def step(view: Any) -> torch.Tensor:
        workspace = torch.empty(view.ids.shape[0], dtype=torch.int64)  # the graph's own, for as long as it lives
        workspace.copy_(view.ids).mul_(2)
        return workspace

    runner = captured(Placed, step)
    strangers = [torch.full((4,), 5) for _ in range(50)]
    assert runner({"ids": [3, 4], "places": [1, 1]}).tolist() == [6, 8]
    assert all(bool((one == 5).all()) for one in strangers)


def test_vllm_50386_a_buffer_that_grew() -> None:
    """A larger batch, run eagerly, has a shared buffer replaced by a larger one; graphs read the old one."""
    buffer = torch.zeros(4, dtype=torch.int64)
    graph = Addressed.of(lambda place: place * 2, buffer)
    buffer = torch.zeros(8, dtype=torch.int64)  # for eight rows, once
    buffer[:4].copy_(torch.tensor([1, 2, 3, 4]))
    assert graph.replay().tolist() != [2, 4, 6, 8]

    runner = captured(Placed, lambda view: view.ids * 2)
    large = draw(1, 9, (50,), 3)
    assert torch.equal(runner({"ids": large, "places": large}), large * 2)  # in buffers of its own, which may grow
    assert runner({"ids": [1, 2, 3, 4], "places": [1] * 4}).tolist() == [2, 4, 6, 8]

    adopted = torch.zeros(4, dtype=torch.int64)
    bound = captured(Placed, lambda view: view.ids * 2, bind={"ids": adopted})
    adopted.set_(torch.zeros(8, dtype=torch.int64))  # type: ignore[call-overload] # what resizing amounts to
    with pytest.raises(ReplayError, match="moved"):
        bound({"ids": [1, 2], "places": [1, 1]})


def planned(step: Step) -> list[int]:
    """How much of the work each row takes, by how many are live."""
    return [60 // max(step.live(BATCH), 1)] * step.padded(BATCH)


def test_vllm_42444_a_plan_left_by_the_warm_up() -> None:
    """The warm-up makes a plan that is kept, so that the capture finds one and records no planning."""
    lengths, state = torch.full((4,), 1), dict[str, torch.Tensor]()

    def attend() -> torch.Tensor:
        if "plan" not in state:
            state["plan"] = 60 // (lengths > 0).sum() * torch.ones_like(lengths)
        return lengths * state["plan"]

    attend()  # the warm-up, on four requests
    graph = load(BACKEND)().capture(attend)
    lengths.copy_(torch.tensor([5, 6, 0, 0]))
    graph.replay()
    assert graph.outputs[:2].tolist() != [5 * 30, 6 * 30]

    class Planned(Inputs):
        lengths: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        plan: torch.Tensor = computed(planned, shape=BATCH, dtype=torch.int64)

    runner = captured(Planned, lambda view: view.lengths * view.plan, warmups=3)
    for live in ([5, 6], [7], [1, 2, 3, 4]):
        assert runner({"lengths": live}).tolist() == [length * (60 // len(live)) for length in live]
