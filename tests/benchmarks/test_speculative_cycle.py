"""A speculative cycle's inputs, draft, verify and extend: this library's against one reset and one copy a slot."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, standard
from slotgraph.backends import Backend, load
from slotgraph.runners.testing.benchmarks import SETS, draw_for
from slotgraph.runners.testing.by_hand import FillByHand
from slotgraph.runners.testing.ground import differences

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")

TOPK, STEPS, NODES = 4, 5, 16
LIVE, PADDED = 37, 48
SIZES = {standard.TOPK: TOPK, standard.STEPS: STEPS, standard.HIDDEN: 256, standard.VOCAB: 512, standard.FILL: 1}
KINDS: tuple[tuple[type[Inputs], int], ...] = (
    (standard.DraftInputs, TOPK),
    (standard.TargetVerifyInputs, NODES),
    (standard.DraftExtendInputs, NODES),
)
"""The standard's three declarations, and the tokens that a request has in each."""


@attrs.frozen(eq=False)
class Part:
    """One of a cycle's three steps: by a runner, by hand, and the replay of a graph that fills nothing."""

    runner: DecodeRunner[Any]
    fill: Callable[[Any], Any]
    replay: Callable[[], None]
    batches: Sequence[Any]

    def both(self, batch: Any) -> None:
        """A step by hand."""
        self.fill(batch)
        self.replay()


def smallest(view: Any) -> Any:
    """A step so small that its graph hides nothing of what inputs take."""
    return view.seq_lens + 1


def part_of(inputs: type[Inputs], width: int, backend: Backend) -> Part:
    """A step both ways, whose fills must leave the same bytes."""
    sizes = {axis: size for axis, size in SIZES.items() if axis in inputs.slotgraph.axes}
    told: dict[str, Any] = {"sizes": sizes, "width": width, "backend": backend, "output_rows": BATCH}
    runner, other = (
        DecodeRunner(inputs, smallest, buckets=[PADDED], lowering=how, progress=False, **told)
        for how in ("auto", "foreach")
    )
    runner.capture()
    other.capture()
    captured = other.graphs.get(PADDED, frozenset())
    assert captured is not None
    declaration, sizes = runner.stage.declaration, dict(runner.stage.sizes)
    live, padded = ({**sizes, BATCH: rows, TOKENS: rows * width} for rows in (LIVE, PADDED))
    by_hand = FillByHand(declaration, backend, padded, on_device=False)
    rows = tuple(live[axis] for axis in declaration.varying)
    batches = [sample.batch for sample in draw_for(runner.stage, {BATCH: LIVE})]
    for batch in batches:
        mine, right = runner.fill(batch), by_hand(batch, rows)
        backend.synchronize()
        filled = [name for name, slot in declaration.slots.items() if slot.reads(name) is not None]
        held, wanted = ({name: getattr(view, name) for name in filled} for view in (mine, right))
        assert list(differences(held, wanted, declaration.slots, live)) == []
    return Part(runner, lambda batch: by_hand.fill(batch, rows), captured.graph.replay, batches)


@functools.cache
def parts(backend: str) -> list[Part]:
    """The three of a cycle."""
    return [part_of(inputs, width, load(backend)()) for inputs, width in KINDS]


@pytest.mark.parametrize("what", ["fill", "step"])
def test_cycle(benchmark_ways: Callable[..., Any], backend_name: str, what: str) -> None:
    """Fills alone, and whole steps of graphs with one small operator, beside their replays."""

    def cycle(call: Callable[[Part, Any], object], number: int) -> None:
        for part in parts(backend_name):
            call(part, part.batches[number])

    ways: dict[str, Callable[[Part, Any], object]] = {
        "by hand": lambda part, batch: part.fill(batch) if what == "fill" else part.both(batch),
        "ours": lambda part, batch: part.runner.fill(batch) if what == "fill" else part.runner(batch),
        "bare": lambda part, _: part.replay(),
    }
    racing = {name: functools.partial(cycle, way) for name, way in ways.items()}
    benchmark_ways(racing, range(SETS), f"{what}: a speculative cycle, {LIVE}/{PADDED} requests")
