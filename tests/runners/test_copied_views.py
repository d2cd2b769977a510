"""Copies of views: a deep copy, or one by pickle, is a batch with memory of its own; others are refused by name."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, InputBuffers, Inputs, computed, constant, copied
from slotgraph.errors import BatchError
from tests.runners import prefilled
from tests.runners.models import ready


class Copied(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    pairs: torch.Tensor = copied(2, TOKENS, 3, dtype=torch.float32, pad=9)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement="host")
    one: torch.Tensor = copied(dtype=torch.int64)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=5, default=None)
    off: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=5, when="on")
    seven: torch.Tensor = constant(7, shape=BATCH, dtype=torch.int64)
    ends: torch.Tensor = computed(lambda ids: ids.cumsum(0), shape=TOKENS, dtype=torch.int64)
    live: torch.Tensor = computed(lambda step: step.live(BATCH), dtype=torch.int64)
    tags: Any = attrs.field(factory=lambda: ["a"])
    note: str


def step(view: Copied) -> torch.Tensor:
    """Something of each slot."""
    extra = 0 if view.extra is None else view.extra
    return view.ids * view.one + view.pairs.sum((0, 2)) + view.lens + extra + view.seven + view.live


def batch_of(requests: int, seed: int, *, extra: bool = False) -> dict[str, Any]:
    """A random batch of one token a request."""
    draw = torch.Generator().manual_seed(seed)
    batch = {
        "ids": torch.randint(1, 99, (requests,), generator=draw),
        "pairs": torch.rand(2, requests, 3, generator=draw),
        "lens": torch.randint(1, 9, (requests,), generator=draw, dtype=torch.int32),
        "one": torch.randint(1, 9, (), generator=draw),
        "note": "n",
    }
    return batch | ({"extra": torch.randint(1, 9, (requests,), generator=draw)} if extra else {})


SETTINGS = {"on": False}
OPTIONS: dict[str, Any] = {"buckets": [4, 8], "absent": [{"extra"}], "settings": SETTINGS, "backend": "cpu-capture"}


def graphs(lowering: str) -> Any:
    """A captured runner."""
    return ready(DecodeRunner(Copied, step, lowering=lowering, **OPTIONS))


def pickled(protocol: int, view: Any) -> Any:
    """What another process would get."""
    return pickle.loads(pickle.dumps(view, protocol))  # noqa: S301 - our own


LOWERINGS = ("in_graph", "fused", "direct", "foreach", "slot_by_slot")
MAKERS: dict[str, Callable[[], Any]] = {
    **{lowering: functools.partial(graphs, lowering) for lowering in LOWERINGS},
    "eager": lambda: EagerRunner(Copied, step, backend="cpu", settings=SETTINGS),
    "no_copy": lambda: EagerRunner(Copied, step, backend="cpu", settings=SETTINGS, no_copy=True),
    "buffers": lambda: InputBuffers(Copied, {TOKENS: 8, BATCH: 8}, backend="cpu", settings=SETTINGS),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "within": lambda view: copy.deepcopy({"views": [view]})["views"][0],
    **{f"pickle {protocol}": functools.partial(pickled, protocol) for protocol in range(2, 6)},
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_copy_of_a_view_is_a_batch(maker: str, how: str) -> None:
    """A copy brings again what the batch brought, and shares no memory with the view."""
    runner, plain = MAKERS[maker](), EagerRunner(Copied, step, backend="cpu", settings=SETTINGS)
    for seed, (requests, extra) in enumerate([(3, True), (5, False), (1, True), (8, False)]):
        batch = batch_of(requests, seed, extra=extra)
        view = runner.fill(batch)
        made = COPIES[how](view)
        assert type(made) is Copied
        for name in ("ids", "pairs", "lens", "one", "extra"):
            due, got = batch.get(name), getattr(made, name)
            assert (got is None) if due is None else torch.equal(got, due)
            assert due is None or got.data_ptr() not in (due.data_ptr(), getattr(view, name).data_ptr())
        assert (made.off, made.note, made.tags) == (None, "n", ["a"])
        view.tags.append("b")
        runner.fill(batch_of(8, seed + 50))
        assert (made.tags, made.ids.tolist()) == (["a"], batch["ids"].tolist())
        assert torch.equal(plain(made), plain(batch))
        if maker != "buffers":
            assert torch.equal(runner(made), runner(batch))
        with pytest.raises(BatchError, match="only a view, which a fill handed out, can be narrowed"):
            made.narrow(BATCH, 0, 1)
        with pytest.raises(AttributeError, match="slot 'ends' is not in a batch"):
            _ = made.ends


def test_a_copy_of_a_micro_batch_has_its_live_rows() -> None:
    """A part of a view is copied with the live rows of that part."""
    runner = ready(DecodeRunner(Copied, step, **OPTIONS))
    batch = batch_of(5, seed=3)
    view = runner.fill(batch)
    for start, stop in ((0, 2), (2, 8), (4, 6)):
        made = copy.deepcopy(view.narrow(BATCH, start, stop))
        assert torch.equal(made.ids, batch["ids"][start:stop])
        assert torch.equal(made.pairs, batch["pairs"][:, start:stop])


def test_a_copy_of_a_breaks_view_has_its_live_tokens() -> None:
    """A prefill's view, whose requests are cut already, is copied by its live tokens, too."""
    runner, _ = prefilled.captured("breakable", "cpu-capture")
    batch = prefilled.batch_of([2, 1], seed=5)
    made = copy.deepcopy(runner.fill(batch))
    assert type(made) is prefilled.Prefill
    assert {name: getattr(made, name).tolist() for name in batch if name != "scale"} == {
        name: value.tolist() for name, value in batch.items() if name != "scale"
    }
    assert torch.equal(runner(made).clone(), runner(batch))


