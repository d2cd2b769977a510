"""What graphs read stays where it was, or is named: slots, tensors that a step holds, storages that a capture met."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from torch import nn

from slotgraph import BreakableRunner, graph_break
from slotgraph.runners.engine.state import Holdings
from tests.runners.check.test_planted import found_by
from tests.runners.check.test_planted import runner_of as captured
from tests.runners.models import TABLE, PlainInputs, random_batch, ready

if TYPE_CHECKING:
    from slotgraph.backends import Backend


class Model(nn.Module):  # a table that a step reads, one that it does not, and a cache that it writes
    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()
        self.table = TABLE.clone().to(device)
        self.inner = nn.ModuleList([nn.Linear(2, 4, device=device)])
        self.spare = torch.randn(3, device=device)
        self.pages = {"cache": torch.zeros(1000, device=device)}

    def step(self, view: Any) -> torch.Tensor:
        """Rows of the table and of a layer."""
        self.pages["cache"][view.places] = view.weights
        hidden: torch.Tensor = self.inner[0](view.pairs)
        return self.table[view.rows] + hidden


def runner_of(step: Callable[[Any], Any], backend: "Backend | str" = "cpu-capture", **options: Any) -> Any:
    """A captured runner."""
    return captured(step, backend, PlainInputs, buckets=[4, 8], **options)


def told(runner: Any, **options: Any) -> list[str]:
    """What the check says."""
    batches = [random_batch(rows, rows, runner.stage.backend.device) for rows in (3, 8)]
    return [finding.message for finding in found_by("addresses", runner, batches, **options)]


def _replace_table(model: Any) -> None:
    model.table = model.table.clone()


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "attribute": (_replace_table, "aten::index reads self.table, and the memory of the capture is freed (float32"),
    "parameter": (
        lambda model: setattr(model.inner[0], "weight", nn.Parameter(model.inner[0].weight.detach().clone())),
        "reads self.inner.0.weight, and the memory of the capture is freed",
    ),
    "data": (
        lambda model: setattr(model.inner[0].bias, "data", model.inner[0].bias.data.clone()),
        "reads self.inner.0.bias, and the memory of the capture is freed",
    ),
    "item": (
        lambda model: model.pages.update(cache=torch.zeros(2000, device=model.table.device)),
        "aten::index_put_ reads self.pages['cache'], and the memory of the capture is freed",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_exchanged_tensor_is_named(backend: "Backend", change: str) -> None:
    """By the way in which the step reaches it, with the operator. If a replay calls the step it is fine."""
    model = Model(backend.device)
    runner = runner_of(model.step, backend)
    assert told(runner) == []
    do, words = CHANGES[change]
    do(model)
    found = told(runner)
    if backend.name == "cpu":
        assert found == []
        return
    if backend.name == "cpu-capture":  # which keeps what its graphs read
        words = words.replace("the memory of the capture is freed", "it is other memory than at capture")
    assert any(words in message for message in found), found
    assert any("write into the tensor of the capture (copy_), or capture again" in message for message in found)


def test_what_the_step_hands_out_is_read() -> None:
    """A part of a table that no operator computes with."""
    held = {"table": TABLE.clone()}
    runner = runner_of(lambda view: held["table"][: len(view.ids)])
    held["table"] = held["table"].clone()
    assert "the caller reads held['table'], and it is other memory than at capture" in told(runner)[0]


def test_memory_that_the_graph_met() -> None:
    """A workspace that is resized in place, and a tensor that points elsewhere: by the way to it, and by the graph."""
    model = Model()
    runner = runner_of(model.step)
    model.table.untyped_storage().resize_(1 << 20)
    of_graph, of_step = told(runner, state=[])
    assert "bucket 8, 4: a storage of 1600 bytes that aten::index.Tensor takes in the graph was resized" in of_graph
    assert "aten::index reads self.table, and it is other memory than at capture" in of_step
    held = torch.randn(100, 4)
    runner = runner_of(lambda view: held[view.rows])
    held.data = torch.randn(100, 4)
    of_graph, of_step = told(runner)
    assert "a tensor of shape (100, 4), torch.float32, that aten::index.Tensor takes has moved" in of_graph
    assert "aten::index reads held" in of_step


def test_late_captures(backend: "Backend") -> None:
    """What a bucket of a lazy runner reads is noted when it is captured."""
    model = Model(backend.device)
    runner = runner_of(model.step, backend, lazy=True)
    _replace_table(model)
    assert told(runner) == []
    _replace_table(model)
    assert bool(told(runner)) == (backend.name != "cpu")


class Broken(nn.Module):  # one table in graphs, one in a break, one outside
    def __init__(self) -> None:
        super().__init__()
        self.stack: Any = _Stack()
        self.outside = TABLE.clone()

    def forward(self, view: Any) -> Any:
        return self.stack(self.outside[view.rows])


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.eager = torch.tensor(2.0), torch.tensor(3.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # in a graph, in a break, in a graph
        return self.middle(hidden * self.scale) * self.scale

    @graph_break
    def middle(self, hidden: torch.Tensor) -> torch.Tensor:  # in each step anew
        return hidden + self.eager


def broken_runner() -> tuple[Broken, BreakableRunner[Any]]:
    """Such a model, and a captured runner for it."""
    model = Broken()
    options: Any = {"buckets": [4, 8], "max_batch": 8, "output_rows": None, "backend": "cpu-capture"}
    runner = ready(BreakableRunner(PlainInputs, model, stack="stack", **options))
    return model, runner


def test_breaks_may_read_what_they_like() -> None:
    """What the captured part holds counts. What breaks read, and what runs around the stack, is each step's own."""
    model, runner = broken_runner()
    model.outside, model.stack.eager = model.outside.clone(), model.stack.eager.clone()
    assert told(runner) == []
    model.stack.scale = model.stack.scale.clone()
    (found,) = told(runner)
    assert "aten::mul reads self.scale" in found


@attrs.define
class Kept:  # an attrs class with slots
    inner: list[torch.Tensor]


GLOBAL = torch.randn(2)


def test_ways_to_a_tensor() -> None:
    """Closures, globals, attributes, slots of classes, items, partials, wrapped functions, each by its name."""
    first, kept, model = torch.randn(3), Kept([torch.randn(4), torch.randn(5)]), Model()

    def inner(view: Any) -> Any:
        return first + GLOBAL + view

    def step(scale: torch.Tensor, view: Any) -> Any:
        return inner(view) + kept.inner[0] + scale + model.step(view)

    wrapped = functools.update_wrapper(lambda *args: len(args), step)
    before = Holdings(functools.partial(wrapped, torch.randn(6)))
    before.look()
    ways = {"[0]", "kept.inner[1]", "inner.first", "inner.GLOBAL", "model.table", "model.inner.0.weight"}
    assert ways <= before.found.keys()
    assert before.changed() == []
    kept.inner[1] = torch.randn(5)
    ((holding, now),) = before.changed()
    assert (holding.name, holding.is_freed, now is kept.inner[1]) == ("kept.inner[1]", True, True)
    table = before.found["model.table"]
    assert not table.is_freed
    del model.table
    assert table.is_freed  # since holdings keep nothing alive
    kept.inner.pop()
    assert before.changed() == []
