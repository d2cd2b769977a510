"""torch.compile over functions that call runners: the compiler leaves them alone, and compiles what is around them."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slotgraph import DecodeRunner, EagerRunner
from slotgraph.dataflow.capabilities import LADDER
from tests.runners import prefilled
from tests.runners.models import PlainInputs, plain_step, random_batch

BATCHES = [(rows, seed) for seed, rows in enumerate((3, 8, 3, 9, 4))]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing is left of what other tests compiled, nor of this one's."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def called(runner: Any, batch: Any) -> Any:
    """A step between other operators."""
    return runner({**batch, "weights": torch.relu(batch["weights"]) + 1}) * 2


def filled(runner: Any, batch: Any) -> Any:
    """A fill and a replay."""
    view = runner.fill({**batch, "weights": torch.relu(batch["weights"]) + 1})
    return runner.replay(view) * 2


def capture(runner: Any) -> None:
    """A capture."""
    runner.capture()


def called_plainly(runner: Any, batch: Any) -> Any:
    """A step of any declaration."""
    return runner(batch) * 2


def decided(runner: Any, batch: Any) -> Any:
    """What else a runner is asked."""
    decision, stats = runner.decide(batch), runner.stats()
    return batch["ids"] * 2 + (decision.bucket or 0) * bool(stats)


@pytest.mark.parametrize("lowering", LADDER)
def test_every_step_is_right(lowering: str) -> None:
    """Captured, eager and late captured steps, by every use, give what they give without the compiler."""
    for lazy, use in itertools.product((False, True), (called, filled, decided)):
        options: dict[str, Any] = {"backend": "cpu-capture", "lowering": lowering, "lazy": lazy, "progress": False}
        compiled: Any = torch.compile(use, backend="eager")
        one, other = (DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], **options) for _ in range(2))
        one.capture()
        other.capture()
        for rows, seed in BATCHES:
            batch = random_batch(rows, seed)
            assert torch.equal(compiled(one, batch), use(other, batch))


@pytest.mark.parametrize("inside", [False, True])
def test_other_runners(*, inside: bool) -> None:
    """Eager runners and those of a stack, also in inference mode, and a capture inside of a compiled function."""
    compiled = torch.compile(called_plainly, backend="eager")
    with torch.inference_mode(mode=inside):
        eager = EagerRunner(PlainInputs, plain_step, backend="cpu")
        for rows, seed in BATCHES[:3]:
            batch = random_batch(rows, seed)
            assert torch.equal(compiled(eager, batch), called_plainly(eager, batch))
        for kind in prefilled.KINDS:
            models = [prefilled.Model(named=kind == "piecewise") for _ in range(2)]
            one, other = (prefilled.runner_of(kind, model, "cpu-capture") for model in models)
            torch.compile(capture, backend="eager")(one)
            other.capture()
            for lengths in ([2, 1], [5, 4], [1]):
                batch = prefilled.batch_of(lengths, sum(lengths))
                assert torch.equal(compiled(one, batch), called_plainly(other, batch))


def test_a_compiled_step_stays_compiled() -> None:
    """A runner inside of a compiled function runs a step that is compiled by itself as ever."""
    graphs = []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    runner = EagerRunner(
        PlainInputs, torch.compile(lambda view: view.ids + view.places, backend=counting), backend="cpu"
    )
    compiled = torch.compile(called_plainly, backend="eager")
    batch = random_batch(3, 1)
    assert torch.equal(compiled(runner, batch), (batch["ids"] + batch["places"]) * 2)
    assert graphs


def test_the_compiler_is_told_so() -> None:
    """A function that must be one graph cannot hold a runner, and torch says why."""
    runner = EagerRunner(PlainInputs, plain_step, backend="cpu")
    whole = torch.compile(called_plainly, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        whole(runner, random_batch(3, 1))
