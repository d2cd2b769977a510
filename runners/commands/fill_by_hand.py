"""A fill by hand of any declaration, in the two ways that engines write it: the rival of this library's own."""

import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS, Axis, Dim, Sizes
from ...dataflow.buffers import allocate
from ...dataflow.capabilities import DEVICE
from ...dataflow.computation import field_of
from ...dataflow.compute import OUT, SETTINGS, STEP, Compute
from ...dataflow.declaration import Declaration
from ...dataflow.gather import Gather
from ...dataflow.slots import Slot
from ...dataflow.sources import NO_SIDE, Side
from ...dataflow.step import Step
from ...dataflow.tails import Number, Pad, resolve_value
from .runner_kinds import Kind
from .workload import COUNT

_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise
_NO_RELATIONS: Final[Mapping[Axis, Dim]] = {}
_NO_COUNTS: Final[Mapping[str, Axis]] = {}
Lives = Sequence[int]
Groups = dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]]


class _Rows(NamedTuple):
    """A slot's memory, of whose first dim each row of one axis has `each`; `axis` is its place."""

    name: str
    buffer: torch.Tensor
    axis: int
    each: int
    pad: Number | None


@attrs.frozen(eq=False)
class _Box:
    """Any other slot: how far each of its dims goes at given sizes."""

    name: str
    buffer: torch.Tensor
    reach: Sequence[Callable[[Lives], int]]
    pad: Number | None

    def at(self, sizes: Lives) -> torch.Tensor:
        """The slot at given sizes."""
        return self.buffer[tuple([slice(reach(sizes)) for reach in self.reach])]


