"""The whole step of a bucket, as it is captured."""

from typing import Any, Generic

import torch

from ..dataflow.ready import Ready
from .filler import Filler, Filling
from .running import Running, under_way
from .stage import Stage, V


class WholeStep(Generic[V]):
    """What is captured, without gradients.

    First the fused kernel, where it is the first node; then the device's computed slots, and the step on the view.
    """

    def __init__(self, stage: Stage[V], filler: Filler[V], filling: Filling, ready: Ready) -> None:
        self._stage = stage
        self._filler = filler
        self._filling = filling
        self._ready = ready

    def __call__(self) -> Any:
        """Run it."""
        with torch.no_grad():
            self._filler.first_node(self._filling)
            self._ready.compute_on_device()
            view = self._stage.capture_view(self._ready)
            return under_way(Running(view), self._stage.run, view)
