"""Random games over buckets on several axes and variants: whatever comes after whatever, beside plain code.

`HYPOTHESIS_PROFILE=long` plays them for as many steps as a night has.
"""

import functools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import BATCH, TOKENS, Axis, BreakableRunner, DecodeRunner, Inputs, Step, computed, copied
from slotgraph.backends import Backend
from slotgraph.graphs import GraphRunner, Variant, variant
from slotgraph.runners.engine.statistics import Decision
from tests.runners.models import ready
from tests.strategies import same_bytes

KV: Final = Axis("KV")
MANY: Final = 8
"""Steps of one game."""


class Ragged(Inputs):  # requests of any number of tokens over a context of their own, and what engines tell kernels
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    owners: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    table: torch.Tensor = copied(BATCH, KV, dtype=torch.int64, pad=-3)
    bias: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=7, default=None)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=TOKENS, dtype=torch.int64)
    told: torch.Tensor = computed(
        lambda most, step: [most, step.live(TOKENS), step.padded(KV)], shape=3, dtype=torch.int64
    )
    most: int = 12  # the longest context
    loras: int = 0
    causal: bool = False


def step(view: Any) -> torch.Tensor:
    """[BATCH] sums over what requests own; it reads no context beyond the number on the host."""
    places = torch.arange(view.table.shape[1], device=view.table.device)
    seen = (places < view.lengths[:, None]) & (places < view.most)
    total: torch.Tensor = torch.where(seen, view.table, 0).sum(1)
    tokens = view.twice if view.causal else view.twice + 1
    live = torch.arange(len(tokens), device=tokens.device) < view.told[1]
    total = total.index_add(0, view.owners, torch.where(live, tokens, 0))
    total = total * (view.loras + 1)
    return total if view.bias is None else total + view.bias


def expected(batch: Mapping[str, Any]) -> list[int]:
    """The same, request by request."""
    found = []
    for request, (length, row) in enumerate(zip(batch["lengths"].tolist(), batch["table"].tolist(), strict=True)):
        total = sum(row[:length])
        for owner, token in zip(batch["owners"].tolist(), batch["ids"].tolist(), strict=True):
            total += (2 * token + (not batch.get("causal", False))) * (owner == request)
        total *= batch.get("loras", 0) + 1
        found.append(total + (0 if batch.get("bias") is None else int(batch["bias"][request])))
    return found


Buckets = Any
GRIDS: Final[dict[str, dict[str, Any]]] = {
    "grid": {"buckets": {BATCH: [1, 3, 8], KV: [4, 12], TOKENS: [6, 30]}},
    "pairs": {
        "buckets": [{BATCH: 1, KV: 12}, {BATCH: 8, KV: 4}, {BATCH: 4, KV: 8}, {BATCH: 2, KV: 16}],
        "sizes": {TOKENS: 30},
    },
    "cost": {
        "buckets": {KV: [3, 16], BATCH: [2, 5, 8]},
        "sizes": {TOKENS: 24},
        "cost": lambda sizes: sizes[BATCH] - sizes[KV],
    },
    "related": {"buckets": {BATCH: [1, 4, 8], KV: [5, 16]}, "relations": {TOKENS: BATCH * 2}},
    "waste": {"buckets": {BATCH: [2, 8], KV: [4, 16]}, "sizes": {TOKENS: 30}, "max_waste": 0.7},
    "one": {"buckets": {BATCH: [2, 8]}, "sizes": {TOKENS: 30, KV: 16}},
    "decode": {"buckets": [1, 4, 8], "width": 2, "sizes": {KV: 16}},
}
VARIANTS: Final[dict[str, list[Variant]]] = {
    "none": [],
    "most": [variant("most", at_least=[4, 9, 16])],
    "loras": [variant("loras", (0, 2)), variant("causal")],
    "all": [variant("causal"), variant("most", at_least=[6, 16]), variant("loras", (0, 1))],
}


@attrs.frozen(eq=False)
class Pair:
    """The same runner twice: by a lowering, and slot by slot."""

    fast: Any
    slow: Any
    options: Mapping[str, Any]
    variants: list[Variant]


