"""An explanation as tables for a terminal."""

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .explain import Explanation, SlotFacts


def tables(explanation: Explanation) -> RenderableType:
    """Slots, dependencies and, where sizes were given, the plan and its bytes."""
    return Group(*_parts(explanation))


def _parts(explanation: Explanation) -> Iterator[RenderableType]:
    yield Text(f"{explanation.declaration} on {explanation.backend}", style="bold")
    if explanation.axes:
        yield Text(f"sizes, live/padded: {_sizes(explanation)}")
    yield _slots(explanation)
    yield from _remarks(explanation)
    if explanation.order:
        yield Text("\ncomputed, in this order", style="bold")
        yield _computed(explanation)
    if explanation.plan is not None:
        yield Text("\nplan", style="bold")
        yield Text(str(explanation.plan))
        yield Text(
            f"\n{explanation.nbytes:,} bytes of buffers for this bucket; this step copies {explanation.copied:,}"
        )
    else:
        yield Text("\nGive the size of every axis to see the plan and its bytes.", style="italic")


def _sizes(explanation: Explanation) -> str:
    return ", ".join(f"{a.name}={a.padded}" if a.fixed else f"{a.name}={a.live}/{a.padded}" for a in explanation.axes)


def _slots(explanation: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=explanation.plan is not None)
    for name in ("slot", "kind", "shape", "dtype", "on", "tail", "comes from"):
        table.add_column(name, footer="in all" if name == "slot" else "", no_wrap=name == "slot", overflow="fold")
    if explanation.plan is not None:
        table.add_column("padded to")
        table.add_column("bytes", justify="right", footer=f"{explanation.nbytes:,}")
    for slot in explanation.slots:
        table.add_row(*map(Text, _cells(slot)))
    return table


def _cells(slot: SlotFacts) -> Iterator[str]:
    yield slot.name
    yield ", ".join(_kind(slot))
    yield f"[{', '.join(slot.shape)}]"
    yield f"{slot.dtype} ({slot.role})" if slot.role else slot.dtype
    yield slot.placement
    yield slot.tail or "-"
    yield origin(slot)
    if slot.padded is not None:
        yield f"[{', '.join(map(str, slot.padded))}]"
        yield f"{slot.nbytes:,}"


def _kind(slot: SlotFacts) -> Iterator[str]:
    yield slot.kind
    if slot.parameter is not None:
        yield f"argument {slot.parameter}"
    if slot.optional:
        yield "optional"
    if slot.when is not None:
        yield f"when {slot.when}"


def origin(slot: SlotFacts) -> str:
    """Where the value comes from, in a word or two."""
    if slot.function is not None:
        return f"{slot.function}({', '.join(slot.needs)})"
    if slot.value is not None:
        return f"set once: {slot.value}"
    if slot.source is not None:
        source = "batch" if slot.source == f"batch.{slot.name}" else slot.source
        return source if slot.limit is None else f"{source}, at most {slot.limit}"
    return {"staged": "a producer", "output": "the step writes it"}.get(slot.kind, "-")


def _remarks(explanation: Explanation) -> Iterator[Text]:
    if explanation.fields:
        yield Text(f"carried from the batch as they are: {', '.join(explanation.fields)}")
    if explanation.disabled:
        yield Text(f"switched off by the settings: {', '.join(explanation.disabled)}")


def _computed(explanation: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("slot", "needs", "function", "runs on the"):
        table.add_column(name, overflow="fold")
    slots = {slot.name: slot for slot in explanation.slots}
    for slot in (slots[name] for name in explanation.order):
        table.add_row(*map(Text, (slot.name, ", ".join(slot.needs) or "-", slot.function or "-", slot.runs_on or "-")))
    return table
