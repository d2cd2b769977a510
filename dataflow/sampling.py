"""Sampling: random batches of a declaration, of values that its slots bear, for checks, tests and recordings."""

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, cast

import attrs
import torch

from .axes import Sizes, extent
from .capabilities import CACHE_LOC, DEVICE, SEQ_LEN_FILL, Capabilities, Role, resolve_dtype
from .declaration import Declaration
from .errors import ConfigError
from .slots import Slot
from .sources import Path, SideArgument
from .tails import Once, Pad

CPU: Final = torch.device("cpu")
Maker = Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]
Values = Mapping[str, Any]
"""By slot a `Maker`, or the lowest and the highest number; by field its value, or a function of the live sizes and the
generator that makes it."""
NO_VALUES: Final[Values] = {}


@attrs.frozen(eq=False)
class Sample:
    """A random batch: mappings along the paths of its sources, and its side arguments by name."""

    batch: dict[str, Any]
    side: dict[str, Any]


def sample_batch(
    declaration: Declaration,
    capabilities: Capabilities,
    live: Sizes,
    generator: torch.Generator,
    *,
    absent: Collection[str] = (),
    values: Values = NO_VALUES,
    device: torch.device = CPU,
) -> Sample:
    """A random batch of `live` rows on each axis, fixed axes included, that a fill admits.

    Cache locations are distinct and not 0, which is reserved; sequence lengths (slots padded with SEQ_LEN_FILL) are 1,
    or 1 to their limit; other whole numbers 0 to their limit, or 0 and 1, so that they are indices of any table; floats
    are normal. Of the rest `values` tells. generator: on the CPU. absent: optional slots to leave out. device: where
    tensors for slots on the device are. ConfigError where that cannot be drawn, or a name is none.
    """
    _check_names(declaration, absent, values)
    sample = Sample({}, {})
    drawn: dict[Path | SideArgument, torch.Tensor] = {}
    left_out = {path_of(name, declaration.slots[name]) for name in absent}
    for name, slot in sampled_slots(declaration):
        path = path_of(name, slot)
        if path not in left_out and path not in drawn:
            tensor = _draw(name, slot, capabilities, live, generator, values)
            drawn[path] = tensor.to(device if slot.placement == DEVICE else CPU)
            _place(sample, path, drawn[path], name)
    sample.batch.update(_fields(declaration, live, generator, values))
    return sample


def sampled_slots(declaration: Declaration) -> Iterator[tuple[str, Slot]]:
    """The slots that a batch is sampled for: those that a fill copies."""
    return ((name, slot) for name, slot in declaration.slots.items() if slot.reads(name) is not None)


def path_of(name: str, slot: Slot) -> Path | SideArgument:
    """Where a slot's value stands in a batch. ConfigError where only a function of the batch knows."""
    source = slot.reads(name)
    if isinstance(source, Path | SideArgument):
        return source
    message = (
        f"slot {name!r} reads {source}: a batch that suits a function cannot be drawn; give batches of your own, with "
        "batches=, or declare a dotted path as its source"
    )
    raise ConfigError(message)


def _check_names(declaration: Declaration, absent: Collection[str], values: Values) -> None:
    optional = [name for name, _ in declaration.optional]
    for name in absent:
        if name not in optional:
            message = f"absent names {name!r}, which is no optional slot of {declaration.name}{_near(name, optional)}"
            raise ConfigError(message)
    known = [*(name for name, _ in sampled_slots(declaration)), *declaration.fields]
    for name in values:
        if name not in known:
            message = (
                f"values name {name!r}, which is no slot that {declaration.name} copies from a batch, nor a field of "
                f"it{_near(name, known)}"
            )
            raise ConfigError(message)