@functools.lru_cache(64)
def pair_of(backend: Backend, lowering: str, grid: str, variants: str, *, lazy: bool, copies: bool) -> Pair:
    """Runners that are kept from game to game, so that sizes pile up."""
    kind: Any = DecodeRunner if grid == "decode" else GraphRunner
    options = {"output_rows": BATCH, "absent": [{"bias"}], "variants": VARIANTS[variants], "lazy": lazy, **GRIDS[grid]}
    own = {"backend": backend, "progress": False, "outputs": "copy" if copies else "view"}
    fast, slow = (ready(kind(Ragged, step, lowering=one, **options, **own)) for one in (lowering, "slot_by_slot"))
    return Pair(fast, slow, options, VARIANTS[variants])


def batch_of(seed: int, device: torch.device, each: int | None, sizes: Any = None) -> dict[str, Any]:
    """A batch of any sizes, some beyond every bucket, with fields that graphs have, have not, or need not tell."""
    draw, made = random.Random(seed), torch.Generator().manual_seed(seed)
    requests, context, tokens = sizes or (draw.randint(1, 10), draw.randint(1, 18), draw.randint(1, 32))
    tokens = tokens if each is None else requests * each

    def numbers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=made).to(device, dtype)

    batch: dict[str, Any] = {
        "ids": numbers(1, 50, tokens),
        "owners": numbers(0, requests, tokens),
        "lengths": numbers(0, context + 1, requests, dtype=torch.int32),
        "table": numbers(1, 100, requests, context),
    }
    if draw.random() < 0.5:
        batch["bias"] = numbers(1, 9, requests)
    longest = int(batch["lengths"].max())
    batch["most"] = max(longest, draw.choice([0, 0, 12, 12, 16, 20]))
    batch["loras"] = draw.choice([0, 0, 0, 1, 2, 3])
    batch["causal"] = draw.random() < 0.3
    return batch


def chosen(pair: Pair, batch: Mapping[str, Any]) -> Any:
    """The bucket that the documentation promises, found among all, or None if the batch runs eagerly."""
    runner, options = pair.fast, pair.options
    live = {BATCH: len(batch["lengths"]), KV: batch["table"].shape[1], TOKENS: len(batch["ids"])}
    for one in pair.variants:
        value = batch[one.field]
        if (value > one.values[-1]) if one.at_least else value not in one.values:
            return None
    known = {one.field for one in pair.variants}
    usual = {"most": 12, "loras": 0, "causal": False}
    if any(batch[name] != value for name, value in usual.items() if name not in known):
        return None
    holding = {
        bucket: padded
        for bucket, padded in runner.sizes.items()
        if all(rows <= padded[axis] for axis, rows in live.items() if axis in padded)
    }
    cost: Callable[[Any], float] = options.get("cost", lambda _: 0)

    def order(bucket: Any) -> Any:
        sizes = bucket if isinstance(bucket, tuple) else (bucket,)
        return cost(holding[bucket]), math.prod(sizes), sum(sizes), sizes

    best = min(holding, key=order, default=None)
    if best is not None and "max_waste" in options:
        padded = math.prod(best)
        if (padded - live[BATCH] * live[KV]) / padded > options["max_waste"]:
            return None
    return best


def check_one(pair: Pair, batch: dict[str, Any]) -> Decision:
    """Route, fill and run one batch by both runners; what the step saw is what the graph froze, or the batch's own."""
    decision: Decision = pair.fast.decide(batch)
    assert decision.bucket == chosen(pair, batch), decision
    views = [runner.fill(batch) for runner in (pair.fast, pair.slow)]
    for one in pair.variants:
        own, shown = batch[one.field], getattr(views[0], one.field)
        if decision.bucket is None:
            assert shown == own
        else:
            assert shown == (min(n for n in one.values if n >= own) if one.at_least else own)
            assert f"{one.field}={shown!r}" in decision.variant
    for name in ("told", "lengths", "table", "owners", "ids", "bias"):
        left, right = (getattr(view, name) for view in views)
        assert (left is None) == (right is None)
        assert left is None or same_bytes(left, right), name
    outputs = [runner.replay(view).tolist() for runner, view in zip((pair.fast, pair.slow), views, strict=True)]
    assert outputs == [expected(batch)] * 2
    assert pair.fast(batch).tolist() == outputs[0]  # as a call, whose route is known by now
    return decision


