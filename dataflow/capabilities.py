"""What the planner must know about a device: the capability record that every backend hands out."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs
import torch

Placement = Literal["device", "host"]
DEVICE: Final = "device"
HOST: Final = "host"


def _frozen_mapping(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(mapping))


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a device can do; a backend's only answer to "is this an NPU?".

    roles: dtype that a role takes on this device, by role name; a role not named keeps its own default.
    fills: pad value that a role takes on this device, by role name; likewise.
    pools_inputs: whether runners may share input buffers.
    foreach_device, foreach_host: whether `torch._foreach_copy_` is safe between device tensors, and from host memory.
    foreach_mixed: whether one foreach call may hold several dtypes at no loss (it has a slow path for that on CUDA).
    foreach_chunk: tensors at most in one foreach call; 0 for no limit.
    arenas: whether slots may be carved out of one allocation (peer communication may want `storage_offset() == 0`).
    host_parameters: whether a graph takes host values at each replay beside its buffers.
    capture_copies: memory kinds that a copy may read from while a graph is being captured.
    capture_error_modes: the modes that capture accepts, the default first.
    graphs_hint: how many graphs the device bears, or None where no limit is known.
    """

    roles: Mapping[str, torch.dtype] = attrs.field(factory=dict, converter=_frozen_mapping)
    fills: Mapping[str, int] = attrs.field(factory=dict, converter=_frozen_mapping)
    pools_inputs: bool = True
    foreach_device: bool = True
    foreach_host: bool = True
    foreach_mixed: bool = False
    foreach_chunk: int = 0
    arenas: bool = True
    host_parameters: bool = False
    capture_copies: frozenset[str] = frozenset({"device", "pinned"})
    capture_error_modes: tuple[str, ...] = ()
    graphs_hint: int | None = None
