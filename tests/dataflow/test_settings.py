"""Settings: constants of one runner that functions of computed slots ask for, on the host and on the device."""

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, EagerRunner, Inputs, Step, computed, copied
from slotgraph.dataflow.bucket import Bucket, hand_over
from slotgraph.dataflow.buffers import Buffers, allocate
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.declaration import Declaration
from slotgraph.dataflow.errors import DeclarationError
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.dataflow.sources import look_up
from slotgraph.dataflow.views import Views
from slotgraph.extend import HOST
from tests.strategies import empty, noise


@attrs.frozen
class Ranks:
    """Settings of a user's own class."""

    rank: int
    sizes: tuple[int, ...]


def tokens_of_rank(step: Step, settings: Any) -> int:
    """The host: sizes and settings."""
    return step.live(TOKENS) * 100 + step.padded(TOKENS) * 10 + int(look_up(settings, "rank"))


def all_sizes(settings: Any) -> list[int]:
    """The host: settings alone."""
    return [*look_up(settings, "sizes")]


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
    here: torch.Tensor = computed(all_sizes, shape=3, dtype=torch.int32, placement=HOST)


def right_views(batch: dict[str, torch.Tensor], ranks: Ranks, padded: dict[Any, int]) -> dict[str, list[int]]:
    """The views in plain Python."""
    live = len(batch["ids"])
    ids = batch["ids"].tolist() + [-5] * (padded[TOKENS] - live)
    lens = batch["lens"].tolist() + [7] * (padded[BATCH] - len(batch["lens"]))
    of_rank = live * 100 + padded[TOKENS] * 10 + ranks.rank
    return {
        "ids": ids,
        "lens": lens,
        "moved": [one * 3 + ranks.rank for one in ids],
        "wide": [one * sum(ranks.sizes) for one in lens],
        "of_rank": [of_rank],
        "after": [one * 3 + ranks.rank + of_rank for one in ids],
        "here": [*ranks.sizes],
    }


def shown(views: Views) -> dict[str, Any]:
    """Views as lists."""
    return {name: None if tensor is None else tensor.tolist() for name, tensor in views.items()}


ranks_of = st.builds(Ranks, st.integers(-9, 9), st.tuples(*[st.integers(-9, 9)] * 3))
SHAPES = (lambda ranks: ranks, attrs.asdict, lambda ranks: SimpleNamespace(**attrs.asdict(ranks)))
"""Settings are an object or a mapping."""
CAPACITY = {BATCH: 6, TOKENS: 9}


def fresh(declaration: Declaration) -> Buffers:
    """Poisoned buffers."""
    buffers = allocate(declaration, CAPACITY, Capabilities(), empty)
    for seed, buffer in enumerate(buffers):
        buffer.tensor.copy_(noise(tuple(buffer.tensor.shape), buffer.tensor.dtype, seed))
    buffers.distrust()
    return buffers


@given(ranks=ranks_of, shape=st.sampled_from(SHAPES), rows=st.integers(0, 6), tokens=st.integers(0, 9), data=st.data())
def test_every_way_to_fill_knows_them(*, ranks: Ranks, shape: Any, rows: int, tokens: int, data: st.DataObject) -> None:
    """Grouped, exact and handed over, and by the oracle: functions get the runner's settings, on either side."""
    declaration = Ranked.slotgraph.under(shape(ranks))
    batch = {"ids": noise((tokens,), torch.int64, rows), "lens": noise((rows,), torch.int32, tokens)}
    live = {BATCH: rows, TOKENS: tokens}
    padded = {BATCH: data.draw(st.integers(rows, 6)), TOKENS: data.draw(st.integers(tokens, 9))}
    sizes = tuple(live[axis] for axis in declaration.varying)
    ready = Bucket(declaration, padded, Capabilities(), fresh(declaration)).fill(batch, sizes)
    ready.compute_on_device()
    assert shown(ready.views) == right_views(batch, ranks, padded)
    by_hand = fill_slot_by_slot(declaration, fresh(declaration), Capabilities(), Step(live, padded), batch)
    assert shown(by_hand) == right_views(batch, ranks, padded)
    exact = Bucket(declaration, CAPACITY, Capabilities(), fresh(declaration), exact=True)
    for ready in (exact.fill(batch, sizes), hand_over(exact, batch, sizes)):
        ready.compute_on_device()
        assert shown(ready.views) == right_views(batch, ranks, live)


def test_missing_settings_are_refused_when_a_runner_is_made() -> None:
    """A slot that asks for settings where none are given is named; one that is off or carried asks for none."""
    with pytest.raises(DeclarationError, match=r"slot '\w+': its function asks for `settings`: give the runner"):
        EagerRunner(Ranked, lambda view: view, backend="cpu")

    class Switched(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        count: torch.Tensor = computed(tokens_of_rank, shape=1, dtype=torch.int64, when=lambda _: False)
        own: torch.Tensor = computed(tokens_of_rank, shape=1, dtype=torch.int64)

    runner = EagerRunner(Switched, lambda view: (view.count, view.own), carry=("own",), backend="cpu")
    count, own = runner({"ids": torch.tensor([4, 5]), "own": torch.tensor([77])})
    assert count is None
    assert own.tolist() == [77]