EACH: Final = {"decode": 2, "related": 2}
"""Tokens of a request, where they follow from requests."""


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_whatever_comes_is_right(backend: Backend, data: st.DataObject) -> None:
    """By any lowering, on any grid, with any variants: the promised graph runs, and gives what plain code gives."""
    able = [one for one in backend.capabilities.lowerings if one != "slot_by_slot"]
    lowering, grid = data.draw(st.sampled_from(able)), data.draw(st.sampled_from([*GRIDS]))
    kind = data.draw(st.sampled_from([*VARIANTS]))
    pair = pair_of(backend, lowering, grid, kind, lazy=data.draw(st.booleans()), copies=data.draw(st.booleans()))
    before = pair.fast.stats()
    each, went = EACH.get(grid), list[Decision]()
    for _ in range(MANY):
        went.append(check_one(pair, batch_of(data.draw(st.integers(0, 1 << 30)), backend.device, each)))
    after = pair.fast.stats()
    steps = {name: after["steps"][name] - before["steps"][name] for name in after["steps"]}
    taken = sum(one.bucket is not None for one in went)
    assert steps == {"graph": 2 * taken, "eager": 2 * (MANY - taken)}
    counted = sum(after["rows"].values()) - sum(before["rows"].values())
    assert counted == 2 * taken


class Layer(torch.nn.Module):
    """A stack that reads a number of the host, which a graph freezes."""

    def forward(self, ids: torch.Tensor, most: int) -> torch.Tensor:
        """Count what is within it."""
        return ids * 3 + (ids < most)


class Prefilled(Inputs):  # one request owns all tokens
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)
    most: int = 50

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """All tokens are those of one request."""
        return {"lens": [step.live(TOKENS)]}


class Model(torch.nn.Module):
    """A step around a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Layer()

    def forward(self, view: Prefilled) -> torch.Tensor:
        """[TOKENS]."""
        made: torch.Tensor = self.stack(view.ids, view.most)
        return made + view.most


@given(data=st.data())
def test_stacks_have_variants(data: st.DataObject) -> None:
    """A prefill runner's graphs have them, too: the whole step sees the number that the stack's graph froze."""
    runner: Any = stacked()
    for _ in range(MANY):
        tokens, most = data.draw(st.integers(1, 10)), data.draw(st.sampled_from([20, 50, 51, 99, 100, 101]))
        ids = torch.arange(tokens) * 11
        batch = {"ids": ids, "lens": torch.tensor([tokens]), "most": most}
        sees = next((one for one in (50, 100) if one >= most), most) if tokens <= 8 else most
        assert torch.equal(runner(batch), ids * 3 + (ids < sees) + sees)
        assert (runner.decide(batch).path == "eager") == (tokens > 8 or most > 100)


@functools.cache
def stacked() -> Any:
    """One for all examples."""
    options: Any = {"output_rows": TOKENS, "stack": "stack", "backend": "cpu-capture", "progress": False}
    numbers = [variant("most", at_least=[50, 100])]
    return ready(BreakableRunner(Prefilled, Model(), buckets=[4, 8], variants=numbers, **options))


@pytest.mark.parametrize("grid", ["cost", "decode"])
def test_a_check_finds_nothing(backend: Backend, grid: str) -> None:
    """All checks, on each bucket."""
    pair = pair_of(backend, backend.capabilities.lowerings[0], grid, "most", lazy=False, copies=False)
    runner, each = pair.fast, EACH.get(grid)

    def made(rows: Any, seed: torch.Generator) -> dict[str, Any]:
        sizes = dict(zip(runner.axes, rows if isinstance(rows, tuple) else (rows,), strict=True))
        own = sizes.get(BATCH, 1), sizes.get(KV, 5), sizes.get(TOKENS, 9)
        return batch_of(seed.initial_seed(), backend.device, each, own) | {"loras": 0, "causal": False}

    report = slotgraph.check(runner, made, rounds=1, progress=False)
    assert report.findings == ()
    assert report.steps["parity"] >= len(runner.sizes)
