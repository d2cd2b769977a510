"""An idle rank's batch: one without a request, as its declaration has it."""

from typing import Any

import torch

from ..dataflow.errors import BatchError, ConfigError
from ..dataflow.sampling import sample_batch
from ..dataflow.sources import Side
from .parts import Parts
from .stage import V


def empty_batch(parts: Parts[V], batch: Any, side: Side) -> tuple[Any, Side]:
    """A batch of zero live rows and its side arguments: a given one, or what the declaration makes, which is kept.

    BatchError where the given one has rows, ConfigError where the declaration does not tell how one looks.
    """
    if batch is not None:
        rows = max(parts.size(batch, side), default=0)
        if rows:
            message = f"an idle rank's batch has no rows, and this one has {rows}: call the runner with it"
            raise BatchError(message)
        return batch, side
    coordinator = parts.coordinator
    if coordinator.empty is None:
        stage = parts.stage
        live = {axis: stage.sizes[axis] if axis.fixed else 0 for axis in stage.declaration.axes}
        device, capabilities = stage.backend.device, stage.backend.capabilities
        try:
            coordinator.empty = sample_batch(stage.declaration, capabilities, live, torch.Generator(), device=device)
        except ConfigError as error:
            message = f"idle() cannot make a batch without rows, so give it one, idle(batch): {error}"
            raise ConfigError(message) from error
    return coordinator.empty.batch, {**coordinator.empty.side, **side}
