"""Graphs are held to their steps: planted bugs are told by slot, leaf and row. Sound steps are not accused."""

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Inputs, computed, copied
from slotgraph.dataflow.errors import CheckError
from slotgraph.runners.check.trial import USUAL, Finding, info_of, mismatches, seen
from tests.runners.check.test_addresses import broken_runner, runner_of
from tests.runners.check.test_planted import found_by
from tests.runners.models import PlainInputs, decoder, plain_runner, plain_step, random_batch

if TYPE_CHECKING:
    from slotgraph.backends import Backend

CAPTURES = "cpu-capture"
BATCHES = [random_batch(rows, 40 + rows) for rows in (1, 3, 4, 6, 8)]


def findings(runner: Any, batches: Any = BATCHES, **options: Any) -> list[Finding]:
    """What parity finds."""
    return found_by("parity", runner, batches, **options)


def test_frozen_value_that_reaches_the_state_alone() -> None:
    """A row of a cache that is chosen on the host: no output tells, but the cache does, and its writer is named."""
    cache, host = torch.zeros(4, 8), {"layer": 1}

    def step(view: Any) -> torch.Tensor:
        cache[host["layer"], : view.weights.shape[0]] = view.weights
        return plain_step(view)

    runner = runner_of(step)
    assert findings(runner) == []
    before = cache.clone()
    host["layer"] = 2
    (found,) = findings(runner)
    assert "a replay leaves other bytes than the step in the float32 tensor of shape" in found.message
    assert "aten::" in found.message
    assert torch.equal(cache, before)


def test_padding_that_reaches_live_rows() -> None:
    """A sum over the bucket: the graph does what the step does, unlike the batch alone."""
    (found,) = findings(runner_of(lambda view: plain_step(view) + view.weights.sum()))
    assert found.slot is None
    assert "all slots agree in their live rows; on the padded view the step gives what the graph gives" in found.message


class Recurrent(Inputs):  # one sequence, whose state is a row of a table
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    row: torch.Tensor = copied(1, dtype=torch.int64)


@pytest.mark.parametrize("is_right", [True, False])
def test_padded_rows_that_reach_the_state_alone(is_right: bool) -> None:
    """A recurrent layer that counts padded tokens: outputs are right in this step, and wrong in the next."""
    counts = torch.zeros(4, dtype=torch.int64)

    def step(view: Any) -> torch.Tensor:
        outputs: torch.Tensor = view.ids + counts[view.row]
        counts[view.row] += (view.ids > 0).sum() if is_right else len(view.ids)
        return outputs

    runner = decoder(Recurrent, step, backend=CAPTURES, buckets=[2, 4])
    batches = [{"ids": torch.arange(rows) + 1, "row": torch.tensor([1 + rows % 3])} for rows in (4, 3, 2, 1)]
    found = findings(runner, batches)
    assert [one.slot for one in found] == [None] * (not is_right)
    for one in found:
        assert "in the next step outputs row 0: after the graph" in one.message
        assert "change what live rows leave for later steps" in one.message
    assert not counts.any()


def test_fill_that_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot whose live rows are not the batch's is named, with the row."""
    runner = plain_runner(CAPTURES)
    fill = type(runner)._fill_view

    def spoiling(self: Any, batch: Any, side: Any) -> Any:
        view = fill(self, batch, side)
        view.places[2:3].add_(1)
        return view

    monkeypatch.setattr(type(runner), "_fill_view", spoiling)
    (found,) = findings(runner, BATCHES[1:])
    assert found.slot == "places"
    assert "slot 'places' row 2: graph " in found.message
    assert "the fill of the padded bucket is not that of the batch" in found.message


def test_step_that_raises() -> None:
    """A step that only bears sizes of buckets is told, and so is one that only its graph still runs."""
    allowed = {4: 1, 8: 1}
    runner = runner_of(lambda view: plain_step(view) * allowed[len(view.weights)])
    (found,) = findings(runner)
    assert found.message == "the step raised on the batch without padding: KeyError: 1"
    del allowed[8]
    (found,) = findings(runner, BATCHES[3:], state=[])
    assert found.message == "the step raised KeyError: 8 where its graph is replayed"


def test_function_that_raises_without_padding() -> None:
    """A function on the device that only bears sizes of buckets is told by its slot."""

    class Paired(PlainInputs):
        swapped: torch.Tensor = computed(
            lambda weights: weights.view(-1, 2).flip(1).flatten(), shape=BATCH, dtype=torch.float32
        )

    runner = decoder(Paired, lambda view: plain_step(view) + view.swapped[:, None], backend=CAPTURES, buckets=[4, 8])
    (found,) = findings(runner)
    assert "the step raised on the batch without padding: ComputeError: slot 'swapped': its function " in found.message


def test_how_exact() -> None:
    """Bits count on the padded view. Without padding a thousandth is let pass, as for kernels of other shapes."""
    host = {"scale": 1.0}
    runner = runner_of(lambda view: plain_step(view) * host["scale"])
    host["scale"] = 1 + 3e-7
    assert len(findings(runner)) == 1

    def by_size(view: Any) -> torch.Tensor:
        return plain_step(view) * (host["scale"] if len(view.ids) in (4, 8) else 1)

    host["scale"] = 1.0005
    assert findings(runner_of(by_size)) == []
    host["scale"] = 1.002
    assert len(findings(runner_of(by_size))) == 1


def test_step_that_is_not_the_same_twice() -> None:
    """Rounding that comes and goes is not a finding. A difference beyond the usual tolerances is."""
    turns = itertools.cycle([1.0, 1.0000002, 1.0000001])
    host = {"bias": 0.0}
    runner = runner_of(lambda view: plain_step(view) * next(turns) + host["bias"])
    assert findings(runner) == []
    host["bias"] = 1.0
    assert len(findings(runner)) == 1


