"""Computed slots: a function bound to its arguments, whose result is written to the slot or to the packet."""

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import attrs
import torch

from .axes import Axis, Sizes, Step
from .capabilities import DEVICE, Capabilities, dtype_text, resolve_dtype
from .declaration import LIVE_ROWS, Declaration
from .errors import ComputeError, blame
from .fill.reach import Rows
from .guard import outside_inference
from .hostdata import HOST_KINDS, LETTERS, tensor_of
from .packet import UNIT, Move, rounded
from .slots import Slot
from .sources import OUT, STEP, Compute, Field
from .tails import Number, holds, range_of, resolve_value

_VERSION: Final = operator.attrgetter("_version")
_FACTS: Final = operator.attrgetter("shape", "dtype", "layout", "device")
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size. Torch adds and moves these, but not all other dtypes of that size."""


def words(tensor: torch.Tensor) -> torch.Tensor:
    """View the same memory as integers of the same size, if torch has a dtype for them."""
    return tensor.view(_WORDS.get(tensor.itemsize, tensor.dtype))


def word_of(number: Number, dtype: torch.dtype) -> Any:
    """Return a number of a dtype as `words` views it."""
    with outside_inference():
        return words(torch.full((), number, dtype=dtype, device="cpu")).item()


def places(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Number the positions along a dim of a tensor, in a shape that broadcasts to its own."""
    return torch.arange(tensor.shape[dim], device=tensor.device).view(-1, *[1] * (tensor.dim() - dim - 1))


def initial_value(name: str, slot: Slot, capacity: Sizes, capabilities: Capabilities) -> Any:
    """Return what a slot's buffer holds at first: a number, a tensor or nested lists.

    Raises ComputeError if a declared number does not fit the slot's dtype on this backend, or if a constant's function
    raises.
    """
    dtype = resolve_dtype(slot.dtype, capabilities)
    found = []
    for value in slot.declared_values():
        if callable(value):
            try:
                found.append(value(Step(capacity, capacity)))
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                blame(name, value, error)
            continue
        number = resolve_value(value, capabilities, capacity)
        if not holds(dtype, number):
            raise ComputeError(f"slot {name!r}: {number!r} does not fit {dtype_text(dtype)} on this backend")
        found.append(number)
    return found[0]


def write(target: torch.Tensor, value: Any, what: str, move: Move | None = None) -> None:
    """Write a function's result into its slot. `move` copies one in host memory to the slot's device.

    Raise ComputeError, which begins with `what`, before anything is written.
    """
    if isinstance(value, bool | int | float):
        if target.numel() != 1 or not holds(target.dtype, value):
            raise _misfit(what, target, f"the number {value!r}")
        target.fill_(float(value) if target.is_floating_point() else value)  # torch accepts no int of more than 64 bits
        return
    tensor = value
    if isinstance(value, HOST_KINDS):  # a NumPy array keeps its own dtype
        try:
            tensor = tensor_of(value, target.dtype, target.shape)
        except (RuntimeError, TypeError, ValueError) as error:
            raise _misfit(what, target, f"{value!r}: {error}") from error
    if not isinstance(tensor, torch.Tensor):
        raise _misfit(what, target, type(value).__name__)
    if tensor.shape != target.shape or tensor.dtype != target.dtype or tensor.layout != target.layout:
        layout = "" if tensor.layout == target.layout else f"{tensor.layout} "
        raise _misfit(what, target, f"{layout}{dtype_text(tensor.dtype)} of shape {list(tensor.shape)}")
    if tensor.is_meta:
        raise _misfit(what, target, "a tensor on meta, which has no data: name the device in the function")
    if tensor.numel() == 1 and tensor.is_cpu and not target.is_cpu:
        target.fill_(tensor.item())  # a copy from pageable memory would wait for the device
    else:
        target.copy_(tensor if move is None or not tensor.is_cpu else move(tensor))


def _misfit(what: str, target: torch.Tensor, got: str) -> ComputeError:
    return ComputeError(f"{what}: expected {dtype_text(target.dtype)} of shape {list(target.shape)}, got {got}")


@attrs.define(eq=False)
class LastRun:
    """The last run of a function that does not run in each step.

    Attributes:
        seen: The step and what its value depended on, or None if the slot may hold another value.
        ran: How often it has run.
        kept: How often its slot kept the value.
    """

    seen: Any = None
    ran: int = 0
    kept: int = 0

    @property
    def again_for_others(self) -> Compute:
        """What `again` is for the other slots of the same call: they run again when this one has run."""
        return Compute(lambda: b"%d" % self.ran, (), writes_out=False)


