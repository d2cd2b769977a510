"""One runner of each class over declarations alike, batches of any size for it, and what schedules add to its books."""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, get_args

import attrs
import torch
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, BreakableRunner, DecodeRunner, EagerRunner, Inputs, PrefillRunner, copied, standard
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError
from slotgraph.extend import side
from slotgraph.graphs import GraphRunner
from slotgraph.runners.engine.hooks import Watcher
from slotgraph.runners.engine.runner import Runner
from slotgraph.runners.engine.statistics import Statistics
from slotgraph.speculative import DraftExtendRunner, DraftRunner, MultiLayerDraftExtendRunner
from tests.runners import prefilled
from tests.runners.models import PlainInputs, plain_runner, plain_step, random_batch, ready

WIDE: Final = 3
MOST: Final = 20
_CLASSES: Final = (
    *(EagerRunner, DecodeRunner, GraphRunner, PrefillRunner, BreakableRunner),
    *(DraftRunner, DraftExtendRunner, MultiLayerDraftExtendRunner),
)
RUNNERS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in _CLASSES}
Act = Literal["call", "fill", "replay", "replay twice", "refused", "watch"]


class Fed(Inputs):
    """A batch, and what comes beside it: by a slot that is always there, and by one that a setting switches on."""

    tokens: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)
    hidden: torch.Tensor | None = copied(
        TOKENS, WIDE, dtype=torch.float32, pad=0, source=side("proxies.hidden"), default=None
    )
    window: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=side("window_lens"), when="window")

    @classmethod
    def placeholder(cls, step: Any) -> Mapping[str, Any]:  # one request that owns all tokens
        return {"lens": [step.live(TOKENS)]}


class Drafted(Fed):  # the same, with what a tree begins with
    topk_p: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.float32, pad=0)
    topk_index: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.int64, pad=0)


class Step:  # one row a token, another with proxies than without; its stack has no break
    def __init__(self) -> None:
        self.stack = prefilled.Inner(lambda tokens: tokens * 3)

    def __call__(self, view: Any) -> torch.Tensor:
        """A request has one token."""
        made: torch.Tensor = self.stack(view.tokens)
        return made if view.hidden is None else made + view.hidden.sum(1).long()


def drafted(_: Any, step: Any) -> tuple[torch.Tensor, None]:
    """A draft model of five words."""
    return step.input_ids[:, None].expand(-1, 5).float(), None


GRID: Final = [{"BATCH": requests, "TOKENS": tokens} for requests in (2, 4) for tokens in (2, 4)]
ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "GraphRunner": {"buckets": GRID, "output_rows": TOKENS},
    "PrefillRunner": {"splits": ["slotgraph_tests::attention"], "graphs": False},
    "BreakableRunner": {"stack": "stack", "output_rows": TOKENS},
    "DraftRunner": {"topk": 2, "steps": 2, "inputs": Drafted, "step": drafted},
    "DraftExtendRunner": {"width": 1},
    "MultiLayerDraftExtendRunner": {"width": 1, "chained": ["tokens"], "step": [lambda view, _: view.lens * 2]},
}
"""What each runner is given beside the declaration and the step; a runner without an entry needs nothing."""


def make(name: str, **given: Any) -> Any:
    """A runner, `given` arguments in the place of those that it would have."""
    usual = {"backend": "cpu-capture", "settings": {"window": False}, "inputs": Fed, "step": Step()}
    arguments = {**usual, **ARGUMENTS.get(name, {}), **given}
    return RUNNERS[name](arguments.pop("inputs"), arguments.pop("step"), **arguments)


def captured(name: str, **given: Any) -> Any:
    """The same, ready for batches."""
    runner = make(name, **({} if name in ("EagerRunner", "GraphRunner") else {"buckets": [2, 4]}), **given)
    if name != "EagerRunner":
        runner.capture()
    return runner


def batch_of(name: str, requests: int, seed: int, device: Any = "cpu") -> dict[str, Any]:
    """A random batch that the runner takes."""
    draw, each = torch.Generator().manual_seed(seed), 2 if name == "DraftRunner" else 1
    sizes = {"tokens": requests * each, "lens": requests}
    batch = {slot: torch.randint(1, 9, (size,), generator=draw) for slot, size in sizes.items()}
    if name == "DraftRunner":
        batch["topk_p"] = torch.rand(requests, 2, generator=draw)
        batch["topk_index"] = torch.randint(1, 5, (requests, 2), generator=draw)
    return {name: one.to(device) for name, one in batch.items()}


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """The tensors of what a runner returned, copied."""
    if isinstance(outputs, torch.Tensor):
        return [outputs.clone()]
    fields = [getattr(outputs, name) for name in getattr(type(outputs), "__match_args__", ())]  # of drafts
    parts = outputs if isinstance(outputs, tuple | list) else fields
    return [tensor for part in parts for tensor in tensors_of(part)]


