"""Settings: constants of one runner that functions of computed slots ask for, on the host and on the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, EagerRunner, Inputs, Step, computed, copied
from slotgraph.dataflow.bucket import Bucket, hand_over
from slotgraph.dataflow.buffers import Buffers
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import DeclarationError
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.dataflow.sources import look_up
from slotgraph.dataflow.views import Views
from slotgraph.extend import HOST
from tests.strategies import noise, poisoned

CAPACITY = {BATCH: 6, TOKENS: 9}


def tokens_of_rank(step: Step, settings: Any) -> int:
    """The host: sizes and settings."""
    return step.live(TOKENS) * 100 + step.padded(TOKENS) * 10 + int(look_up(settings, "rank"))


def shifted(ids: torch.Tensor, settings: Any) -> torch.Tensor:
    """The device: a slot and settings."""
    return ids * 3 + int(look_up(settings, "rank"))


def spread(settings: Any, lens: torch.Tensor, out: torch.Tensor) -> None:
    """The device, into its own buffer, from settings named first."""
    torch.mul(lens, sum(look_up(settings, "sizes")), out=out)


class Ranked(Inputs):
    """Settings wherever a function may ask for them, and a slot that follows from such slots."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-5)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=7)
    after: torch.Tensor = computed(lambda moved, of_rank: moved + of_rank, shape=TOKENS, dtype=torch.int64)
    moved: torch.Tensor = computed(shifted, shape=TOKENS, dtype=torch.int64)
    wide: torch.Tensor = computed(spread, shape=BATCH, dtype=torch.int32)
    of_rank: torch.Tensor = computed(tokens_of_rank, shape=1, dtype=torch.int64)
    here: torch.Tensor = computed(
        lambda settings: [*look_up(settings, "sizes")], shape=3, dtype=torch.int32, placement=HOST
    )


def assert_views(views: Views, batch: dict[str, torch.Tensor], rank: int, sizes: Any, padded: dict[Any, int]) -> None:
    """The views are what plain Python makes of the batch."""
    ids = batch["ids"].tolist() + [-5] * (padded[TOKENS] - len(batch["ids"]))
    lens = batch["lens"].tolist() + [7] * (padded[BATCH] - len(batch["lens"]))
    of_rank = len(batch["ids"]) * 100 + padded[TOKENS] * 10 + rank
    moved, wide = [one * 3 + rank for one in ids], [one * sum(sizes) for one in lens]
    after = [one + of_rank for one in moved]
    right = {"ids": ids, "lens": lens, "moved": moved, "wide": wide, "of_rank": [of_rank], "after": after}
    shown = {name: None if tensor is None else tensor.tolist() for name, tensor in views.items()}
    assert shown == {**right, "here": [*sizes]}


@given(
    rank=st.integers(-9, 9),
    sizes=st.tuples(*[st.integers(-9, 9)] * 3),
    shape=st.sampled_from([dict, SimpleNamespace]),  # settings are an object or a mapping
    rows=st.integers(0, 6),
    tokens=st.integers(0, 9),
    data=st.data(),
)
def test_every_way_to_fill_knows_them(
    *, rank: int, sizes: Any, shape: Any, rows: int, tokens: int, data: st.DataObject
) -> None:
    """Grouped, exact and handed over, and by the oracle: functions get the runner's settings, on either side."""
    slots, capabilities = Ranked.slotgraph.under(shape(rank=rank, sizes=sizes)), Capabilities()
    batch = {"ids": noise((tokens,), torch.int64, rows), "lens": noise((rows,), torch.int32, tokens)}
    live = {BATCH: rows, TOKENS: tokens}
    padded = {BATCH: data.draw(st.integers(rows, 6)), TOKENS: data.draw(st.integers(tokens, 9))}
    given_sizes = tuple(live[axis] for axis in slots.varying)

    def buffers() -> Buffers:
        return poisoned(Ranked, capabilities, CAPACITY, rows)

    by_hand = fill_slot_by_slot(slots, buffers(), capabilities, Step(live, padded), batch)
    assert_views(by_hand, batch, rank, sizes, padded)
    exact = Bucket(slots, CAPACITY, capabilities, buffers(), exact=True)
    grouped = Bucket(slots, padded, capabilities, buffers()).fill(batch, given_sizes)
    ways = ((grouped, padded), (exact.fill(batch, given_sizes), live), (hand_over(exact, batch, given_sizes), live))
    for ready, held in ways:
        ready.compute_on_device()
        assert_views(ready.views, batch, rank, sizes, held)


def test_missing_settings_are_refused_when_a_runner_is_made() -> None:
    """A slot that asks for settings where none are given is named; one that is off asks for none."""
    with pytest.raises(DeclarationError, match=r"slot '\w+': its function asks for `settings`: give the runner"):
        EagerRunner(Ranked, lambda view: view, backend="cpu")

    class Switched(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        count: torch.Tensor = computed(tokens_of_rank, shape=1, dtype=torch.int64, when=lambda _: False)

    runner = EagerRunner(Switched, lambda view: view.count, backend="cpu")
    assert runner({"ids": torch.tensor([4, 5])}) is None
