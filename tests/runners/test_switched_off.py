"""Slots that are switched off or absent, and computed slots that need them: None, in every lowering."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, computed, copied
from slotgraph.backends.registry import choose


def length_of(swa: torch.Tensor | None, extra: torch.Tensor | None) -> int:
    """What there is of both."""
    return (0 if swa is None else 10 + int(swa.sum())) + (0 if extra is None else 1000)


class Switched(Inputs):
    """A slot that a setting switches off, one that a batch may lack, and what is computed of both."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    swa: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", when="sliding", default=None)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, placement="host", default=None)
    length: torch.Tensor = computed(length_of, shape=1, dtype=torch.int64)


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize("way", [*choose("cpu").capabilities.lowerings, "eager"])
def test_what_is_computed_of_them(way: str, *, sliding: bool) -> None:
    """A function gets None for what is not there."""
    settings = SimpleNamespace(sliding=sliding)
    runner: Any
    if way == "eager":
        runner = EagerRunner(Switched, lambda view: view.length * 1, settings=settings, backend="cpu")
    else:
        runner = DecodeRunner(
            Switched,
            lambda view: view.length * 1,
            buckets=[4],
            absent=[{"extra"}, {"swa"}, {"extra", "swa"}] if sliding else [{"extra"}],
            settings=settings,
            backend="cpu-capture",
            lowering=way,
            output_rows=None,
        )
        runner.capture()
    ids, two = torch.tensor([1, 2]), torch.tensor([3, 4])
    for brought in ({}, {"extra": two}, {"swa": two}, {"swa": two, "extra": two}):
        batch: dict[str, Any] = {"ids": ids, **brought}
        right = (17 if sliding and "swa" in brought else 0) + (1000 if "extra" in brought else 0)
        assert runner(batch).tolist() == [right]
