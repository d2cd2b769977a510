"""Fills as engines write them by hand: slot by slot, regrouped for foreach copies, or compiled by torch.compile."""

import collections
import functools
import linecache
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch.utils.dlpack import from_dlpack

from ...backends.base import Backend
from ...dataflow.axes import Live, Sizes
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import HOST
from ...dataflow.computation import Computation, Results
from ...dataflow.declaration import Declaration
from ...dataflow.hostdata import tensor_of
from ...dataflow.oracle import reset_tail
from ...dataflow.slots import Slot
from ...dataflow.sources import NO_SIDE, Side, plain_name
from ...dataflow.tails import Pad, resolve_value

PER_SLOT: Final = "per_slot"
REGROUPED: Final = "regrouped"
COMPILED: Final = "compiled"
_NAMES: Final = {
    "_foreach_copy_": torch._foreach_copy_,  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it
    "_foreach_zero_": torch._foreach_zero_,  # pyright: ignore[reportPrivateImportUsage] - likewise
    "nan": math.nan,
    "inf": math.inf,
}
"""What the text of a fill uses besides slots and sizes."""

ByHand = Callable[..., None]
"""Fills from a batch, its live rows on each varying axis, and its side arguments."""


def fill_by_hand(
    declaration: Declaration,
    backend: Backend,
    padded: Sizes,
    buffers: Buffers,
    way: str = PER_SLOT,
    *,
    in_graph: bool = False,
) -> ByHand:
    """Make a fill as engines write it: a tail reset and a copy for each slot, then what is computed.

    Args:
        declaration: The slots.
        backend: The device.
        padded: The bucket's sizes.
        buffers: The memory of the slots.
        way: PER_SLOT, REGROUPED, or COMPILED, whose first call compiles, and raises if this machine cannot.
        in_graph: Whether a graph computes what is computed on the device.
    """
    views = {name: buffers[name].view(padded) for name in declaration.slots}
    sources = [(name, plain_name(source), source) for name, source in declaration.sources.items()]
    computed = [name for name in declaration.functions if not in_graph or declaration.side(name) == HOST]
    # compiled functions take tensors of one device only, and so does foreach if host data needs packets
    moves = way == COMPILED or (way == REGROUPED and backend.capabilities.packed_uploads)
    writing = functools.cache(functools.partial(_writing, declaration, backend, padded, views, way))

    @functools.cache
    def functions(live: Live) -> list[Any]:
        """Return the bound functions for a step of these sizes, cached as handwritten code would."""
        step = declaration.step(live, padded)
        results = Results()
        known = {**declaration.given(step), **views}
        bound = [Computation.bind(name, declaration, known, views[name], results=results) for name in computed]
        return [(one.slot, one.target, one.function, one.fields, step) for one in bound]

    def fill(batch: Any, live: Live, side: Side = NO_SIDE) -> None:
        get: Any = batch.get if isinstance(batch, Mapping) else functools.partial(getattr, batch)
        values = list[torch.Tensor]()
        absent = frozenset[str]()
        for name, key, source in sources:
            value = get(key, None) if key else source.read(batch, side)
            if value is None:
                absent |= {name}
                continue
            if type(value) is not torch.Tensor:
                value = tensor_of(value, views[name].dtype)
            values.append(value.to(views[name].device) if moves else value)
        writing(absent)(live, values)
        for name, target, function, fields, step in functions(live):
            value = function(**{need: field.read(batch) for need, field in fields.items()})
            if isinstance(value, int | float):
                target.fill_(value)
            elif value is not None:  # a function that returns None has written its slot
                target.copy_(value if type(value) is torch.Tensor else tensor_of(value, target.dtype))
            if declaration.slots[name].rule() is not None:
                reset_tail(declaration.slots[name], target, backend.capabilities, step)

    return fill


def _writing(
    declaration: Declaration,
    backend: Backend,
    padded: Sizes,
    views: Mapping[str, torch.Tensor],
    way: str,
    absent: Collection[str],
) -> Any:
    """Return the function that writes the slots which a batch has."""
    slots = {name: slot for name, slot in declaration.slots.items() if name not in absent}
    pads = dict[str, Any]()
    for name, slot in slots.items():
        rule = slot.rule()
        if isinstance(rule, Pad) and (slot.rewritten or name in declaration.sources):
            pads[name] = resolve_value(rule.value, backend.capabilities, padded)
    if way == COMPILED:  # torch.compile rejects slots of several dtypes in one storage
        views = {name: from_dlpack(views[name]) for name in slots}
    text = text_by_hand(declaration, slots, pads, padded, way)
    file = f"<{declaration.name} {way}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # so that debuggers show the source
    names: dict[str, Any] = {**_NAMES, **{axis.name: size for axis, size in padded.items()}, **views}
    exec(compile(text, file, "exec"), names)  # noqa: S102 - the names are the declaration's own
    write = names["_write"]
    return torch.compile(write, dynamic=True, fullgraph=True) if way == COMPILED else write


def text_by_hand(
    declaration: Declaration, slots: Mapping[str, Slot], pads: Mapping[str, Any], padded: Sizes, way: str
) -> str:
    """Write the function that resets tails and copies values, of live sizes and of the values in the order of slots."""
    grouped = way == REGROUPED
    copied = [name for name in declaration.sources if name in slots]
    zeros = collections.defaultdict[str, list[str]](list)
    groups = collections.defaultdict[Any, list[str]](list)
    lines = [f"({', '.join(axis.name for axis in declaration.varying)},) = _live"] if declaration.varying else []
    lines += [f"({', '.join(map('_{}'.format, copied))},) = _values"] if copied else []
    for name, slot in slots.items():
        box = [f":{size}" if dim in slot.varying else ":" for dim, size in enumerate(slot.shape)]
        for dim in slot.varying if name in pads else ():
            size = slot.shape[dim]
            most = slot.shape[dim].at(padded)
            tail = f"{name}[{', '.join([*box[:dim], f'{size}:{most}'])}]"
            if grouped and pads[name] == 0:
                zeros[f"if {size} < {most}"].append(tail)
            else:
                lines.append(f"if {size} < {most}: {tail}.fill_({pads[name]!r})")
        part = f"{name}[{', '.join(box[: max(slot.varying) + 1])}]" if slot.varying else name
        if name in copied and grouped:
            groups[slot.dtype, slot.placement].append(name)
            lines.append(f"part_{name} = {part}")
        elif name in copied:
            lines.append(f"{part}.copy_(_{name}, non_blocking=True)")
    lines += [f"{when}: _foreach_zero_([{', '.join(tails)}])" for when, tails in zeros.items()]
    for names in groups.values():
        parts, values = (", ".join(map(form.format, names)) for form in ("part_{}", "_{}"))
        lines.append(f"_foreach_copy_([{parts}], [{values}], non_blocking=True)")
    return "\n    ".join(["def _write(_live, _values):", *lines, "return", ""])
