"""The capability record of a device, and the dtypes and pad values that depend on it."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import attrs
import torch

from .axes import python_number
from .errors import ConfigError, did_you_mean

Placement = Literal["device", "host"]
"""Where a slot lies."""
DEVICE: Final = "device"
"""Where a slot lies: in the device's memory."""
HOST: Final = "host"
"""Where a slot lies: in host memory, pinned where the device copies from it."""
LoweringName = Literal["in_graph", "fused", "direct", "foreach", "slot_by_slot"]
AUTO: Final = "auto"
LADDER: Final[tuple[LoweringName, ...]] = get_args(LoweringName)
"""How a plan is run, the fewest calls first: by one kernel in the graph, or before it; by address; foreach copies; the
oracle."""


_ROLES: Final[set[str]] = set()
_FILL_ROLES: Final[set[str]] = set()
"""The names of all roles that were made so far."""
_NEAR: Final = 0.85
"""How much alike a name and that of a role are, for the one to be a slip of the other."""
_Validator = Callable[[object, Any, Any], None]


def _frozen_mapping(mapping: Any) -> Any:
    return MappingProxyType(dict(mapping)) if isinstance(mapping, Mapping) else mapping


def _must(expected: str, holds: Callable[[Any], bool]) -> _Validator:
    """Make a validator: ConfigError where a value of the record does not hold."""

    def check(_: object, field: Any, value: Any) -> None:
        if not holds(value):
            raise ConfigError(f"Capabilities({field.name}=): expected {expected}, got {value!r:.200}")

    return check


def _by_role(roles: set[str], kinds: type | tuple[type, ...], what: str) -> _Validator:
    """Make a validator of a mapping from roles' names. An unknown name may be that of a role which is made later."""
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
    """A field of the record that is true or false."""
    return attrs.field(default=default, validator=_must("True or False", lambda value: isinstance(value, bool)))


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_lowerings(value: object) -> bool:
    return isinstance(value, tuple) and 0 < len(value) == len({*value}) and {*value} <= {*LADDER}


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a device can do; a backend's only answer to "is this an NPU?".

    roles: dtype that a role takes on this device, by role name; a role not named keeps its own default.
    fills: pad value that a role takes on this device, by role name; likewise.
    pools_inputs: whether runners may share input buffers.
    foreach_device: whether `torch._foreach_copy_` is safe between device tensors.
    foreach_mixed: whether one foreach call may hold several dtypes at no loss (it has a slow path for that on CUDA).
    foreach_chunk: tensors at most in one foreach call; 0 for no limit.
    packed_uploads: whether what the host has for device slots goes up in one packet before foreach copies, cast
    already; where not, each piece is moved by itself.
    arenas: whether slots may be carved out of one allocation (peer communication may want `storage_offset() == 0`).
    host_parameters: whether a graph takes host values at each replay beside its buffers.
    capture_error_modes: the modes that capture accepts, the default first.
    graphs_hint: how many graphs the device can take, or None where no limit is known.
    lowerings: those of `LADDER` that the device can run, the preferred first.

    ConfigError for a value of another kind, and for a name that is almost a role's.
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
    lowerings: tuple[LoweringName, ...] = attrs.field(
        default=("foreach", "slot_by_slot"),
        validator=_must(f"a tuple of at least one of {', '.join(LADDER)}, each once", _are_lowerings),
    )


def chosen_lowering(capabilities: Capabilities, wanted: str | None) -> LoweringName:
    """The device's preferred lowering, or the one that is wanted. ConfigError where the device has no such one."""
    if wanted is None or wanted == AUTO:
        return capabilities.lowerings[0]
    for lowering in capabilities.lowerings:
        if lowering == wanted:
            return lowering
    near = did_you_mean(wanted, (*capabilities.lowerings, AUTO))
    raise ConfigError(f"lowering {wanted!r}: this backend has {', '.join(capabilities.lowerings)}; or say 'auto'{near}")


@attrs.frozen
class Role:
    """A dtype that depends on the device: `default` unless the backend's capabilities name another.

    accepts: the dtypes that a source may have; the copy converts between them, because the role says so.
    """

    name: str
    default: torch.dtype
    accepts: tuple[torch.dtype, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Let capability records name the role."""
        _ROLES.add(str(self.name))

    def on(self, capabilities: Capabilities) -> torch.dtype:
        """The dtype on one device."""
        return capabilities.roles.get(self.name, self.default)


@attrs.frozen
class FillRole:
    """A pad value that depends on the device: `default` unless the backend's capabilities name another."""

    name: str
    default: int = attrs.field(converter=python_number)

    def __attrs_post_init__(self) -> None:
        """Let capability records name the role."""
        _FILL_ROLES.add(str(self.name))

    def on(self, capabilities: Capabilities) -> int:
        """The pad value on one device."""
        return capabilities.fills.get(self.name, self.default)


CACHE_LOC: Final = Role("cache_loc", torch.int64, accepts=(torch.int32, torch.int64))
"""Locations in a KV cache: int64, and int32 on NPU, whose cache-write kernel demands it."""

SEQ_LEN_FILL: Final = FillRole("seq_len_fill", 1)
"""What padded rows of `seq_lens` hold: 1, and 0 on NPU (what the attention kernels can take)."""


def dtype_text(dtype: torch.dtype | Role) -> str:
    """A dtype's short name, `int64` for `torch.int64`; a role's own name."""
    return dtype.name if isinstance(dtype, Role) else str(dtype).removeprefix("torch.")


def dtype_from_text(text: str) -> torch.dtype:
    """The dtype of a short name; ValueError where torch has none."""
    dtype = vars(torch).get(text)  # getattr would load modules of torch by their names
    if not isinstance(dtype, torch.dtype):
        names = [name for name, one in vars(torch).items() if isinstance(one, torch.dtype)]
        raise ValueError(  # noqa: TRY004 - the text's value is wrong, not its type
            f"torch has no dtype {text!r}{did_you_mean(text, names)}"
        )
    return dtype


def resolve_dtype(dtype: torch.dtype | Role, capabilities: Capabilities) -> torch.dtype:
    """A slot's dtype on one device."""
    return dtype.on(capabilities) if isinstance(dtype, Role) else dtype
