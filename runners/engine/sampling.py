"""Sampling: random batches of a declaration, with values that its slots may have, for checks, tests and recordings."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import attrs
import torch

from ...dataflow.axes import Sizes, extent
from ...dataflow.capabilities import CACHE_LOC, DEVICE, SEQ_LEN_FILL, Capabilities, Role, resolve_dtype
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, RecordingError
from ...dataflow.slots import Slot
from ...dataflow.sources import Answering, Call, Path, Source
from ...dataflow.tails import Once, Pad

CPU: Final = torch.device("cpu")
Values = Mapping[str, Any]
"""How to make values by name.

By slot it is the lowest and the highest number, or a function of shape, dtype and generator that makes a tensor. By
field it is the value, or a function of the live sizes and the generator that makes it.
"""
NO_VALUES: Final[Values] = {}


@attrs.frozen(eq=False)
class Sample:
    """A batch and its side arguments by name. A drawn batch consists of mappings along the paths of its sources."""

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
    """Draw a random batch of `live` rows on each axis that a fill accepts.

    Cache locations are distinct and not 0, which is reserved. Sequence lengths (slots padded with SEQ_LEN_FILL) are 1,
    or 1 to their limit. Other whole numbers are 0 to their limit, or 0 and 1, so that they are indices of any table.
    Floats are normally distributed.

    Args:
        declaration: The slots and fields.
        capabilities: The record of the backend.
        live: The size of every axis, including fixed ones.
        generator: A generator on the CPU.
        absent: Optional slots to leave out.
        values: By slot or field, a rule for other values.
        device: Where tensors for device slots are.

    Raises:
        ConfigError: A value cannot be drawn, or a name is unknown.
    """
    declaration.check_names("absent", absent, "optional")
    declaration.check_names("values", values.keys() - declaration.fields.keys(), "copied")
    sample = Sample({}, {})
    drawn: dict[Path, torch.Tensor] = {}
    left_out = {path_of(declaration, name) for name in absent}
    for name in declaration.sources:
        path = path_of(declaration, name)
        slot = declaration.slots[name]
        if path not in left_out and path not in drawn:
            tensor = _draw(name, slot, capabilities, live, generator, values.get(name))
            drawn[path] = tensor.to(device if slot.placement == DEVICE else CPU)
            if not put(sample, path, drawn[path]):
                raise ConfigError(
                    f"slot {name!r} reads {path}, which is inside another slot's tensor: give batches of your own, "
                    "batches="
                )
    for name, field in declaration.fields.items():
        if name in values:
            value = values[name]
            sample.batch[name] = value(live, generator) if callable(value) else value
        elif field.default is attrs.NOTHING:
            raise ConfigError(
                f"field {name!r} of {declaration.name} has no default: give its value, values={{{name!r}: ...}}"
            )
    return sample


def path_of(declaration: Declaration, name: str) -> Path:
    """Return the path of a slot's value in a batch. Raise ConfigError if its source is a function of the batch."""
    source = declaration.sources[name]
    if isinstance(source, Path):
        return source
    raise ConfigError(
        f"slot {name!r} reads {source}: a batch that suits a function cannot be drawn; give batches of your own, with "
        "batches=, or declare a dotted path as its source"
    )


