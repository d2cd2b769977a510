"""The placeholder: a made-up batch of one request, on which a step that breaks runs while it is captured."""

from collections.abc import Mapping
from typing import Any

import torch

from ...dataflow.axes import BATCH, Sizes, extent
from ...dataflow.bucket import Absent
from ...dataflow.buffers import Buffers
from ...dataflow.errors import CaptureError, ComputeError
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.roles import dtype_text
from ...dataflow.step import Step
from ...dataflow.tails import holds
from ...dataflow.values import initial_value, write_all
from ...dataflow.views import carried
from ..stage import Stage


def fill_placeholder(stage: Stage[Any], buffers: Buffers, step: Step, absent: Absent) -> dict[str, Any]:
    """Fill a bucket from the declaration's placeholder, tails and computed slots too; returns its fields by name.

    Copied slots that it does not name hold their pad value. CaptureError where it names what is no copied slot or
    field, or gives a slot what that cannot hold.
    """
    declaration, capabilities = stage.declaration, stage.backend.capabilities
    one = {BATCH: 1}  # also where no slot is over requests
    values = dict(stage.inputs.placeholder(Step(one | dict(step.live_sizes), one | dict(step.padded_sizes))))
    copied = [name for name, slot in declaration.slots.items() if slot.reads(name) is not None]
    known = {*copied, *declaration.fields, *declaration.disabled}
    unknown = [name for name in values if name not in known]
    if unknown:
        message = f"{declaration.name}.placeholder() names {unknown[0]!r}, which is no copied slot and no field"
        raise CaptureError(message)
    given = {name: _value(name, values, buffers, stage, step.live_sizes) for name in copied if name not in absent}
    fields = carried(declaration.fields, values)
    buffers.distrust()
    fill_slot_by_slot(declaration, buffers, capabilities, step, fields, given=given)
    return fields


def _value(name: str, values: Mapping[str, Any], buffers: Buffers, stage: Stage[Any], live: Sizes) -> torch.Tensor:
    buffer = buffers[name]
    target = torch.empty(extent(buffer.slot.shape, live), dtype=buffer.tensor.dtype, device=buffer.tensor.device)
    if name in values:
        value = values[name]
    else:
        value = initial_value(name, buffer.slot, buffers.capacity, stage.backend.capabilities)
    if isinstance(value, bool | int | float) and not holds(target.dtype, value):
        message = f"slot {name!r}: its placeholder: {value!r} does not fit {dtype_text(target.dtype)}"
        raise CaptureError(message)
    try:
        write_all(target, value, f"slot {name!r}: its placeholder")
    except ComputeError as error:
        raise CaptureError(str(error)) from error
    return target
