"""The strategies: what is drawn fits its declaration, and shrinks to the smallest that fails."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, EagerRunner, Inputs, copied
from slotgraph.dataflow.axes import Sizes
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.sampling import Sample
from slotgraph.runners.testing.strategies import Turn, batches, schedules, sizes
from tests.runners.testing.declared import HIDDEN, PAGES, Mixed

QUICK = settings(max_examples=300, database=None, phases=[Phase.generate, Phase.shrink], derandomize=True)
eager = EagerRunner(Mixed, lambda view: view, backend="cpu", sizes={HIDDEN: 3}, no_copy=False)


@given(live=sizes(Mixed, {BATCH: 4, HIDDEN: 7}, relations={TOKENS: BATCH * 3}))
def test_sizes(live: Sizes) -> None:
    """Every axis has one; fixed ones their own, and what follows from others follows."""
    assert live.keys() == {BATCH, TOKENS, PAGES, HIDDEN}
    assert 1 <= live[BATCH] <= 4
    assert live[TOKENS] == 3 * live[BATCH]
    assert live[HIDDEN] == 7


@given(sample=batches(Mixed, least=0))
def test_a_runner_takes_each(sample: Sample) -> None:
    """Nested, beside the batch, on the host or absent: a runner fills from it, and shows it."""
    view = eager.fill(sample.batch, **sample.side)
    assert torch.equal(view.tables, sample.batch["paging"]["tables"])
    assert (view.hidden is None) == ("proxy" not in sample.side)
    assert (view.flags is None) == ("flags" not in sample.batch)


@given(schedule=schedules(Mixed, {PAGES: 2}, turns=3))
def test_schedules(schedule: list[Turn]) -> None:
    """At most so many steps over at most three buckets; each batch fits its own, and lists are what is listed."""
    assert 1 <= len(schedule) <= 3
    for turn in schedule:
        assert all(1 <= turn.live[axis] <= turn.padded[axis] for axis in (BATCH, TOKENS, PAGES))
        batch = turn.sample.batch
        assert {name for name, value in batch.items() if isinstance(value, list)} == turn.as_lists
        assert len(batch["input_ids"]) == turn.live[TOKENS]
        assert turn.absent == {name for name in ("hidden", "flags") if name in turn.absent}


def test_numbers_shrink() -> None:
    """The smallest batch with one large number holds that number and else only the smallest."""

    class Ids(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0)

    least: Any = find(
        batches(Ids, values={"weights": (0, 1)}), lambda sample: sample.batch["ids"].sum() >= 3, settings=QUICK
    )
    assert least.batch["ids"].tolist() == [1, 1, 1]
    small: Any = find(batches(Ids), lambda sample: bool((sample.batch["weights"] > 1).any()), settings=QUICK)
    assert small.batch["ids"].tolist() == [0]
    assert small.batch["weights"].tolist() == [2.0]


def test_patterns_shrink() -> None:
    """A schedule that leaves a slot out shrinks to a step of one row, of tensors, and at most one before it."""
    least: Any = find(schedules(Mixed), lambda turns: any("flags" in turn.absent for turn in turns), settings=QUICK)
    assert len(least) <= 2
    assert least[-1].live == {BATCH: 1, TOKENS: 1, PAGES: 1, HIDDEN: 3}
    assert "flags" in least[-1].absent
    assert "as_lists" not in repr(least)


def test_slots_of_one_source_are_absent_together() -> None:
    """Of two optional slots that read one path, none is absent alone; one beside a required slot never is."""

    class Shared(Inputs):
        rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        again: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, source="rows", default=None)
        one: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, source="pair", default=None)
        other: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, source="pair", default=None)

    runner = EagerRunner(Shared, lambda view: view, backend="cpu", no_copy=False)

    @settings(max_examples=30, suppress_health_check=[HealthCheck.nested_given])
    @given(sample=batches(Shared))
    def shown(sample: Sample) -> None:
        view = runner.fill(sample.batch)
        assert view.again is not None
        assert (view.one is None) == (view.other is None) == ("pair" not in sample.batch)

    shown()


@given(data=st.data())
@settings(max_examples=5)
def test_what_cannot_be_drawn_is_said(data: st.DataObject) -> None:
    """A source that is a function, where a batch is drawn; not where the strategy is made."""

    class Called(Inputs):
        rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=lambda batch: batch.rows)

    strategy = batches(Called)
    with pytest.raises(ConfigError, match=r"slot 'rows' reads .*: a batch that suits a function cannot be drawn"):
        data.draw(strategy)
