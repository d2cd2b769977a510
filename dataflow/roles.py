"""Roles: dtypes and pad values that the backend decides, and dtypes as text."""

from typing import Final

import attrs
import torch

from .capabilities import Capabilities
from .scalars import python_number


@attrs.frozen
class Role:
    """A dtype that depends on the device: `default` unless the backend's capabilities name another.

    accepts: the dtypes that a source may have; the copy converts between them, because the role says so.
    """

    name: str
    default: torch.dtype
    accepts: tuple[torch.dtype, ...] = ()

    def on(self, capabilities: Capabilities) -> torch.dtype:
        """The dtype on one device."""
        return capabilities.roles.get(self.name, self.default)


@attrs.frozen
class FillRole:
    """A pad value that depends on the device: `default` unless the backend's capabilities name another."""

    name: str
    default: int = attrs.field(converter=python_number)

    def on(self, capabilities: Capabilities) -> int:
        """The pad value on one device."""
        return capabilities.fills.get(self.name, self.default)


CACHE_LOC: Final = Role("cache_loc", torch.int64, accepts=(torch.int32, torch.int64))
"""Locations in a KV cache: int64, and int32 on NPU, whose cache-write kernel demands it."""

SEQ_LEN_FILL: Final = FillRole("seq_len_fill", 1)
"""What padded rows of `seq_lens` hold: 1, and 0 on NPU (what the attention kernels bear)."""


def dtype_text(dtype: torch.dtype | Role) -> str:
    """A dtype's short name, `int64` for `torch.int64`; a role's own name."""
    return dtype.name if isinstance(dtype, Role) else str(dtype).removeprefix("torch.")


def dtype_from_text(text: str) -> torch.dtype:
    """The dtype of a short name; ValueError where torch has none."""
    dtype = vars(torch).get(text)  # getattr would load modules of torch by their names
    if not isinstance(dtype, torch.dtype):
        message = f"torch has no dtype {text!r}"
        raise ValueError(message)  # noqa: TRY004 - the text's value is wrong, not its type
    return dtype


def resolve_dtype(dtype: torch.dtype | Role, capabilities: Capabilities) -> torch.dtype:
    """A slot's dtype on one device."""
    return dtype.on(capabilities) if isinstance(dtype, Role) else dtype
