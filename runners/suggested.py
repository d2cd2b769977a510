"""Suggests a declaration to start from, as Python source, from a few sample batches of an engine."""

import itertools
import keyword
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from ..dataflow.errors import ConfigError
from ..dataflow.hostdata import HOST_KINDS, tensor_of
from ..dataflow.ragged import Ragged, without_nesting
from ..dataflow.sources import keys_of, look_up

DimSizes = tuple[int | None, ...]
"""The size of one dim in each batch, None where the batch lacks the value."""
OF_TOKENS: Final = frozenset(
    {"input_ids", "positions", "out_cache_loc", "slot_mapping", "input_embeds", "mrope_positions"}
)
"""Names whose rows are tokens in the engines of the field."""
OF_REQUESTS: Final = frozenset({"seq_lens", "req_pool_indices", "block_tables", "temperatures", "top_ps", "lora_ids"})
"""Names whose rows are requests."""
_MOST_TIMES: Final = 16
"""Sizes that are at most so many times those of an axis count as following from it."""
_HEAD: Final = """\
# Suggested from {count} batches. Decide each pad=...: what padded rows hold, since the step runs them, too:
# a number that does no harm, or keep("why nothing reads them")."""


@attrs.frozen
class SampledSlot:
    """The values of one name.

    Attributes:
        name: The name.
        values: The value of each batch as a tensor, None where it is missing.
        is_ragged: Whether its rows have different lengths; only their number is in `values`.
        was_list: Whether a value was a list, which has no dtype.
        was_on_host: Whether its tensors were in host memory.
    """

    name: str
    values: Sequence[torch.Tensor | None]
    is_ragged: bool = False
    was_list: bool = False
    was_on_host: bool = False

    @property
    def present(self) -> list[torch.Tensor]:
        """The values that are not missing."""
        return [value for value in self.values if value is not None]

    def sizes(self) -> Iterator[DimSizes]:
        """Yield the sizes of each dim."""
        for dim in range(self.present[0].dim()):
            yield tuple(None if value is None else value.shape[dim] for value in self.values)


def suggest(batches: Sequence[Any], name: str = "StepInputs") -> str:
    """Write a declaration for batches like these, as Python source to start from.

    Sizes that change together become one axis. Comments mark what samples cannot show, above all the values of padded
    rows.

    Args:
        batches: At least two, of different sizes: mappings, or objects with attributes.
        name: The name of the class.

    Raises:
        ConfigError: No size differs between the batches, or no class can have that name.
    """
    if not _is_name(name):
        raise ConfigError(f"suggest: {name!r} cannot be the name of a class: give another one")
    names = filter(_is_name, dict.fromkeys(itertools.chain.from_iterable(map(keys_of, batches))))
    values = {key: [look_up(batch, key) for batch in batches] for key in names}
    read = {key: _read(key, each) for key, each in values.items() if not any(map(callable, each))}
    samples = [one for parts in read.values() for one in parts]
    axes = _axes(samples)
    if not axes:
        raise ConfigError("suggest: no size differs between these batches: pass batches with other numbers of requests")
    on_device = any(not value.is_cpu for one in samples for value in one.present)
    lines = [*_head(read, axes), _HEAD.format(count=len(batches)), f"class {name}(Inputs):"]
    for key, parts in read.items():
        if not parts:
            lines.append(f"    {key}: Any  # a field, no slot: functions of computed slots may read it")
        else:
            lines += _declared(key, parts, axes, on_device=on_device)
    return "\n".join([*lines, ""])


