"""Worlds: a runner of each kind, its batches, what holds its outputs to the right answer; and errors injected there."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

import attrs
import pytest
import torch

import slotgraph
from slotgraph import EagerRunner
from slotgraph.backends import Backend
from slotgraph.errors import ReplayError
from slotgraph.runners.engine.runner import Runner
from tests.invariants import steps
from tests.invariants.steps import Quick, Seen, Values, drawn, everything, on, runner_of, wrong
from tests.runners import prefilled, test_draft
from tests.runners.models import Batch, ready, same_batch, snapshot

BUCKETS: Final = (4, 16)
OURS: Final = (str(Path(slotgraph.__file__).parent), *(str(one.__file__) for one in (steps, prefilled, test_draft)))
"""Where points count: the package, and the steps that it runs."""
POINTS: Final = frozenset({"call", "c_call", "c_return"})
FEW: Final = 40 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 5  # points of each act that are tried
Act = Callable[[Any, Batch, Any], object]
ACTS: Final[dict[str, Act]] = {
    "call": lambda runner, batch, _: runner(batch),
    "fill": lambda runner, batch, _: runner.fill(batch),
    "replay": lambda runner, _, view: runner.replay(view),
}


def steps_of(runner: Runner[Any]) -> int:
    """How many steps its books know of."""
    return sum(runner.stats()["steps"].values())


@attrs.frozen(eq=False)
class World:
    runner: Any
    batch: Callable[[int, int], Batch]
    assert_right: Callable[[Any, Batch], None]
    sizes: tuple[int, ...] = (2, 7, 4, 20, 1)
    assert_view: Callable[[Any, Batch], None] = attrs.field(default=lambda *_: None)

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
    runner = runner_of(backend, lowering, inputs, captured=captured, buckets=buckets, **options)
    return world_of(runner, backend, inputs)


def eager(backend: Backend, inputs: type[Quick] = Quick) -> World:
    """An eager runner."""
    return world_of(EagerRunner(inputs, everything, backend=backend), backend, inputs)


def prefilling(backend: Backend, kind: str = "breakable", **options: Any) -> World:
    """A captured prefill runner, held to an eager one over a model of the same weights."""
    models = [prefilled.Model(named=kind == "piecewise").to(backend.device) for _ in range(2)]
    runner = ready(prefilled.runner_of(kind, models[0], backend, **options))
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


class InjectedError(Exception):
    """What no code of the library expects."""


@attrs.define(eq=False)
class Injection:
    """Raises once, when a block has come to its n-th point in our code.

    A point is where a function of ours begins, where it calls one of C, which then may fail without having done
    anything, and where that has returned, so that it is done: it is there that Python handles signals.
    at: n, from 1 on; 0 for never. error: what is raised. seen: points so far. where: the place of the raise.
    """

    at: int = 0
    error: type[BaseException] = InjectedError
    seen: int = 0
    where: str = ""
    _before: Any = None

    def __enter__(self) -> Self:
        """From here on."""
        self._before = sys.getprofile()
        sys.setprofile(self._point)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Up to here; what was injected goes no further, nor what our code made of it."""
        sys.setprofile(self._before)
        while error is not None and self.where:
            if isinstance(error, self.error):
                return True
            error = error.__cause__
        return False

    def _point(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in POINTS or not code.co_filename.startswith(OURS):
            return
        if event == "call" and code.co_flags & inspect.CO_GENERATOR:  # one that is closed has nobody to raise to
            return
        if event == "c_call" and getattr(argument, "__name__", "") == "__exit__":
            return  # a lock that is let go of does not fail
        self.seen += 1
        if self.seen == self.at:
            what = getattr(argument, "__qualname__", "") or code.co_qualname
            self.where = f"{code.co_filename}:{frame.f_lineno} {event} {what}"
            raise self.error(self.where)


def points(total: int, few: int = FEW) -> Iterator[tuple[int, type[BaseException]]]:
    """Points out of so many, and what is raised there."""
    stride = max(1, total // few) | 1  # odd, so that both kinds of errors come
    for at in range(1, total + 1, stride):
        yield at, KeyboardInterrupt if at % 2 else InjectedError


def interrupt(world: World, act: Act, size: int, at: int, error: type[BaseException] = InjectedError) -> str:
    """Break an act off at one point, and hold all that is left to what it was; where it was, or nothing."""
    runner, prior = world.runner, world.batch(3, 3)
    view = runner.fill(prior)
    batch = world.batch(size, at)
    given, before = snapshot(batch), steps_of(runner)
    with Injection(at, error) as injection:
        act(runner, batch, view)
    assert torch.is_grad_enabled()
    assert same_batch(batch, given)
    counted = steps_of(runner) - before
    assert counted in ({0, 1} if injection.where and act is not ACTS["fill"] else {int(act is not ACTS["fill"])})
    try:
        outputs = runner.replay(view)
    except ReplayError as refused:
        assert "was not filled last" in str(refused)
    else:
        world.assert_right(outputs, prior)
    world.assert_well()
    return injection.where


def interrupt_everywhere(world: World, act: Act, size: int, step: int = 0, few: int = FEW) -> None:
    """The same at some points of an act that was done before; each makes the batch larger by so many rows."""
    total = 0
    for seed in (1, 2):
        view, batch = world.runner.fill(world.batch(3, seed)), world.batch(size, seed)
        with Injection() as counting:
            act(world.runner, batch, view)
        total = counting.seen
    tried = enumerate(points(total, few))
    seen = {interrupt(world, act, size + number * step, at, error) for number, (at, error) in tried}
    assert len(seen) > 1  # a later step may be shorter than the one that was counted