@final
class FillByHand:
    """What engines write for a step: of each slot, the tail reset and the live rows copied, all sliced in each step.

    padded: every axis of the bucket. axes: those that sizes are told of. relations: axes that follow from these.
    unpadded: axes of which a view has the live rows alone. counts: slots that hold an axis' live size, which the host
    writes with `fill_`. computes: whether what the device computes is called, too. grouped: copies go by foreach, the
    groups built anew in each step. Tails that nobody reads are left alone.
    """

    def __init__(
        self,
        declaration: Declaration,
        backend: Backend,
        padded: Sizes,
        axes: Sequence[Axis],
        *,
        relations: Mapping[Axis, Dim] = _NO_RELATIONS,
        unpadded: Collection[Axis] = (),
        counts: Mapping[str, Axis] = _NO_COUNTS,
        computes: bool = True,
        grouped: bool = False,
    ) -> None:
        self._declaration, self._backend, self._sizes = declaration, backend, dict(padded)
        self._axes, self._relations, self._counts = tuple(axes), relations, counts
        self._buffers = allocate(declaration, padded, backend.capabilities, backend.empty)
        self._padded = [None if axis in unpadded else padded[axis] for axis in axes]
        slots = declaration.slots.items()
        sources = {name: source for name, slot in slots if (source := slot.reads(name)) is not None}
        rows, self._boxes = _sorted(self._part(name, declaration.slots[name]) for name in sources)
        self._rows = [part[1:] for part in rows]
        names = [part.name for part in rows] + [box.name for box in self._boxes]
        self._gather = Gather([sources[name] for name in names])
        staged = [self._part(name, slot) for name, slot in slots if slot.rewritten and name not in sources]
        self._reset = [part for part in staged if part.pad is not None]
        viewed, self._box_views = _sorted(self._part(name, slot) for name, slot in slots if slot.varying)
        self._row_views = [rows[:4] for rows in viewed]
        self._whole = {name: self._buffers[name].tensor for name, slot in slots if not slot.varying}
        self._counted = [(self._whole[name], self._axes.index(axis)) for name, axis in counts.items()]
        self._computed = list(self._functions(computes=computes))
        self._copy = self._regrouped if grouped else self._one_by_one
        self._steps: dict[tuple[int, ...], Step] = {}

    @classmethod
    def of(cls, kind: Kind, backend: Backend) -> "FillByHand":
        """What one of this library's kinds of steps is filled with."""
        relations = {TOKENS: BATCH * kind.width} if kind.leading == BATCH else _NO_RELATIONS
        counts = {COUNT: TOKENS} if COUNT in kind.declaration.slots else _NO_COUNTS
        return cls(
            kind.declaration,
            backend,
            kind.capacity,
            (BATCH, TOKENS),
            relations=relations,
            unpadded=kind.unpadded,
            counts=counts,
            computes=kind.computes,
        )

    def __call__(self, batch: Any, live: Lives | None = None, side: Side = NO_SIDE) -> Any:
        """Fill from a batch of so many live rows on each axis, or of its own `lives`, and return the view."""
        lives: Lives = batch.lives if live is None else live
        padded = [live if most is None else most for live, most in zip(lives, self._padded, strict=True)]
        self._copy(self._gather(batch, side), lives, padded)
        for part in self._reset:
            _reset(part, lives, padded)
        for buffer, axis in self._counted:
            buffer.fill_(lives[axis])
        view = types.SimpleNamespace(**self._whole)
        for name, memory, axis, each in self._row_views:
            setattr(view, name, memory[: each * padded[axis]])
        for box in self._box_views:
            setattr(view, box.name, box.at(padded))
        for compute in self._computed:
            compute(view, batch, lives)
        return view

    def _one_by_one(self, sources: Sequence[Any], lives: Lives, padded: Lives) -> None:
        """One tail reset and one copy a slot."""
        for (buffer, axis, each, pad), source in zip(self._rows, sources, strict=False):
            if source is None:  # an optional one: no one reads it
                continue
            live, most = each * lives[axis], each * padded[axis]
            if pad is not None and live < most:
                buffer[live:most].fill_(pad)
            buffer[:live].copy_(source, non_blocking=True)
        for box, source in zip(self._boxes, sources[len(self._rows) :], strict=True):
            if source is not None:
                _reset(box, lives, padded)
                box.at(lives).copy_(source, non_blocking=True)

    def _regrouped(self, sources: Sequence[Any], lives: Lives, padded: Lives) -> None:
        """One foreach copy a pair of dtypes, and one foreach zero."""
        groups: Groups = {}
        zeros: list[torch.Tensor] = []
        for (buffer, axis, each, pad), source in zip(self._rows, sources, strict=False):
            if source is None:
                continue
            live, most = each * lives[axis], each * padded[axis]
            targets, given = groups.setdefault((buffer.dtype, source.dtype, buffer.is_cpu), ([], []))
            targets.append(buffer[:live])
            given.append(source)
            if pad == 0 and live < most:
                zeros.append(buffer[live:most])
            elif pad is not None and live < most:
                buffer[live:most].fill_(pad)
        for box, source in zip(self._boxes, sources[len(self._rows) :], strict=True):
            if source is not None:
                _reset(box, lives, padded)
                key = (box.buffer.dtype, source.dtype, box.buffer.is_cpu)
                targets, given = groups.setdefault(key, ([], []))
                targets.append(box.at(lives))
                given.append(source)
        if zeros:
            _FOREACH_ZERO(zeros)
        for targets, given in groups.values():
            _FOREACH_COPY(targets, given, non_blocking=True)

    def _part(self, name: str, slot: Slot) -> _Rows | _Box:
        rule, buffer = slot.rule(), self._buffers[name].tensor
        fixed = {axis: size for axis, size in self._sizes.items() if axis.fixed}
        pad = resolve_value(rule.value, self._backend.capabilities, fixed) if isinstance(rule, Pad) else None
        dims = [dim.replace(self._relations) for dim in slot.shape]
        lead = _lead(dims[0]) if slot.varying in ((0,), ()) and dims else None
        if lead is not None and lead in self._axes:
            return _Rows(name, buffer, self._axes.index(lead), dims[0].at({**fixed, lead: 1}), pad)
        return _Box(name, buffer, [functools.partial(self._reach, dim, fixed) for dim in dims], pad)

    def _reach(self, dim: Dim, fixed: Sizes, lives: Lives) -> int:
        return dim.at({**fixed, **dict(zip(self._axes, lives, strict=True))})

    def _functions(self, *, computes: bool) -> Iterator[Callable[[Any, Any, Lives], None]]:
        declaration = self._declaration
        for name in declaration.order:
            compute = declaration.slots[name].computes()
            is_wanted = computes or declaration.side(name) != DEVICE
            if compute is None or name in self._counts or not is_wanted:
                continue
            if compute.writes_out or not declaration.slots.keys() >= set(compute.needs):
                yield functools.partial(self._compute, name, compute)
            else:
                yield functools.partial(_compute_of_slots, name, compute.function, compute.needs)

    def _compute(self, name: str, compute: Compute, view: Any, batch: Any, lives: Lives) -> None:
        """Call a slot's function with whatever it names."""
        target, fields = getattr(view, name), self._declaration.fields
        given: dict[str, Any] = {OUT: target} if compute.writes_out else {}
        for need in compute.needs:
            if need == STEP:
                given[need] = self._steps.get(tuple(lives)) or self._step(tuple(lives))
            elif need == SETTINGS:
                given[need] = self._declaration.settings
            else:
                given[need] = field_of(batch, need, fields[need]) if need in fields else getattr(view, need)
        value = compute.function(**given)
        if not compute.writes_out:
            _write(target, value)

    def _step(self, lives: tuple[int, ...]) -> Step:
        """A step's sizes, made once for each live size."""
        shown = [rows if most is None else most for rows, most in zip(lives, self._padded, strict=True)]
        made = self._steps[lives] = Step(self._told(lives), self._told(shown))
        return made

    def _told(self, rows: Lives) -> Sizes:
        """The sizes of every axis that is told, or follows from one that is."""
        fixed = {axis: size for axis, size in self._sizes.items() if axis.fixed}
        told = {**fixed, **dict(zip(self._axes, rows, strict=True))}
        return told | {axis: size.at(told) for axis, size in self._relations.items()}


