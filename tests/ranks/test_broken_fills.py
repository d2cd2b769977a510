"""Fills that end in other errors than a refused batch: whoever waits for their rank is told, now or when they do."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from slotgraph import DecodeRunner, EagerRunner, Step, computed
from slotgraph.dataflow.errors import ComputeError, RankError
from slotgraph.runners.ranks.group import Ranks
from tests.ranks import stepping
from tests.ranks.processes import Processes
from tests.runners import prefilled


def same(factor: Any) -> Any:
    """What the batch says, whatever that is."""
    return factor


class Numbered(stepping.Counted):
    """With a number that the host computes."""

    number: torch.Tensor = computed(same, shape=1, dtype=torch.int32)
    factor: Any


class NumberedPrefill(prefilled.Prefill):
    """Likewise."""

    number: torch.Tensor = computed(same, shape=1, dtype=torch.int32)
    factor: Any

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """One request, and a number."""
        return {**super().placeholder(step), "factor": 1}


class Unreadable(dict[str, Any]):
    """A batch that cannot be read."""

    def __getitem__(self, name: str) -> Any:
        """Not at all."""
        message = f"lost {name}"
        raise OSError(message)


def runner_of(kind: str, ranks: Ranks) -> Any:
    """One of each kind, captured."""
    if kind == "eager":
        return EagerRunner(Numbered, lambda view: view.ids * view.number, ranks=ranks, backend="cpu")
    if kind == "decode":
        made: Any = DecodeRunner(
            Numbered, lambda view: view.ids * view.number, buckets=[4], ranks=ranks, backend="cpu", progress=False
        )
    else:
        model = prefilled.Model(named=False)
        made = prefilled.runner_of("breakable", model, "cpu", ranks=ranks, inputs=NumberedPrefill)
    made.capture()
    return made


def batch_of(kind: str, seed: int, factor: Any) -> dict[str, Any]:
    """A batch of either declaration, of which the host computes a number from a factor."""
    batch = prefilled.batch_of([2, 1], seed) if kind == "breakable" else stepping.batch_of(3, seed)
    return {**batch, "factor": factor}


def unreadable(rank: int, kind: str) -> list[str]:
    """Rank 1 cannot read the second of three batches."""
    runner, found = runner_of(kind, Ranks(timeout=20.0)), list[str]()
    for number in range(3):
        batch = batch_of(kind, number, number + 1)
        try:
            runner(Unreadable(batch) if rank == number == 1 else batch)
            found.append("")
        except (OSError, RankError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("kind", ["decode", "eager", "breakable"])
def test_before_the_ranks_agree(two: Processes, kind: str) -> None:
    """The others are told at once, whatever the error is, and the next step is as good as any."""
    first, second = two.run(unreadable, kind)
    assert second[1].startswith("OSError: lost ")
    assert first == ["", f"RankError: rank 1 refused its batch, so that no rank runs the step: {second[1][9:]}", ""]
    assert second == ["", second[1], ""]


def uncomputable(rank: int, kind: str) -> str:
    """Rank 1 cannot compute a slot of the second step, and comes to no other."""
    runner = runner_of(kind, Ranks(timeout=1.0))
    runner(batch_of(kind, 1, 2))
    if rank == 1:
        with pytest.raises(ComputeError) as raised:
            runner(batch_of(kind, 2, "no number"))
        return str(raised.value)
    runner(batch_of(kind, 2, 3))
    with pytest.raises(RankError) as caught:
        runner(batch_of(kind, 3, 4))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["decode", "eager", "breakable"])
def test_after_the_ranks_agreed(two: Processes, kind: str) -> None:
    """The others run the step; who waits for that rank in the next one is told."""
    first, second = two.run(uncomputable, kind)
    assert "slot 'number'" in second
    assert f"rank 1 did not come within 1 s: it broke off a step before: ComputeError: {second}" in first
