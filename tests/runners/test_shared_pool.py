"""Runners whose graphs share one pool of memory, as all do on a CUDA device."""

from collections.abc import Callable
from typing import Any, ClassVar, final

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.backends import Graph
from slotgraph.backends.cpu import CallableGraph
from slotgraph.backends.host import HostBackend
from slotgraph.dataflow.errors import StaleOutputError


class Pool:
    """A handle that graphs share."""


@final
class PoolingBackend(HostBackend):
    """A CPU whose graphs are said to share memory."""

    name: ClassVar[str] = "pooling"

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool

    def pool(self) -> object | None:
        """The one that it was made with."""
        return self._pool

    def capture(self, step: Callable[[], Any], **options: Any) -> Graph:
        """A step that is called again."""
        assert options["pool"] is self._pool
        return CallableGraph(step)


class RowInputs(Inputs):
    """One row a request."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def runner_on(pool: Pool | None) -> DecodeRunner[RowInputs]:
    """A captured runner in debug mode."""
    runner = DecodeRunner(RowInputs, lambda view: view.ids * 3, buckets=[4], backend=PoolingBackend(pool), debug=True)
    runner.capture()
    return runner


@pytest.mark.parametrize("shared", [True, False])
def test_another_runner_replays_in_the_pool(*, shared: bool) -> None:
    """A replay of one runner makes another's output stale where their graphs share memory, and only there."""
    pools = [Pool()] * 2 if shared else [Pool(), Pool()]
    first, second = (runner_on(pool) for pool in pools)
    output = first({"ids": torch.tensor([5, 6])})
    assert output.tolist() == [15, 18]
    second({"ids": torch.tensor([7])})
    if shared:
        with pytest.raises(StaleOutputError, match="overwritten since"):
            output.tolist()
    else:
        assert output.tolist() == [15, 18]