def _compute_of_slots(
    name: str, function: Callable[..., Any], needs: Sequence[str], view: Any, batch: Any, lives: Lives
) -> None:
    """Call a function that names slots alone, as one does who knows that."""
    del batch, lives
    _write(getattr(view, name), function(*[getattr(view, need) for need in needs]))


def _write(target: torch.Tensor, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        target.copy_(value, non_blocking=True)
    elif isinstance(value, int | float):
        target.fill_(value)
    else:
        target.copy_(torch.tensor(value, device="cpu"), non_blocking=True)


def _sorted(parts: Iterable[_Rows | _Box]) -> tuple[list[_Rows], list[_Box]]:
    """The simple ones and the others, which need not be told apart in each step then."""
    found = list(parts)
    return [one for one in found if isinstance(one, _Rows)], [one for one in found if isinstance(one, _Box)]


def _lead(dim: Dim) -> Axis | None:
    """The one axis that a size is a multiple of; None where there are several, or none."""
    varying = [tuple(axis for axis in axes if not axis.fixed) for axes, _ in dim.terms]
    return varying[0][0] if len(set(varying)) == 1 and len(varying[0]) == 1 else None


def _reset(part: _Rows | _Box, lives: Lives, padded: Lives) -> None:
    """Reset a slot's tail, along each dim that varies."""
    if part.pad is None:
        return
    if isinstance(part, _Rows):
        live, most = part.each * lives[part.axis], part.each * padded[part.axis]
        if live < most:
            part.buffer[live:most].fill_(part.pad)
    else:
        whole = part.at(padded)
        for dim, reach in enumerate(part.reach):
            live = reach(lives)
            if live < whole.shape[dim]:
                whole.narrow(dim, live, whole.shape[dim] - live).fill_(part.pad)