@attrs.frozen
class ResultTail:
    """The tail of a computed slot, which is written behind the live rows of the function's result.

    Attributes:
        axes: The varying axes of the slot.
        rows: The slot's rows, as functions of live sizes on these axes.
        word: The value that the tail holds, as `words` views it.
    """

    axes: tuple[Axis, ...]
    rows: Rows = attrs.field(eq=False)
    word: Any

    def write(self, target: torch.Tensor, live: Any) -> None:
        """Write the tail. live: Live rows on each axis, as numbers, or as tensors that a graph reads."""
        whole = words(target)
        for dim, reach in zip(self.rows.dims, self.rows.reaches, strict=True):
            whole.masked_fill_(places(whole, dim) >= reach(live), self.word)


Results = dict[tuple[str, ...], dict[str, Any]]
"""What calls for several slots have returned: by these slots, the values of those whose turn is still to come."""


def part_of(results: Results, compute: Compute, slot: str, leads: bool, /, **given: Any) -> Any:  # noqa: FBT001
    """Return a slot's part of what one call for several slots returns.

    Args:
        results: Keeps the parts of the other slots for their turns.
        compute: The function.
        slot: The slot.
        leads: Whether the slot is the first of them in each step, and therefore always calls.
        given: The function's arguments.
    """
    if not leads and slot in results.get(compute.fills, ()):
        return results[compute.fills].pop(slot)
    values = compute.function(**given)
    names = compute.fills
    if compute.writes_out:
        values = (None,) * len(names)
    if not isinstance(values, tuple) or len(values) != len(names):
        what = f"slot {slot!r}: its function fills {', '.join(names)}"
        raise ComputeError(f"{what}: return a tuple with a value for each, got {values!r:.80}")
    parts = results[compute.fills] = dict(zip(names, values, strict=True))
    return parts.pop(slot)


@attrs.frozen(eq=False)
class Computation:
    """A function bound to every argument that is known before the batch.

    A function must not write a slot that it reads, since that would change later steps. Such writes are detected.

    Attributes:
        slot: The slot that it computes.
        compute: The function as declared.
        function: The function with the arguments that are known.
        fields: Its arguments that come from the batch.
        asks_step: Whether it takes the step's sizes when it is run.
        target: Where its result goes.
        numbers: For a slot of one number, the kind of number, and the smallest and largest that it holds.
        read: The slots among its arguments and the aliases of them that it receives. Each has its own version counter.
        aliases: The aliases alone.
        versions: The versions of the aliases when last checked.
        tail: The tail to write behind the result, or None.
        live: For a tail on the device, the live rows on each of its axes, as tensors.
        again: Computes what says whether it must run again; see `Compute.again`. None if it runs in each step.
        last: Its last run, if it does not run in each step.
        move: Copies a result to the slot's device without waiting for it, or None.
    """

    slot: str
    compute: Compute
    function: "functools.partial[Any]"
    fields: Mapping[str, Field]
    asks_step: bool
    target: torch.Tensor
    numbers: tuple[Any, float, float]
    read: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    aliases: tuple[torch.Tensor, ...]
    versions: list[int]
    tail: ResultTail | None
    live: Sequence[torch.Tensor]
    again: "Computation | None" = None
    last: LastRun = attrs.field(factory=LastRun)
    move: Move | None = None

    @classmethod
    def bind(
        cls,
        slot: str,
        declaration: Declaration,
        known: Mapping[str, Any],
        target: torch.Tensor,
        compute: Compute | None = None,
        results: Results | None = None,
        tail: ResultTail | None = None,
    ) -> "Computation":
        """Bind a slot's function, or `compute`, to the values that are known. Each call passes the others.

        Args:
            slot: The slot.
            declaration: The slots and fields.
            known: The values that are known, by slot or field. Those of all slots if the function writes `out`.
            target: Where the result goes.
            compute: The function. By default the slot's own.
            results: What computations share that run in turn, so that one call can fill several slots.
            tail: The tail to write behind the result.
        """
        compute = declaration.functions[slot] if compute is None else compute
        given = {need: known[need] for need in compute.needs if need in known}
        with outside_inference():
            slots = {need: (value, value.data) for need, value in given.items() if isinstance(value, torch.Tensor)}
            if compute.writes_out:
                outs = {name: known[name].data for name in compute.fills if known.get(name) is not None}
                given[OUT] = compute.arguments(outs) or target.data
        given |= {need: alias for need, (_, alias) in slots.items()}
        read = {need: pair for need, pair in slots.items() if not pair[1].is_inference()}  # those with a counter
        axes = tail.axes if tail is not None and declaration.side(slot) == DEVICE else ()
        live = [known[LIVE_ROWS + axis.name] for axis in axes]
        asks_step = STEP in compute.needs and STEP not in known
        unknown = {need: declaration.fields[need] for need in compute.needs if need not in known and need != STEP}
        arguments = compute.arguments(given)
        function = functools.partial(compute.function, **arguments)
        if compute.fills and results is not None:
            leads = compute.fills not in results
            results.setdefault(compute.fills, {})
            function = functools.partial(part_of, results, compute, slot, leads, **arguments)
        aliases = tuple(alias for _, alias in read.values())
        is_number = target.numel() == 1 and not target.is_complex()
        numbers = range_of(target.dtype) if is_number else (None, 0, 0)
        versions = [*map(_VERSION, aliases)]
        return cls(slot, compute, function, unknown, asks_step, target, numbers, read, aliases, versions, tail, live)

    def run(self, batch: Any, step: Step | None = None) -> None:
        """Call the function and write its result, unless `again` says that the slot has it.

        Raise ComputeError if it raises, or if the slot cannot hold the result. The slot then keeps its value.
        """
        again = self.again
        last = self.last
        seen = None
        if again is not None:
            said = again.value(batch, step)
            contents = said if isinstance(said, bytes) else b""
            seen = step, contents
            if seen == last.seen and (contents or not again.truth(said)):
                last.kept += 1
                return
            last.seen = None
            last.ran += 1
        value = self.value(batch, step)
        target = self.target
        if type(value) is torch.Tensor and _FACTS(value) == _FACTS(target) and not self.compute.writes_out:
            target.copy_(value)
        else:
            self.store(value)
        self.pad(step)
        last.seen = seen

    def value(self, batch: Any, step: Step | None = None) -> Any:
        """Call the function with the arguments of this call.

        Raise ComputeError if it raises, or changes a slot that it reads.
        """
        try:
            if self.fields or self.asks_step:
                given: dict[str, Any] = {STEP: step} if self.asks_step else {}
                for name, field in self.fields.items():
                    given[name] = field.read(batch)
                value = self.function(**given)
            else:
                value = self.function()
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            blame(self.slot, self.compute.function, error)
        if self.read:
            now = [*map(_VERSION, self.aliases)]
            if now != self.versions:
                self._refuse_writes(now)
        return value

    def truth(self, value: Any) -> bool:
        """Return whether a value counts as true. Raise ComputeError if it does not say so."""
        try:
            return bool(value)
        except (ValueError, RuntimeError) as error:  # of an array or a tensor with several elements
            blame(self.slot, self.compute.function, error)

    def pad(self, step: Any) -> None:
        """Write the tail behind the result, if there is one. step: The sizes, for a function on the host."""
        if self.tail is not None:
            self.tail.write(self.target, self.live or [step.live_sizes[axis] for axis in self.tail.axes])

    def _refuse_writes(self, now: list[int]) -> NoReturn:
        """Raise ComputeError because the function wrote a slot that it reads, or changed its shape."""
        for slot, alias in self.read.values():
            alias.data = slot  # restore the slot's shape
        written = [name for name, before, after in zip(self.read, self.versions, now, strict=True) if before != after]
        self.versions[:] = now
        raise ComputeError(
            f"slot {self.slot!r}: its function changes {', '.join(map(repr, written))}, which it may only read: write "
            f"to a new tensor, or return the result"
        )

    def store(self, value: Any) -> None:
        """Write the function's result. Raise ComputeError if the slot cannot hold it."""
        kind, least, most = self.numbers
        if type(value) is kind and least <= value <= most:  # for other tensors an NPU would raise later
            self.target.fill_(value)
        elif not self.compute.writes_out:
            write(self.target, value, f"slot {self.slot!r}: its function's result", self.move)


