"""The words that a declaration is written in: `copied`, `host_parameter`, `computed`, `constant` and the others."""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import attrs
import torch

from .axes import Axis, Dim
from .capabilities import DEVICE, Placement, Role
from .slots import Computed, Constant, Copied, HostParameter, Output, Slot, Staged, Value, When
from .sources import Source
from .tails import Keep, PadValue, Poison, Tail

SLOT: Final = "slotgraph.slot"
FAULTS: Final = "slotgraph.faults"
Size = int | Axis | Dim
Sizing = Size | tuple[Size, ...]
Dtype = torch.dtype | Role

_WORDS: Final = {"compute": "function"}
"""Parameters that have another name in their specifier."""
_STAND_INS: Final[Mapping[str, Any]] = {
    "shape": (),
    "dtype": torch.int64,
    "pad": Keep("the declared rule does not suit"),
    "compute": lambda: 0,
    "value": lambda _: 0,
}
_OF_DTYPE: Final = frozenset({"pad", "starts", "poison", "limit", "converts", "value", "argument"})
"""Parameters that must suit the slot's dtype. They are not checked if the dtype itself is wrong."""


def slot(kind: Slot, *, init: bool = True, default: Any = attrs.NOTHING) -> Any:
    """A field for any slot object, your own kinds among them.

    init: whether a batch made from the declaration is given this slot's value. default: None where it may be left out.
    """
    if isinstance(kind, Slot):
        return _field(kind, [], init=init, default=default)
    fault = f"slot({_brief(kind)}): expected an object of a class that derives from Slot"
    return _field(Output(shape=(), dtype=torch.int64), [fault], init=init, default=default)


def _field(kind: Slot, faults: list[str], *, init: bool, default: Any) -> Any:
    """An attrs field that carries a slot, and what the class that takes it up must tell of its parameters."""
    if not isinstance(init, bool):
        faults.append(f"init={_brief(init)}: say True or False")
    if default is not None and default is not attrs.NOTHING:
        faults.append(f"default={_brief(default)}: say default=None, which makes the slot optional, or leave it out")
    metadata = {SLOT: kind, FAULTS: tuple(faults)}
    brought = init is not False
    return attrs.field(default=default if brought else None, init=brought, metadata=metadata, repr=_shown)


def _declared(kind: type[Slot], *, init: Any = None, default: Any = attrs.NOTHING, **given: Any) -> Any:
    """The field of a slot with these parameters, and with a fault for each one that does not suit.

    Where one does not suit, another stands in for it, so that the class tells whatever else is wrong, too.
    init: as given, where a batch never brings the slot; None where batches bring it.
    """
    wrong = dict(_unsuitable(kind, given))
    lost = {
        name for name in given if name in wrong or ("dtype" in wrong and name in _OF_DTYPE and given[name] is not None)
    }
    suited = {name: value for name, value in given.items() if name not in lost}
    stand_ins = {name: _STAND_INS[name] for name in lost if name in _STAND_INS}
    made = kind(**suited, **stand_ins, optional=default is None)
    faults = list(wrong.values())
    if init is not None and init is not False:
        faults.append(f"init={_brief(init)}: no batch brings this slot, so leave init= out")
    return _field(made, faults, init=init is None, default=default)


