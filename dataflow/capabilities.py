"""The capability record of a device, and the dtypes and pad values that depend on it."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import attrs
import torch

from . import environment
from .axes import python_number
from .errors import ConfigError, did_you_mean

Placement = Literal["device", "host"]
"""The memory that a slot is in."""
DEVICE: Final = "device"
"""The placement in the device's memory."""
HOST: Final = "host"
"""The placement in host memory, which is pinned if the device copies from it."""
LoweringName = Literal["in_graph", "fused", "direct", "foreach", "slot_by_slot"]
AUTO: Final = "auto"
LADDER: Final[tuple[LoweringName, ...]] = get_args(LoweringName)
"""All lowerings, the one with the fewest calls first.

One kernel runs in the graph, or before it; then come copies by address, foreach copies, and the oracle.
"""


_ROLES: Final[set[str]] = set()
_FILL_ROLES: Final[set[str]] = set()
"""The names of all roles made so far."""
_NEAR: Final = 0.85
"""From this similarity on, a name counts as a misspelt role."""
_Validator = Callable[[object, Any, Any], None]


def _frozen_mapping(mapping: Any) -> Any:
    return MappingProxyType(dict(mapping)) if isinstance(mapping, Mapping) else mapping


def _must(expected: str, holds: Callable[[Any], bool]) -> _Validator:
    """Make a validator that raises ConfigError unless a condition holds for the value."""

    def check(_: object, field: Any, value: Any) -> None:
        if not holds(value):
            raise ConfigError(f"Capabilities({field.name}=): expected {expected}, got {value!r:.200}")

    return check


def _by_role(roles: set[str], kinds: type | tuple[type, ...], what: str) -> _Validator:
    """Make a validator of a mapping by role name. An unknown name may belong to a role that is made later."""
    expected = f"a mapping of roles' names to {what}"
    is_mapping = _must(expected, lambda value: isinstance(value, Mapping))
    fits = _must(expected, lambda one: isinstance(one[1], kinds) and not isinstance(one[1], bool))

    def check(record: object, field: Any, value: Any) -> None:
        is_mapping(record, field, value)
        for one in value.items():
            fits(record, field, one)
            name = str(one[0])
            near = difflib.get_close_matches(name.lower(), roles.difference(value), 1, _NEAR)
            if near and name not in roles:
                raise ConfigError(f"Capabilities({field.name}=): there is no role {name!r}: did you mean {near[0]!r}?")

    return check


