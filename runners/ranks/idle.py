"""An idle rank's batch: one without a request, as its declaration has it."""

import torch

from ...dataflow.sampling import Sample, sample_batch
from ..parts import Parts
from ..stage import V


def empty_batch(parts: Parts[V]) -> Sample:
    """A batch of zero live rows, kept where other ranks will have this one come with it again and again.

    ConfigError where a slot's declaration does not tell how it looks.
    """
    agreement, stage = parts.agreement, parts.stage
    known = None if agreement is None else agreement.empty
    if known is None:
        live = {axis: stage.sizes[axis] if axis.fixed else 0 for axis in stage.declaration.axes}
        device, capabilities = stage.backend.device, stage.backend.capabilities
        known = sample_batch(stage.declaration, capabilities, live, torch.Generator(), device=device)
        if agreement is not None:
            agreement.empty = known
    return known