def test_a_shallow_copy_has_the_same_tensors() -> None:
    """A shallow copy has the same tensors: that of a view is a view, that of a batch a batch."""
    runner = ready(DecodeRunner(Copied, step, **OPTIONS))
    view = runner.fill(batch_of(3, seed=1))
    made = copy.copy(view)
    assert made is not view
    assert vars(made) == vars(view)
    assert made.narrow(BATCH, 0, 2).ids.tolist() == view.ids[:2].tolist()
    made.ids = made.ids + 1
    assert made.ids is not view.ids


def test_batches_are_copied_as_they_are() -> None:
    """An object of the class that no fill handed out is copied and pickled like any other."""
    batch = Copied(**batch_of(3, seed=2), off=None)
    for made in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):  # noqa: S301 - ours
        assert all(torch.equal(getattr(made, name), getattr(batch, name)) for name in ("ids", "pairs", "lens", "one"))
        assert (made.note, made.extra) == ("n", None)
    assert copy.copy(batch).ids is batch.ids
    assert copy.deepcopy(batch).ids is not batch.ids


def test_evolve_makes_a_batch_of_a_view() -> None:
    """attrs.evolve makes a batch of a view: what a batch does not bring is refused by name when it is read."""
    runner = ready(DecodeRunner(Copied, step, **OPTIONS))
    view = runner.fill(batch_of(3, seed=1))
    evolve: Any = attrs.evolve  # its stubs do not know that a declaration is an attrs class
    made = evolve(view, ids=view.ids + 1)
    assert torch.equal(made.ids, view.ids + 1)
    for name in ("ends", "live", "seven"):
        assert getattr(view, name) is not None
        with pytest.raises(AttributeError, match=f"slot '{name}' is not in a batch.*attrs.evolve.*fill"):
            getattr(made, name)
    batch = Copied(**batch_of(3, seed=1), off=None)
    assert evolve(batch, note="other").note == "other"
    assert "ends=NOTHING" in repr(batch)


def test_a_function_that_reads_a_computed_slot_of_the_batch_is_told() -> None:
    """A function that reads a computed slot of the batch itself is told why there is none."""

    class Asking(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        again: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=lambda batch: batch.twice)
        twice: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64)

    runner = EagerRunner(Asking, lambda view: view.again, backend="cpu")
    with pytest.raises(AttributeError, match="slot 'twice' is not in a batch"):
        runner(Asking(ids=torch.tensor([1]), again=torch.tensor([2])))