def _draw(
    name: str, slot: Slot, capabilities: Capabilities, live: Sizes, generator: torch.Generator, rule: Any
) -> torch.Tensor:
    """Draw data for one slot, by its rule in `values`, if it has one.

    Raise ConfigError if the rule makes no such data.
    """
    missing = [axis.name for axis in sorted(slot.axes) if axis not in live]
    if missing:
        raise ConfigError(
            f"slot {name!r}: live lacks a size for {', '.join(missing)}: give one for each axis, fixed ones too"
        )
    shape = extent(slot.shape, live)
    dtype = resolve_dtype(slot.dtype, capabilities)
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    limit = None if slot.limit is None else slot.limit.at(live)
    if callable(rule):
        made = rule(shape, dtype, generator)
        if isinstance(made, torch.Tensor) and tuple(made.shape) == shape and not made.is_meta:
            return made
        got = f"shape {list(made.shape)} on {made.device}" if isinstance(made, torch.Tensor) else type(made).__name__
        raise ConfigError(f"slot {name!r}: values' function must make a tensor of shape {list(shape)}, got {got}")
    if rule is None and not is_whole:
        exact = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=exact, device=CPU, generator=generator).to(dtype)
    if rule is None and is_location(slot):  # locations differ, since two rows that write one location would race
        count = math.prod(shape)
        if limit is not None and limit < count:
            raise ConfigError(f"slot {name!r}: {count} rows need as many locations above 0, over its limit of {limit}")
        return torch.randperm(count, device=CPU, generator=generator).add(1).reshape(shape).to(dtype)
    if rule is None:
        tail = slot.rule()
        highest = 1 if limit is None else limit
        is_length = isinstance(tail, Pad | Once) and tail.value == SEQ_LEN_FILL  # lengths are at least 1
        rule = min(int(is_length), highest), highest
    match rule:
        case (int() | float() as low, int() | float() as high) if low <= high:
            if is_whole:
                return torch.randint(int(low), int(high) + 1, shape, device=CPU, generator=generator).to(dtype)
            share = torch.rand(shape, dtype=torch.float64, device=CPU, generator=generator)
            return share.mul(high - low).add(low).to(dtype)
    raise ConfigError(
        f"slot {name!r}: values has {rule!r} for it: give the lowest and the highest number, or a function of "
        "shape, dtype and generator that makes a tensor"
    )


def signed_slots(declaration: Declaration, values: Values) -> list[str]:
    """Return copied slots that may have negative numbers, because no limit, role, length or rule excludes them."""
    found = list[str]()
    for name in declaration.sources:
        slot = declaration.slots[name]
        tail = declaration.slots[name].rule()
        is_length = isinstance(tail, Pad | Once) and tail.value == SEQ_LEN_FILL
        is_plain = isinstance(slot.dtype, torch.dtype) and slot.dtype.is_signed and not slot.dtype.is_complex
        if is_plain and not is_length and slot.limit is None and name not in values:
            found.append(name)
    return found


def is_location(slot: Slot) -> bool:
    """Return whether a slot has locations in a cache, of which no two are the same."""
    return isinstance(slot.dtype, Role) and slot.dtype.name == CACHE_LOC.name


def put(sample: Sample, path: Path, value: Any) -> bool:
    """Put a value at its source's path, in nested mappings. Return False if another source is in the way."""
    holder: Any = sample.side if path.from_side else sample.batch
    *outer, last = path.parts
    for part in outer:
        holder = holder.setdefault(part, {}) if isinstance(holder, dict) else None
    fits = isinstance(holder, dict) and not isinstance(holder.get(last), dict)
    if fits:
        holder[last] = value
    return fits


class RecordedBatch(dict[str, Any], Answering):
    """A batch made of recorded values. For a source that is a function it returns the recorded result."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.answers: dict[int, Any] = {}

    def answer(self, source: Source) -> Any:
        """Return the value that the source had in the recorded batch, or None if it was absent."""
        return self.answers.get(id(source))


def rebuilt(declaration: Declaration, slots: Mapping[str, Any], fields: Mapping[str, Any]) -> Sample:
    """Make a batch and side arguments with given values. Raise RecordingError if a source cannot be replaced."""
    batch = RecordedBatch(fields)
    sample = Sample(batch, {})
    for name, value in slots.items():
        source = declaration.sources.get(name)
        if isinstance(source, Call):
            batch.answers[id(source)] = value
        elif isinstance(source, Path):
            if not put(sample, source, value):
                raise RecordingError(
                    f"slot {name!r}: its source {source} contains another source, or is inside of one: give it a "
                    f"separate one"
                )
        elif source is not None:
            raise RecordingError(
                f"slot {name!r}: its source is a {type(source).__name__}, which a recorded batch cannot stand in for: "
                "declare a path, side(...) or a function of the batch"
            )
    return sample
