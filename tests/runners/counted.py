"""Runners of every kind and lowering, and what random schedules of steps must add to their books, in plain code."""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
from hypothesis import strategies as st

from slotgraph import EagerRunner
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError
from slotgraph.runners.runner import Runner
from slotgraph.runners.statistics import Statistics
from slotgraph.runners.watching import Watcher
from tests.runners import prefilled
from tests.runners.kinds import Kind, Scale, kinds
from tests.runners.models import PlainInputs, plain_runner, plain_step, random_batch

Act = Literal["call", "fill", "replay", "replay twice", "refused", "watch"]
TINY = Scale(requests=(3, 4), tokens=(11, 16), prompts=1, most_prompts=3, hidden=5)
STANDARD = {kind.phase: kind for kind in kinds(TINY)}
MOST = 20


@attrs.frozen(eq=False)
class Counted:
    """A runner, batches of any number of rows for it, its buckets, and why what fits none of them runs eagerly.

    most: rows that it takes at all.
    """

    runner: Runner[Any]
    make: Callable[[int], Any]
    buckets: tuple[int, ...]
    why: str = "too_large"
    most: int = MOST

    def batch(self, rows: int) -> Any:
        """A batch of so many rows, or of the most that are taken."""
        return self.make(min(rows, self.most))

    def bucket(self, rows: int) -> int | None:
        """The one that such a batch goes to."""
        rows = min(rows, self.most)
        return next((size for size in self.buckets if size >= rows), None)


@attrs.frozen(kw_only=True, eq=False)
class Lowered(Kind):
    """A kind whose fills are done in a given way."""

    lowering: str

    def options(self, backend: Backend) -> dict[str, Any]:
        """Its options, and the lowering."""
        return {**super().options(backend), "lowering": self.lowering}


def _plain(backend: Backend, lowering: str) -> Counted:
    return Counted(plain_runner(backend, lowering=lowering), lambda rows: random_batch(rows, rows), (4, 8))


def _off(backend: Backend, lowering: str) -> Counted:
    runner = plain_runner(backend, lowering=lowering, graphs=False)
    return Counted(runner, lambda rows: random_batch(rows, rows), (), "disabled")


def _lazy(backend: Backend, lowering: str) -> Counted:
    return Counted(plain_runner(backend, lowering=lowering, lazy=True), lambda rows: random_batch(rows, rows), (4, 8))


def _eager(backend: Backend, lowering: str, *, no_copy: bool = False) -> Counted:
    del lowering
    runner = EagerRunner(PlainInputs, plain_step, backend=backend, no_copy=no_copy)
    return Counted(runner, lambda rows: random_batch(rows, rows), (), "always_eager")


def _prefill(backend: Backend, lowering: str, *, kind: str) -> Counted:
    model = prefilled.Model(named=kind == "piecewise").to(backend.device)
    runner = prefilled.runner_of(kind, model, backend, lowering=lowering)
    runner.capture()
    return Counted(runner, lambda rows: prefilled.batch_of([rows], rows, backend.device), (4, 16))


def _standard(backend: Backend, lowering: str, *, phase: str) -> Counted:
    kind = STANDARD[phase]
    given = {field.name: getattr(kind, field.name) for field in attrs.fields(Kind)}
    lowered = Lowered(**given, lowering=lowering)
    runner: Any = lowered.make(lowered, backend)
    most = lowered.padded if phase == "multi-layer" else MOST  # its chained slots are bound, and cannot grow
    return Counted(runner, lambda rows: lowered.batch(backend, rows, rows), (lowered.padded,), most=most)


_MAKERS: Mapping[str, Callable[..., Counted]] = {
    "decode": _plain,
    "lazy": _lazy,
    "graphs off": _off,
    "eager": _eager,
    "no copy": functools.partial(_eager, no_copy=True),
    "breakable": functools.partial(_prefill, kind="breakable"),
    "piecewise": functools.partial(_prefill, kind="piecewise"),
    **{phase: functools.partial(_standard, phase=phase) for phase in ("verify", "draft", "extend", "multi-layer")},
}
_LOWERINGS: Mapping[str, Sequence[str]] = {"decode": LADDER, "lazy": LADDER[:1], "piecewise": ("auto",)}
EVERY_KIND = [(kind, lowering) for kind in _MAKERS for lowering in _LOWERINGS.get(kind, ("auto",))]


@functools.cache
def counted(kind: str, backend: str, lowering: str) -> Counted:
    """One of each, which tests share: its books go on from test to test."""
    return _MAKERS[kind](choose(backend), lowering)


def anew(kind: str, backend: str, lowering: str) -> Counted:
    """One that no test had before."""
    return _MAKERS[kind](choose(backend), lowering)


schedules: st.SearchStrategy[list[tuple[Act, int]]] = st.lists(
    st.tuples(
        st.sampled_from(("call", "call", "call", "fill", "replay", "replay twice", "refused", "watch")),
        st.integers(1, MOST) | st.integers(1, 3),
    ),
    min_size=1,
    max_size=30,
)


def act(one: Counted, schedule: Sequence[tuple[Act, int]]) -> None:
    """Do it all."""
    runner, watcher = one.runner, Watcher()
    for what, rows in schedule:
        if what == "watch":
            (runner.watch.remove if watcher in runner.watch.watchers else runner.watch.add)(watcher)
        elif what == "refused":
            for use in (runner, runner.fill):
                try:
                    use(object())
                except BatchError:
                    continue
                message = "a batch that brings nothing was taken"
                raise AssertionError(message)
        elif what == "call":
            runner(one.batch(rows))
        else:
            view = runner.fill(one.batch(rows))
            for _ in range(("fill", "replay", "replay twice").index(what)):
                runner.replay(view)
    runner.watch.remove(watcher)


@attrs.define
class Books:
    """Steps and live rows by bucket, and by reason; and fills of buckets."""

    buckets: "collections.Counter[tuple[str, int]]" = attrs.field(factory=collections.Counter)
    eager: "collections.Counter[tuple[str, str]]" = attrs.field(factory=collections.Counter)
    fills: int = 0

    @classmethod
    def of(cls, stats: Statistics) -> "Books":
        """As a runner says."""
        books = cls(fills=sum(stats["lowerings"].values()))
        for size, bucket in stats["buckets"].items():
            assert bucket["padded"] == size * bucket["steps"]
            assert bucket["waste"] == (bucket["padded"] - bucket["live"]) / bucket["padded"]
            books.buckets += collections.Counter({("steps", size): bucket["steps"], ("live", size): bucket["live"]})
        for why, eager in stats["eager"].items():
            books.eager += collections.Counter({("steps", why): eager["steps"], ("live", why): eager["live"]})
        return books

    def expect(self, one: Counted, schedule: Sequence[tuple[Act, int]]) -> None:
        """Add what a schedule must add."""
        times: dict[Act, tuple[int, int]] = {"call": (1, 1), "fill": (0, 1), "replay": (1, 1), "replay twice": (2, 1)}
        for what, wanted in schedule:
            steps, fills = times.get(what, (0, 0))
            bucket, rows = one.bucket(wanted), min(wanted, one.most)
            if bucket is None:
                self.eager += collections.Counter({("steps", one.why): steps, ("live", one.why): steps * rows})
            else:
                self.buckets += collections.Counter({("steps", bucket): steps, ("live", bucket): steps * rows})
                self.fills += fills
