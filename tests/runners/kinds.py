"""A runner of every kind, batches of any size for it, and what random schedules of steps must add to its books."""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, Literal

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

from slotgraph import BATCH, TOKENS, BreakableRunner, DecodeRunner, EagerRunner, Inputs, standard
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.axes import WIDTH, Axis, Sizes, extent
from slotgraph.dataflow.capabilities import HOST, LADDER, resolve_dtype
from slotgraph.dataflow.declaration import Declaration
from slotgraph.dataflow.errors import BatchError
from slotgraph.runners.hooks import Watcher
from slotgraph.runners.runner import Runner
from slotgraph.runners.statistics import Statistics
from slotgraph.speculative import DraftExtendRunner, DraftRunner, MultiLayerDraftExtendRunner
from tests.runners import prefilled
from tests.runners.models import PlainInputs, plain_runner, plain_step, random_batch

SETTINGS: Final = standard.Sharding()
TREE: Final = {standard.TOPK: 4, standard.STEPS: 3, standard.FRONT: 2, standard.VOCAB: 4, standard.FILL: 1}
MOST: Final = 20
Act = Literal["call", "fill", "replay", "replay twice", "refused", "watch"]


class DecodeCounted(standard.DecodeInputs, standard.ExpertParallel):
    """A decode step with the count that its experts need."""


class VerifyCounted(standard.TargetVerifyInputs, standard.ExpertParallel):
    """A verification with the count that its experts need."""


class PrefillCounted(standard.BreakableInputs, standard.ExpertParallel):
    """A prefill with the count that its experts need."""


@attrs.frozen(eq=False)
class Kind:
    """One kind of step: its standard declaration, and the runner that engines would run it with.

    make: what gives that runner, captured. live, padded: rows on the axis `leading`. width: the tokens of a request.
    """

    phase: str
    runner: type[Any]
    inputs: type[Inputs]
    make: Callable[["Kind", dict[str, Any]], Any]
    live: int = 3
    padded: int = 4
    width: int = 1
    leading: Axis = BATCH

    @property
    def declaration(self) -> Declaration:
        """Its slots."""
        return self.inputs.slotgraph.under(SETTINGS)

    def sizes(self, live: int) -> Sizes:
        """All sizes of a batch; a prefill has one request."""
        fixed = {standard.HIDDEN: 5, WIDTH: self.width, **TREE}
        if self.leading == TOKENS:
            return {BATCH: 1, TOKENS: live, **fixed}
        return {BATCH: live, TOKENS: live * self.width, **fixed}

    def captured(self, backend: Backend, **options: Any) -> Any:
        """A runner that is ready for batches."""
        known = {*self.inputs.slotgraph.axes} - {WIDTH, BATCH, TOKENS}
        sizes = {axis: size for axis, size in self.sizes(1).items() if axis in known}
        runner = self.make(self, {"sizes": sizes, "settings": SETTINGS, "backend": backend, **options})
        if self.phase != "eager":
            runner.capture()
        return runner

    def batch(self, backend: Backend, live: int, number: int = 0) -> Any:
        """A batch with seeded values, all of them others than under another number."""
        seeded, sizes, made = torch.Generator().manual_seed(live + number), self.sizes(live), SimpleNamespace()
        for name, slot in self.declaration.slots.items():
            if slot.reads(name) is not None:
                shape, dtype = extent(slot.shape, sizes), resolve_dtype(slot.dtype, backend.capabilities)
                values = torch.randint(100 * number + 2, 100 * number + 102, shape, device="cpu", generator=seeded)
                if name == "extend_seq_lens":
                    values = torch.tensor([sizes[TOKENS]], device="cpu")
                setattr(made, name, values.to(dtype).to("cpu" if slot.placement == HOST else backend.device))
        return made


class Stack(nn.Module):
    """What is captured of a prefill."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """As small as one can be."""
        return positions + 1


def next_of(view: Any, _: Any = None) -> Any:
    """The step: as small as one can be."""
    return view.seq_lens + 1


def drafted(view: Any, _: Any) -> tuple[torch.Tensor, None]:
    """A draft model."""
    return view.positions[:, None].expand(-1, TREE[standard.TOPK]).float(), None


def _decoding(kind: Kind, options: dict[str, Any]) -> Any:
    options |= {"width": kind.width, "output_rows": BATCH, "buckets": [kind.padded], "progress": False}
    return DecodeRunner(kind.inputs, next_of, **options)


def _running_eagerly(kind: Kind, options: dict[str, Any]) -> Any:
    return EagerRunner(kind.inputs, next_of, no_copy=False, **{n: one for n, one in options.items() if n != "lowering"})


def _prefilling(kind: Kind, options: dict[str, Any]) -> Any:
    stack, step = Stack(), lambda view: stack(view.positions)
    options |= {"max_batch": 3, "output_rows": TOKENS, "buckets": [kind.padded], "progress": False}
    return BreakableRunner(kind.inputs, step, stack=stack, **options)


def _drafting(kind: Kind, options: dict[str, Any]) -> Any:
    options |= {"topk": TREE[standard.TOPK], "steps": TREE[standard.STEPS], "buckets": [kind.padded], "progress": False}
    return DraftRunner(kind.inputs, drafted, **options)


def _extending(kind: Kind, options: dict[str, Any]) -> Any:
    step: Any = next_of if kind.runner is DraftExtendRunner else [next_of] * TREE[standard.STEPS]
    return kind.runner(kind.inputs, step, width=kind.width, buckets=[kind.padded], progress=False, **options)


STANDARD: Final = {
    kind.phase: kind
    for kind in (
        Kind("decode", DecodeRunner, DecodeCounted, _decoding),
        Kind("verify", DecodeRunner, VerifyCounted, _decoding, width=8),
        Kind("eager", EagerRunner, standard.EagerInputs, _running_eagerly),
        Kind("prefill", BreakableRunner, PrefillCounted, _prefilling, live=11, padded=16, leading=TOKENS),
        Kind("draft", DraftRunner, standard.DraftInputs, _drafting, width=TREE[standard.TOPK]),
        Kind("extend", DraftExtendRunner, standard.DraftExtendInputs, _extending, width=8),
        Kind(
            "multi-layer",
            MultiLayerDraftExtendRunner,
            standard.MultiLayerDraftExtendInputs,
            _extending,
            width=TREE[standard.FRONT] + 8,
        ),
    )
}
"""By the name of its phase."""


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


def _plain(backend: Backend, lowering: str, **options: Any) -> Counted:
    runner = plain_runner(backend, lowering=lowering, **options)
    buckets, why = ((), "disabled") if "graphs" in options else ((4, 8), "too_large")
    return Counted(runner, lambda rows: random_batch(rows, rows), buckets, why)


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
    most = kind.padded if phase == "multi-layer" else MOST  # its chained slots are bound, and cannot grow
    runner = kind.captured(backend, lowering=lowering)
    return Counted(runner, lambda rows: kind.batch(backend, rows, rows), (kind.padded,), most=most)


_MAKERS: Mapping[str, Callable[..., Counted]] = {
    "decode": _plain,
    "lazy": functools.partial(_plain, lazy=True),
    "graphs off": functools.partial(_plain, graphs=False),
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
                raise AssertionError("a batch that brings nothing was taken")
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