@attrs.frozen(eq=False)
class PackedValue:
    """A computation whose result becomes bytes, in whole units.

    Attributes:
        computation: The computation.
        nbytes: Bytes of the result, in whole units.
        pack: Packs one number; None if the result goes through a host tensor.
    """

    computation: Computation
    nbytes: int
    pack: Callable[[Any], bytes] | None

    @classmethod
    def of(cls, computation: Computation) -> "PackedValue":
        """Make the same computation with a host tensor as its target."""
        target = computation.target
        nbytes = rounded(target.nbytes)
        with outside_inference():
            room = torch.zeros(max(nbytes, UNIT), dtype=torch.uint8, device="cpu")
            scratch = room[: target.nbytes].view(target.dtype).view(target.shape)
        letter = LETTERS.get(target.dtype) if target.numel() == 1 else None
        is_plain = letter is not None and computation.tail is None
        pack = struct.Struct(f"<{letter}{nbytes - target.nbytes}x").pack if is_plain else None
        return cls(attrs.evolve(computation, target=scratch), nbytes, pack)

    def bytes_of(self, batch: Any, step: Step | None = None) -> bytes:
        """Call the function and return its result as bytes.

        Raise ComputeError if it raises, or if the slot cannot hold that.
        """
        computation = self.computation
        value = computation.value(batch, step)
        if self.pack is not None and type(value) is computation.numbers[0]:
            try:
                return self.pack(value)
            except (struct.error, OverflowError):
                computation.store(value)  # this raises the ComputeError
        with torch.no_grad():
            computation.store(value)
            computation.pad(step)
        return ctypes.string_at(computation.target.data_ptr(), self.nbytes)