def _flag(*, default: bool) -> bool:
    """Make a field of the record that is true or false."""
    return attrs.field(default=default, validator=_must("True or False", lambda value: isinstance(value, bool)))


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_lowerings(value: object) -> bool:
    return isinstance(value, tuple) and 0 < len(value) == len({*value}) and {*value} <= {*LADDER}


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a device can do. The code outside of backends asks this record, never for the kind of device.

    Raises ConfigError for a value of the wrong kind, and for a misspelt role name.

    Attributes:
        roles: The dtype of each role on this device, by role name. Other roles keep their defaults.
        fills: The pad value of each fill role on this device, by role name. Other roles keep their defaults.
        pools_inputs: Whether runners may share input buffers.
        foreach_device: Whether `torch._foreach_copy_` is safe between device tensors.
        foreach_mixed: Whether one foreach call may hold several dtypes without loss (on CUDA it has a slow path for
            that).
        foreach_chunk: The most tensors in one foreach call, 0 for no limit.
        packed_uploads: Whether host data for device slots is cast and uploaded in one packet before foreach copies. If
            not, each piece is moved by itself.
        arenas: Whether slots may be carved out of one allocation (peer communication may need `storage_offset() == 0`).
        host_parameters: Whether a graph takes host values at each replay in addition to its buffers.
        capture_error_modes: The modes that capture accepts, the default first.
        graphs_hint: The number of graphs that the device has room for, or None if no limit is known.
        compiles: Whether functions of computed slots that make whole numbers are compiled as one by torch.compile.
        lowerings: Those of `LADDER` that the device can run, the preferred first.
    """

    roles: Mapping[str, torch.dtype] = attrs.field(
        factory=dict, converter=_frozen_mapping, validator=_by_role(_ROLES, torch.dtype, "torch dtypes")
    )
    fills: Mapping[str, int] = attrs.field(
        factory=dict, converter=_frozen_mapping, validator=_by_role(_FILL_ROLES, (int, float), "numbers")
    )
    pools_inputs: bool = _flag(default=True)
    foreach_device: bool = _flag(default=True)
    foreach_mixed: bool = _flag(default=False)
    foreach_chunk: int = attrs.field(
        default=0, validator=_must("a whole number, 0 for no limit", lambda value: _is_whole(value, 0))
    )
    packed_uploads: bool = _flag(default=False)
    arenas: bool = _flag(default=True)
    host_parameters: bool = _flag(default=False)
    capture_error_modes: tuple[str, ...] = attrs.field(
        default=(),
        validator=_must(
            "a tuple of texts", lambda value: isinstance(value, tuple) and all(isinstance(one, str) for one in value)
        ),
    )
    graphs_hint: int | None = attrs.field(
        default=None,
        validator=_must("a whole number, at least 1, or None", lambda value: value is None or _is_whole(value, 1)),
    )
    compiles: bool = _flag(default=False)
    lowerings: tuple[LoweringName, ...] = attrs.field(
        default=("foreach", "slot_by_slot"),
        validator=_must(f"a tuple of at least one of {', '.join(LADDER)}, each once", _are_lowerings),
    )


def chosen_lowering(capabilities: Capabilities, wanted: str | None) -> LoweringName:
    """Return the wanted lowering, or by default that of the environment, or the device's preferred one.

    Raise ConfigError if the device lacks it.
    """
    source = "lowering"
    if wanted is None or wanted == AUTO:
        source = environment.LOWERING
        wanted = environment.text_of(source) or AUTO
        if wanted == AUTO:
            return capabilities.lowerings[0]
    for lowering in capabilities.lowerings:
        if lowering == wanted:
            return lowering
    near = did_you_mean(wanted, (*capabilities.lowerings, AUTO))
    raise ConfigError(f"{source} {wanted!r}: this backend has {', '.join(capabilities.lowerings)}; or say 'auto'{near}")


@attrs.frozen
class Role:
    """A dtype that depends on the device: `default` unless the backend's capabilities name another.

    Attributes:
        name: The role's name in capability records.
        default: The dtype by default.
        accepts: Dtypes that a source may have. The copy converts between them, because the role allows it.
    """

    name: str
    default: torch.dtype
    accepts: tuple[torch.dtype, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Let capability records name the role."""
        _ROLES.add(str(self.name))

    def on(self, capabilities: Capabilities) -> torch.dtype:
        """Return the dtype on one device."""
        return capabilities.roles.get(self.name, self.default)


@attrs.frozen
class FillRole:
    """A pad value that depends on the device: `default` unless the backend's capabilities name another.

    Attributes:
        name: The role's name in capability records.
        default: The value by default.
    """

    name: str
    default: int = attrs.field(converter=python_number)

    def __attrs_post_init__(self) -> None:
        """Let capability records name the role."""
        _FILL_ROLES.add(str(self.name))

    def on(self, capabilities: Capabilities) -> int:
        """Return the pad value on one device."""
        return capabilities.fills.get(self.name, self.default)


CACHE_LOC: Final = Role("cache_loc", torch.int64, accepts=(torch.int32, torch.int64))
"""Locations in a KV cache: int64, or int32 on NPU, whose cache-write kernel requires it."""

SEQ_LEN_FILL: Final = FillRole("seq_len_fill", 1)
"""The value of padded rows of `seq_lens`: 1, or 0 on NPU (what the attention kernels accept)."""


def dtype_text(dtype: torch.dtype | Role) -> str:
    """Return a dtype's short name, such as `int64` for `torch.int64`, or a role's own name."""
    return dtype.name if isinstance(dtype, Role) else str(dtype).removeprefix("torch.")


def dtype_from_text(text: str) -> torch.dtype:
    """Return the dtype of a short name. Raise ValueError if torch has none."""
    dtype = vars(torch).get(text)  # getattr would import modules of torch by name
    if not isinstance(dtype, torch.dtype):
        names = [name for name, one in vars(torch).items() if isinstance(one, torch.dtype)]
        raise ValueError(  # noqa: TRY004 - the text's value is wrong, not its type
            f"torch has no dtype {text!r}{did_you_mean(text, names)}"
        )
    return dtype


def resolve_dtype(dtype: torch.dtype | Role, capabilities: Capabilities) -> torch.dtype:
    """Return a slot's dtype on one device."""
    return dtype.on(capabilities) if isinstance(dtype, Role) else dtype
