"""Worlds: a runner of each kind, batches for it by size and seed, and what holds its outputs to the right answer."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import EagerRunner
from slotgraph.backends import Backend
from slotgraph.runners.runner import Runner
from tests.invariants.steps import Quick, Seen, Values, drawn, everything, made, on, wrong
from tests.runners import prefilled, test_draft
from tests.runners.models import Batch

BUCKETS: Final = (4, 16)


def steps_of(runner: Runner[Any]) -> int:
    """How many steps its books know of."""
    return sum(runner.stats()["steps"].values())


def any_view(view: Any, batch: Batch) -> None:
    """Outputs tell all that there is to know of a view."""
    del view, batch


@attrs.frozen(eq=False)
class World:
    runner: Any
    batch: Callable[[int, int], Batch]
    assert_right: Callable[[Any, Batch], None]
    sizes: tuple[int, ...] = (2, 7, 4, 20, 1)
    assert_view: Callable[[Any, Batch], None] = any_view

    def warm(self) -> "World":
        for seed, size in enumerate((*self.sizes, *self.sizes)):
            self.runner(self.batch(size, seed))
        return self

    def assert_well(self) -> None:
        """Its next steps are right, by a call and by halves, and each is counted once."""
        before = steps_of(self.runner)
        for seed, size in enumerate(self.sizes):
            batch = self.batch(size, 500 + seed)
            self.assert_right(self.runner(batch), batch)
            other = self.batch(size, 600 + seed)
            view = self.runner.fill(other)
            self.assert_view(view, other)
            self.assert_right(self.runner.replay(view), other)
        assert steps_of(self.runner) == before + 2 * len(self.sizes)


def world_of(runner: Any, backend: Backend, inputs: type[Quick]) -> World:
    """One of a runner whose step returns all that it sees."""

    def batch(size: int, seed: int) -> Values:
        return on(backend, drawn(size, seed, inputs=inputs))

    def assert_right(outputs: Seen, batch: Batch) -> None:
        bucket = runner.decide(batch).bucket  # one whose capture broke off is left out
        found = wrong(outputs, batch, () if bucket is None else (bucket,))
        assert not found, found

    return World(runner, batch, assert_right)


def decoding(
    backend: Backend,
    lowering: str = "auto",
    inputs: type[Quick] = Quick,
    *,
    captured: bool = True,
    buckets: tuple[int, ...] = BUCKETS,
    **options: Any,
) -> World:
    """A decode runner; batches of more than the last bucket run eagerly. The test is skipped without that lowering."""
    if lowering not in ("auto", *backend.capabilities.lowerings):
        pytest.skip(f"{backend.name} has no lowering {lowering!r}")
    runner = made(backend, lowering, inputs, {"buckets": buckets, **options})
    if captured:
        runner.capture()
    return world_of(runner, backend, inputs)


def eager(backend: Backend, inputs: type[Quick] = Quick) -> World:
    """An eager runner."""
    return world_of(EagerRunner(inputs, everything, backend=backend), backend, inputs)


def prefilling(backend: Backend, kind: str = "breakable", **options: Any) -> World:
    """A captured prefill runner, held to an eager one over a model of the same weights."""
    models = [prefilled.Model(named=kind == "piecewise").to(backend.device) for _ in range(2)]
    runner = prefilled.runner_of(kind, models[0], backend, **options)
    runner.capture()
    twin = EagerRunner(prefilled.Prefill, models[1], backend=backend)

    def batch(size: int, seed: int) -> Batch:
        lengths = [size] if size < 3 else [1, size - 2, 1]
        return prefilled.batch_of(lengths, seed, backend.device)

    def assert_right(outputs: torch.Tensor, batch: Batch) -> None:
        assert torch.equal(outputs, twin(batch))

    return World(runner, batch, assert_right)


def drafting(backend: Backend, **options: Any) -> World:
    """A captured draft runner of three steps, held to plain Python's trees."""
    runner = test_draft.made(backend, 2, 3, **options)

    def assert_view(view: Any, batch: Batch) -> None:
        positions = batch["positions"]
        assert torch.equal(view.positions[: len(positions)], positions)
        assert not view.positions[len(positions) :].any()

    return World(
        runner,
        lambda size, seed: test_draft.batch_of(size, 2, 3, seed, backend.device),
        lambda outputs, batch: test_draft.assert_right(outputs, batch, 2, 3),
        (3, 4, 1, 5),
        assert_view,
    )


WORLDS: Final[Mapping[str, Callable[[Backend], World]]] = {
    "decode": functools.partial(decoding, lowering="foreach"),
    "decode, in the graph": functools.partial(decoding, lowering="in_graph"),
    "decode, debug": functools.partial(decoding, debug=True),
    "eager": eager,
    "prefill": prefilling,
    "draft": drafting,
}
