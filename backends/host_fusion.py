"""One launch where host and device are one: the kernel runs at once."""

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch

from .base import Fusion
from .host_fill import BLOCK, fill_lanes


@final
class HostFusion(Fusion):
    """The fused fill in plain code, so that a laptop shows what a device will do."""

    @property
    def block(self) -> int:
        """More than a slot has, so that a table has one row for each outer row."""
        return BLOCK

    def kernel(self, table: torch.Tensor, packet: torch.Tensor, targets: Sequence[torch.Tensor]) -> Callable[[], None]:
        """The operator over a table."""
        return functools.partial(fill_lanes, table, packet, list(targets))
