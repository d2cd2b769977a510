"""The words that a declaration is written in: `copied`, `host_parameter`, `computed`, `constant` and the others."""

from collections.abc import Callable
from typing import Any, Final, Literal

import attrs
import torch

from .axes import Axis, Dim
from .capabilities import DEVICE, Placement
from .roles import Role
from .slots import Computed, Constant, Copied, HostParameter, Output, Slot, Staged, Value, When
from .sources import Source
from .tails import PadValue, Poison, Tail

SLOT: Final = "slotgraph.slot"
Size = int | Axis | Dim
Sizing = Size | tuple[Size, ...]
Dtype = torch.dtype | Role


def slot(kind: Slot, *, init: bool = True, default: Any = attrs.NOTHING) -> Any:
    """A field for any slot object, your own kinds among them.

    init: whether a batch made from the declaration is given this slot's value.
    """
    return attrs.field(default=default if init else None, init=init, metadata={SLOT: kind}, repr=_brief)


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
    kind = Copied(
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
        optional=default is None,
    )
    return slot(kind, default=default)


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
    kind = HostParameter(
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
        optional=default is None,
    )
    return slot(kind, default=default)


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
    kind = Computed(compute=function, shape=shape, dtype=dtype, placement=placement, argument=argument, when=when)
    return slot(kind, init=init)


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
    return slot(Constant(value=value, shape=shape, dtype=dtype, placement=placement, when=when), init=init)


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
    return slot(Staged(shape=shape, dtype=dtype, pad=pad, placement=placement, poison=poison, when=when), init=init)


def output(
    *shape: Size,
    dtype: Dtype,
    placement: Placement = DEVICE,
    when: When | None = None,
    init: Literal[False] = False,
) -> Any:
    """A buffer at a fixed address that the step writes its result to."""
    return slot(Output(shape=shape, dtype=dtype, placement=placement, when=when), init=init)


def _brief(value: Any) -> str:
    """A tensor as its dtype and shape: a batch's repr stays on one line and reads nothing off the device."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