def _head(read: Mapping[str, Sequence[SampledSlot]], axes: Mapping[tuple[str, DimSizes], str]) -> list[str]:
    """Return what stands before the class: imports, axes and groups."""
    groups = {key: parts for key, parts in read.items() if parts and parts[0].name != key}
    own = sorted({axis for axis in axes.values() if axis.isidentifier()} - {"BATCH", "TOKENS"})
    names = [axis for axis in ("BATCH", "TOKENS") if any(axis in text.split() for text in axes.values())]
    if own:
        names.append("Axis")
    lines = list[str]()
    if groups:
        lines.append("from collections.abc import Mapping")
    if not all(read.values()):
        lines.append("from typing import Any")
    if lines:
        lines.append("")
    lines += ["import torch", f"from slotgraph import {', '.join([*names, 'Inputs', 'copied'])}"]
    if groups:
        lines.append("from slotgraph.extend import Group")
    lines.append("")
    for axis in own:
        lines.append(f'{axis} = Axis("{axis}")')
    if own:
        lines.append("")
    for key, parts in groups.items():
        members = ", ".join(f'"{one.name.removeprefix(f"{key}.")}"' for one in parts)
        lines += [f"{key.upper()}_GROUP = Group({members})", ""]
    return [*lines, ""]


def _is_name(key: str) -> bool:
    return key.isidentifier() and not keyword.iskeyword(key) and not key.startswith("_")


def _read(key: str, values: Sequence[Any]) -> list[SampledSlot]:
    """Read the values of one key: one slot, the slots of a group if they are mappings, or none if it is a field."""
    holders = [value for value in values if isinstance(value, Mapping)]
    if not holders or any(value is not None and not isinstance(value, Mapping) for value in values):
        one = _sampled(key, values)
        return [] if one is None else [one]
    if any({*holder} != {*holders[0]} for holder in holders) or not all(map(_is_name, map(str, holders[0]))):
        return []
    parts = [_sampled(f"{key}.{name}", [look_up(value, name) for value in values]) for name in holders[0]]
    found = [one for one in parts if one is not None]
    dims = {one.present[0].dim() for one in found}
    return found if len(found) == len(parts) and len(dims) == 1 else []


def _sampled(name: str, values: Sequence[Any]) -> SampledSlot | None:
    """Read the values of one name. Return None if they are no tensors, arrays or lists of numbers."""
    if all(value is None for value in values) or not all(
        isinstance(value, (type(None), torch.Tensor, *HOST_KINDS)) for value in values
    ):
        return None
    values = [value.tolist() if isinstance(value, Ragged) else value for value in map(without_nesting, values)]
    was_list = any(isinstance(value, list | tuple) for value in values)
    try:
        made = [_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError):
        if not (was_list and all(isinstance(row, list | tuple) for value in values for row in value or ())):
            return None
        counts = [None if value is None else len(value) for value in values]
        made = [None if rows is None else torch.empty(rows, 0, dtype=torch.int64, device="cpu") for rows in counts]
        return SampledSlot(name, made, is_ragged=True, was_list=True)
    dims = {value.dim() for value in made if value is not None}
    on_host = all(value is None or (isinstance(value, torch.Tensor) and value.is_cpu) for value in values)
    return SampledSlot(name, made, was_list=was_list, was_on_host=on_host) if len(dims) == 1 else None


def _tensor(value: Any) -> torch.Tensor | None:
    """Return a value as a tensor. Numbers in lists become int64, or float32."""
    return value if value is None or isinstance(value, torch.Tensor) else tensor_of(value, torch.int64)


def _axes(samples: Sequence[SampledSlot]) -> dict[tuple[str, DimSizes], str]:
    """Find, by slot and sizes, the axis of each dim whose size varies, or its expression over another axis."""
    found = dict[tuple[str, DimSizes], str]()
    named = dict[str, DimSizes]()
    varying = [
        (one, dim, sizes) for one in samples for dim, sizes in enumerate(one.sizes()) if len({*sizes} - {None}) > 1
    ]
    # known names first, then rows of other slots, then columns; a base axis before axes that depend on it
    varying.sort(key=lambda each: (each[0].name not in OF_TOKENS | OF_REQUESTS, each[1], sum(filter(None, each[2]))))
    for one, dim, sizes in varying:
        text = next((text for axis, known in sorted(named.items()) if (text := _follows(sizes, axis, known))), None)
        if one.name in OF_TOKENS and text in {None, "BATCH"}:
            text = "TOKENS"
        elif one.name in OF_REQUESTS and dim == 0 and text in {None, "TOKENS"}:
            text = "BATCH"
        elif text is None:
            text = f"{one.name.upper().replace('.', '_')}_SIZE" if "BATCH" in named else "BATCH"
        if text.isidentifier():
            named.setdefault(text, sizes)
        found[one.name, sizes] = text
    return found