def test_no_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run if the state cannot be kept as often as that takes."""
    monkeypatch.setattr("slotgraph.runners.engine.state._free_on", lambda *_: 12000)
    with pytest.raises(CheckError, match=r"changes 3\.9 KiB .* 2 copies"):
        findings(plain_runner(CAPTURES), state=[torch.zeros(1000)])


def test_function_that_differs_in_the_graph() -> None:
    """The slot that it computes is named, and its function is to blame, not the step."""
    host = {"factor": 2}

    class Scaled(PlainInputs):
        scaled: torch.Tensor = computed(lambda weights: weights * host["factor"], shape=BATCH, dtype=torch.float32)

    runner = decoder(Scaled, lambda view: view.scaled * 1, backend=CAPTURES, buckets=[4, 8])
    assert findings(runner) == []
    host["factor"] = 3
    (found,) = findings(runner)
    assert found.slot == "scaled"
    assert "its function reads something that is not a slot" in found.message
    assert "all slots agree" not in found.message


def test_stack_in_parts() -> None:
    """A number that is frozen in one graph of several is found."""
    model, runner = broken_runner()
    assert findings(runner) == []
    model.stack.eager, model.stack.scale = 5.0, 7.0
    (found,) = findings(runner)
    assert "all slots agree: the step reads something that is not a slot" in found.message


@pytest.mark.parametrize(("whose", "told"), [("padded", 0), ("live", 1)])
def test_what_padded_rows_leave_is_no_fault(backend: "Backend", whose: str, told: int) -> None:
    """They all write one reserved row, and which comes last may depend on anything. Live rows write their own."""
    cache, host = torch.zeros(1000, device=backend.device), {"scale": 1.0}

    def step(view: PlainInputs) -> torch.Tensor:
        rows = torch.arange(view.weights.shape[0], device=backend.device)
        scaled = (rows >= view.live) if whose == "padded" else (rows < view.live)
        cache[view.places.long()] = view.weights * torch.where(scaled, host["scale"], 1.0)
        return view.weights * 2

    runner = runner_of(step, backend=backend, output_rows=BATCH)
    host["scale"] = 3.0  # frozen in graphs
    found = findings(runner, [random_batch(rows, rows) for rows in (3, 6)])
    assert len(found) == (told if backend.name != "cpu" else 0)
    assert all("leaves other bytes than the step" in one.message for one in found)


@attrs.define
class Both:  # outputs in a container of one's own
    rows: torch.Tensor
    number: int = 3


class Pair(NamedTuple):  # outputs in a named tuple
    left: torch.Tensor
    right: tuple[torch.Tensor]


SHARED = plain_runner("cpu")


@settings(max_examples=min(200, settings().max_examples))
@given(data=st.data(), rows=st.integers(1, 8), seed=st.integers(0, 1 << 20))
def test_first_difference_is_the_first(data: st.DataObject, rows: int, seed: int) -> None:
    """Of any two runs: the first copied slot that differs, else the first leaf, at its first element in row order."""
    view = SHARED.fill(random_batch(rows, seed))
    pair = Pair(view.ids.double(), (view.pairs.clone(),))
    outputs = {"a": pair, "b": [Both(torch.rand(view.weights.shape[0], 2, 2))]}
    one, other = seen(view, outputs), seen(view, outputs)
    assert list(mismatches(one, other, USUAL)) == []
    places = ["slot 'weights'", "slot 'pairs'", "outputs['a'].left", "outputs['a'].right[0]", "outputs['b'][0].rows"]
    changed: dict[str, int] = {}
    for place in data.draw(st.sets(st.sampled_from(places), min_size=1)):
        live = other[place][:rows] if place.startswith("outputs") else other[place]
        at = changed[place] = data.draw(st.integers(0, live.numel() - 1))
        live.view(-1)[at] += 1
    found = next(mismatches(one, other, USUAL), None)
    expected = next(place for place in places if place in changed)
    assert found is not None
    assert found.index is not None
    assert found.where == expected
    assert found.slot == (expected[6:-1] if expected.startswith("slot") else None)
    index = torch.unravel_index(torch.tensor(changed[expected]), other[expected].shape)
    assert found.index == tuple(int(i) for i in index)
    assert found.values[0] == pytest.approx(found.values[1] - 1, abs=1e-5)
    assert found.row == found.index[0]


def test_differences_in_kind() -> None:
    """Another shape, dtype, container or host value is told as such. NaN is as good as NaN, and padding is none."""
    view = SHARED.fill(random_batch(3, 1))
    nan = torch.tensor([[float("nan"), 1.0]] * 3)

    def told(one: Any, other: Any, tolerance: Any = USUAL) -> str:
        return str(next(mismatches(seen(view, one), seen(view, other), tolerance, step=info_of(view).step), None))

    assert told(nan, nan.clone()) == "None"
    assert told(torch.ones(4, 2), torch.ones(3, 2)) == "None"
    assert told(torch.ones(2, 4), torch.ones(2, 3)) == "None"  # 4 padded rows for 3 live ones
    said = "outputs: graph float32 of shape [3, 4], eager float32 of shape [3, 2]"
    assert told(torch.ones(3, 4), torch.ones(3, 2)) == said
    assert told(torch.ones(3), torch.ones(3).double()).startswith("outputs: graph float32")
    assert told([nan], nan) == "outputs[0]: graph float32 of shape [3, 2], eager None"
    assert told(7, 8) == "outputs: graph 7, eager 8"
    assert told(torch.tensor([0.0]), torch.tensor([-0.0]), tolerance={}) == "outputs row 0: graph 0.0, eager -0.0"
    assert told(torch.tensor([1.0]), torch.tensor([1.000001])) == "None"