def _unsuitable(kind: type[Slot], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Parameters that do not suit a kind of slots, each with the fault."""
    for parameter in attrs.fields(kind):
        name, convert = parameter.name, parameter.converter
        if name in given and callable(convert):
            try:
                convert(given[name])
            except (TypeError, ValueError) as error:
                yield name, f"{_WORDS.get(name, name)}={_brief(given[name])}: {error}"


def copied(
    *shape: Size,
    dtype: Dtype,
    pad: PadValue | Tail | None = None,
    source: str | Source | Callable[[Any], Any] | None = None,
    placement: Placement = DEVICE,
    strided: bool = False,
    converts: tuple[torch.dtype, ...] = (),
    rewritten: bool = False,
    restored: bool = False,
    starts: PadValue | None = None,
    limit: Size | None = None,
    poison: Poison | None = None,
    when: When | None = None,
    default: Any = attrs.NOTHING,
) -> Any:
    """A slot fed from the batch in each step; `default=None` makes it optional.

    pad: what the tail holds. source: a path, `side("path")` or a function, where it is not of the slot's name. strided:
    take one that is not contiguous. converts: dtypes that the copy converts. rewritten: the step writes it too.
    restored: the runner then puts it back. starts: what the buffer holds at first, if not the tail's value. limit: the
    largest value of host data. poison: what checks may put into the tail. when: the setting that the slot exists by.
    """
    return _declared(
        Copied,
        shape=shape,
        dtype=dtype,
        pad=pad,
        source=source,
        placement=placement,
        strided=strided,
        converts=converts,
        rewritten=rewritten,
        restored=restored,
        starts=starts,
        limit=limit,
        poison=poison,
        when=when,
        default=default,
    )


def host_parameter(
    *shape: Size,
    dtype: Dtype,
    pad: PadValue | Tail | None = None,
    source: str | Source | Callable[[Any], Any] | None = None,
    argument: str | None = None,
    strided: bool = False,
    converts: tuple[torch.dtype, ...] = (),
    starts: PadValue | None = None,
    limit: Size | None = None,
    poison: Poison | None = None,
    when: When | None = None,
    default: Any = attrs.NOTHING,
) -> Any:
    """A slot in host memory whose value each replay hands to its graph's operators; elsewhere an ordinary host slot.

    shape: none for one number, one size for a row of them. dtype: torch.int32 or torch.int64. argument: the operators'
    argument that takes it, such as "actual_seq_lengths_kv"; the slot's own name if not given. All else as `copied`.
    """
    return _declared(
        HostParameter,
        shape=shape,
        dtype=dtype,
        pad=pad,
        source=source,
        argument=argument,
        strided=strided,
        converts=converts,
        starts=starts,
        limit=limit,
        poison=poison,
        when=when,
        default=default,
    )


def computed(
    function: Callable[..., Any],
    *,
    shape: Sizing = (),
    dtype: Dtype,
    placement: Placement = DEVICE,
    argument: str | None = None,
    when: When | None = None,
    init: Literal[False] = False,
) -> Any:
    """A slot derived in each step; the function's parameters name what it needs.

    Names of slots give their padded tensors, `step` the step's sizes, `settings` the runner's, other fields their
    values, `out` the slot's own buffer to be filled. A function that needs only host values runs on the host before
    the step; one that needs slots on the device runs there, inside the graph. Either way it gives every padded row.
    argument: makes a slot on the host a parameter, as `host_parameter` is one.
    """
    return _declared(
        Computed,
        compute=function,
        shape=shape,
        dtype=dtype,
        placement=placement,
        argument=argument,
        when=when,
        init=init,
    )


def constant(
    value: Value,
    *,
    shape: Sizing = (),
    dtype: Dtype,
    placement: Placement = DEVICE,
    when: When | None = None,
    init: Literal[False] = False,
) -> Any:
    """A slot set once: a number, a fixed axis, a fill role, or a function of the step at full capacity."""
    return _declared(Constant, value=value, shape=shape, dtype=dtype, placement=placement, when=when, init=init)


def staged(
    *shape: Size,
    dtype: Dtype,
    pad: PadValue | Tail | None = None,
    placement: Placement = DEVICE,
    poison: Poison | None = None,
    when: When | None = None,
    init: Literal[False] = False,
) -> Any:
    """A slot that a producer writes inside or beside the step; a fill only resets its tail, in each step."""
    return _declared(
        Staged, shape=shape, dtype=dtype, pad=pad, placement=placement, poison=poison, when=when, init=init
    )


def output(
    *shape: Size,
    dtype: Dtype,
    placement: Placement = DEVICE,
    when: When | None = None,
    init: Literal[False] = False,
) -> Any:
    """A buffer at a fixed address that the step writes its result to."""
    return _declared(Output, shape=shape, dtype=dtype, placement=placement, when=when, init=init)


def _shown(value: Any) -> str:
    """A tensor as its dtype and shape: a batch's repr stays on one line and reads nothing off the device."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _brief(value: Any) -> str:
    """What was given, in few words."""
    return _shown(value) if isinstance(value, torch.Tensor) else reprlib.repr(value)