def _follows(sizes: DimSizes, axis: str, known: DimSizes) -> str | None:
    """Return sizes as an expression over an axis, as source code, or None if they do not depend on it."""
    pairs = [(size, base) for size, base in zip(sizes, known, strict=True) if size is not None and base]
    if len({base for _, base in pairs}) < 2:  # noqa: PLR2004 - one pair fits anything
        return None
    if all(size == base + 1 for size, base in pairs):
        return f"{axis} + 1"
    times = {size / base for size, base in pairs}
    if len(times) > 1 or not (ratio := times.pop()).is_integer() or ratio > _MOST_TIMES:
        return None
    return axis if ratio == 1 else f"{axis} * {int(ratio)}"


def _declared(
    key: str, parts: Sequence[SampledSlot], axes: Mapping[tuple[str, DimSizes], str], *, on_device: bool
) -> Iterator[str]:
    """Yield the lines that declare a slot or a group: comments on what is unknown, and the declaration."""
    shapes = list[list[str]]()
    for one in parts:
        notes, shape = _noted(one, axes, on_device=on_device)
        of = "" if one.name == key else f"{one.name.removeprefix(f'{key}.')}: "
        yield from (f"    # {of}{note}" for note in notes)
        shapes.append(shape)
    names = [one.name.removeprefix(f"{key}.") for one in parts]

    def joined(texts: Sequence[str]) -> str:
        """Return what all parts have, or a mapping of their names."""
        if len({*texts}) == 1:
            return texts[0]
        return "{" + ", ".join(f'"{name}": {text}' for name, text in zip(names, texts, strict=True)) + "}"

    is_padded = any((one.name, sizes) in axes for one in parts for sizes in one.sizes())
    options = [
        f"dtype={joined([str(one.present[0].dtype) for one in parts])}",
        *["pad=..."] * is_padded,
        *[f"ragged={joined([str(one.is_ragged) for one in parts])}"] * any(one.is_ragged for one in parts),
        *["default=None"] * any(len(one.present) < len(one.values) for one in parts),
        *[f"group={key.upper()}_GROUP"] * (parts[0].name != key),
    ]
    kind = "torch.Tensor" if parts[0].name == key else "Mapping[str, torch.Tensor]"
    yield f"    {key}: {kind} = copied({', '.join([*map(joined, zip(*shapes, strict=True)), *options])})"


def _noted(
    one: SampledSlot, axes: Mapping[tuple[str, DimSizes], str], *, on_device: bool
) -> tuple[list[str], list[str]]:
    """Return notes on what is unknown of a slot, and its shape."""
    first = one.present[0]
    shape = [axes.get((one.name, sizes)) or str(first.shape[dim]) for dim, sizes in enumerate(one.sizes())]
    notes = list[str]()
    if one.is_ragged:
        shape[1] = "..."
        notes.append("its rows have different lengths: put the longest in place of the first ..., or a fixed axis")
    elif one.was_list:
        notes.append("it came in lists, which have no dtype: say the one that the step reads")
    if len({value.dtype for value in one.present}) > 1:
        notes.append(f"its dtype varies: {', '.join(sorted({str(value.dtype) for value in one.present}))}")
    if one.was_on_host and on_device:
        notes.append("it was on the host: add placement='host' if the step reads it there")
    is_padded = any((one.name, sizes) in axes for sizes in one.sizes())
    if not is_padded and not one.is_ragged and all(torch.equal(value, first) for value in one.present):
        notes.append("it is the same in all batches: constant(...) sets such a slot once")
    return notes, shape