def _near(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _draw(
    name: str, slot: Slot, capabilities: Capabilities, live: Sizes, generator: torch.Generator, values: Values
) -> torch.Tensor:
    """Random data for one slot. ConfigError where what `values` has for it makes none."""
    missing = [axis.name for axis in sorted(slot.axes) if axis not in live]
    if missing:
        message = f"slot {name!r}: live lacks a size for {', '.join(missing)}: give one for each axis, fixed ones too"
        raise ConfigError(message)
    shape, dtype, rule = extent(slot.shape, live), resolve_dtype(slot.dtype, capabilities), values.get(name)
    if rule is None:
        most = slot.most()
        return _usual(name, slot, None if most is None else most.at(live), shape, dtype, generator)
    if callable(rule):
        return _made(name, cast("Maker", rule), shape, dtype, generator)
    match rule:
        case (int() | float() as low, int() | float() as high) if low <= high:
            return _between(low, high, shape, dtype, generator)
    message = (
        f"slot {name!r}: values has {rule!r} for it: give the lowest and the highest number, or a function of shape, "
        "dtype and generator that makes a tensor"
    )
    raise ConfigError(message)


def _usual(
    name: str, slot: Slot, highest: int | None, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """What a slot bears by what it declares, up to its limit."""
    if dtype.is_floating_point or dtype.is_complex:
        exact = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=exact, device=CPU, generator=generator).to(dtype)
    if is_location(slot):
        return _distinct(name, highest, shape, dtype, generator)
    return _between(*bounds(slot, highest), shape, dtype, generator)


def is_location(slot: Slot) -> bool:
    """Whether a slot holds locations in a cache, of which no two are the same."""
    return isinstance(slot.dtype, Role) and slot.dtype.name == CACHE_LOC.name


def bounds(slot: Slot, limit: int | None) -> tuple[int, int]:
    """The lowest and the highest whole number that a slot is given: lengths of sequences are not 0."""
    rule, highest = slot.rule(), 1 if limit is None else limit
    is_length = isinstance(rule, Pad | Once) and rule.value == SEQ_LEN_FILL
    return min(int(is_length), highest), highest


def _distinct(
    name: str, highest: int | None, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Locations of which no two are the same: two rows that write one would race."""
    count = torch.Size(shape).numel()
    if highest is not None and highest < count:
        message = f"slot {name!r}: {count} rows need as many locations beside 0, over its limit of {highest}"
        raise ConfigError(message)
    return torch.randperm(count, device=CPU, generator=generator).add(1).to(dtype).reshape(shape)


def _between(
    low: float, high: float, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Numbers from the lowest to the highest, both among them where they are whole."""
    if dtype.is_floating_point or dtype.is_complex:
        return (
            torch.rand(shape, dtype=torch.float64, device=CPU, generator=generator).mul(high - low).add(low).to(dtype)
        )
    return torch.randint(int(low), int(high) + 1, shape, device=CPU, generator=generator).to(dtype)


def _made(
    name: str, maker: Maker, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    made = maker(shape, dtype, generator)
    if not isinstance(made, torch.Tensor) or tuple(made.shape) != shape or made.is_meta:
        got = f"shape {list(made.shape)} on {made.device}" if isinstance(made, torch.Tensor) else type(made).__name__
        message = f"slot {name!r}: values' function must make a tensor of shape {list(shape)}, got {got}"
        raise ConfigError(message)
    return made


def _place(sample: Sample, path: Path | SideArgument, value: torch.Tensor, name: str) -> None:
    """Put a value where its source is looked for, in mappings along the path."""
    holder = sample.side if isinstance(path, SideArgument) else sample.batch
    *outer, last = path.parts
    for part in outer:
        holder = holder.setdefault(part, {})
        if not isinstance(holder, dict):
            break
    if not isinstance(holder, dict) or last in holder:
        message = f"slot {name!r} reads {path}, where another slot's tensor stands: give batches of your own, batches="
        raise ConfigError(message)
    holder[last] = value


def _fields(
    declaration: Declaration, live: Sizes, generator: torch.Generator, values: Values
) -> Iterator[tuple[str, Any]]:
    """Fields that are no slots, where `values` has them; those with defaults may be left to these."""
    for name, default in declaration.fields.items():
        if name in values:
            value = values[name]
            yield name, value(live, generator) if callable(value) else value
        elif default is attrs.NOTHING:
            message = f"field {name!r} of {declaration.name} has no default: give its value, values={{{name!r}: ...}}"
            raise ConfigError(message)
