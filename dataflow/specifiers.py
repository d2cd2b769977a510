"""The words that a declaration is written in: `copied`, `host_parameter`, `computed`, `constant` and the others."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import attrs
import torch

from .axes import Axis, Dim
from .capabilities import DEVICE, Placement, Role, dtype_text
from .slots import Computed, Constant, Copied, HostParameter, Output, Slot, Staged, Value, When
from .sources import Source
from .tails import Keep, PadValue, Poison, Tail

SLOT: Final = "slotgraph.slot"
FAULTS: Final = "slotgraph.faults"
Size = int | Axis | Dim
Sizing = Size | tuple[Size, ...]
Dtype = torch.dtype | Role

_STAND_INS: Final[Mapping[str, Any]] = {
    "shape": (),
    "dtype": torch.int64,
    "pad": Keep("the declared rule does not suit"),
    "function": lambda: 0,
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
    return attrs.field(
        default=default if brought else None, init=brought, metadata=metadata, repr=lambda value: _brief(value, repr)
    )


def _declared(kind: type[Slot], given: Mapping[str, Any]) -> Any:
    """The field of a slot with the parameters of its specifier, and with a fault for each one that does not suit.

    Where one does not suit, another stands in for it, so that the class tells whatever else is wrong, too.
    """
    suited, wrong = dict[str, Any](), dict[str, str]()
    for parameter in attrs.fields(kind):
        name, convert = parameter.name, parameter.converter
        if name in given and callable(convert):
            try:
                suited[name] = convert(given[name])
            except (TypeError, ValueError) as error:
                wrong[name] = f"{name}={_brief(given[name])}: {error}"
    if "dtype" in wrong:
        suited = {name: value for name, value in suited.items() if name not in _OF_DTYPE or given[name] is None}
    suited |= {name: value for name, value in _STAND_INS.items() if name in given.keys() - suited.keys()}
    default, faults = given.get("default", attrs.NOTHING), list(wrong.values())
    if given.get("init", False) is not False:
        faults.append(f"init={_brief(given['init'])}: no batch brings this slot, so leave init= out")
    return _field(kind(**suited, optional=default is None), faults, init="init" not in given, default=default)


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
    return _declared(Copied, locals())


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
    return _declared(HostParameter, locals())


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
    return _declared(Computed, locals())


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
    return _declared(Constant, locals())


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
    return _declared(Staged, locals())


def output(
    *shape: Size,
    dtype: Dtype,
    placement: Placement = DEVICE,
    when: When | None = None,
    init: Literal[False] = False,
) -> Any:
    """A buffer at a fixed address that the step writes its result to."""
    return _declared(Output, locals())


def _brief(value: Any, text: Callable[[Any], str] = reprlib.repr) -> str:
    """What was given, in few words; a tensor as its dtype and shape, which reads nothing off the device."""
    return f"{dtype_text(value.dtype)}{list(value.shape)}" if isinstance(value, torch.Tensor) else text(value)