@attrs.frozen(eq=False)
class Counted:
    """A runner, batches of any number of rows for it, its buckets, and why what fits none of them runs eagerly."""

    runner: Runner[Any]
    batch: Callable[[int], Any]
    buckets: tuple[int, ...]
    why: str = "too_large"

    def bucket(self, rows: int) -> int | None:  # the one that such a batch goes to
        return next((size for size in self.buckets if size >= rows), None)


def _plain(backend: Backend, lowering: str, **options: Any) -> Counted:
    runner = plain_runner(backend, lowering=lowering, **options)
    buckets, why = ((), "disabled") if "graphs" in options else ((4, 8), "too_large")
    return Counted(runner, lambda rows: random_batch(rows, rows), buckets, why)


def _eager(backend: Backend, _: str, *, no_copy: bool = False) -> Counted:
    runner = EagerRunner(PlainInputs, plain_step, backend=backend, no_copy=no_copy)
    return Counted(runner, lambda rows: random_batch(rows, rows), (), "always_eager")


def _prefill(backend: Backend, lowering: str, *, kind: str) -> Counted:
    model = prefilled.Model(named=kind == "piecewise").to(backend.device)
    runner = ready(prefilled.runner_of(kind, model, backend, lowering=lowering))
    return Counted(runner, lambda rows: prefilled.batch_of([rows], rows, backend.device), (4, 16))


def _other(backend: Backend, lowering: str, *, name: str) -> Counted:
    runner = captured(name, backend=backend, lowering=lowering, absent=[{"hidden"}])
    return Counted(runner, lambda rows: batch_of(name, rows, rows, backend.device), (2, 4))


_MAKERS: Final[Mapping[str, Callable[..., Counted]]] = {
    "decode": _plain,
    "lazy": functools.partial(_plain, lazy=True),
    "graphs off": functools.partial(_plain, graphs=False),
    "eager": _eager,
    "no copy": functools.partial(_eager, no_copy=True),
    **{kind: functools.partial(_prefill, kind=kind) for kind in prefilled.KINDS},
    **{name: functools.partial(_other, name=name) for name in RUNNERS if "Draft" in name},
}
_LOWERINGS: Final[Mapping[str, Sequence[str]]] = {"decode": LADDER, "lazy": LADDER[:1]}
EVERY_KIND: Final = [(kind, lowering) for kind in _MAKERS for lowering in _LOWERINGS.get(kind, ("auto",))]


def anew(kind: str, backend: str, lowering: str) -> Counted:
    """One that no test had before."""
    return _MAKERS[kind](choose(backend), lowering)


counted = functools.cache(anew)  # one of each, which tests share: its books go on from test to test
_TIMES: Final = dict(zip(get_args(Act), [(1, 1), (0, 1), (1, 1), (2, 1), (0, 0), (0, 0)], strict=True))
"""By act, its steps and its fills."""
_acts = st.sampled_from(["call", "call", *_TIMES])
schedules = st.lists(st.tuples(_acts, st.integers(1, MOST) | st.integers(1, 3)), min_size=1, max_size=30)


def act(one: Counted, schedule: Sequence[tuple[Act, int]]) -> None:
    """Do it all."""
    runner, watcher = one.runner, Watcher()
    for what, rows in schedule:
        if what == "watch":
            (runner.watch.remove if watcher in runner.watch.watchers else runner.watch.add)(watcher)
        elif what == "refused":
            for use in (runner, runner.fill):
                with suppress(BatchError):
                    use(object())
                    raise AssertionError("a batch that brings nothing was taken")
        elif what == "call":
            runner(one.batch(rows))
        else:
            view = runner.fill(one.batch(rows))
            for _ in range(_TIMES[what][0]):
                runner.replay(view)
    runner.watch.remove(watcher)


def books_of(stats: Statistics) -> "collections.Counter[Any]":
    """Steps and live rows by bucket, and by reason; and fills of buckets."""
    books: collections.Counter[Any] = collections.Counter(fills=sum(stats["lowerings"].values()))
    for size, bucket in stats["buckets"].items():
        assert bucket["padded"] == size * bucket["steps"]
        assert bucket["waste"] == (bucket["padded"] - bucket["live"]) / bucket["padded"]
    for where, counts in [*stats["buckets"].items(), *stats["eager"].items()]:
        books += collections.Counter({("steps", where): counts["steps"], ("live", where): counts["live"]})
    return books


def added_by(one: Counted, schedule: Sequence[tuple[Act, int]]) -> "collections.Counter[Any]":
    """What a schedule must add to them."""
    books: collections.Counter[Any] = collections.Counter()
    for what, rows in schedule:
        (steps, fills), where = _TIMES[what], one.bucket(rows) or one.why
        books += collections.Counter({("steps", where): steps, ("live", where): steps * rows})
        books["fills"] += 0 if where == one.why else fills
    return books
