"""A layout as tables for a terminal: who lies where, who shares with whom, why that is safe, and the bytes saved."""

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .layout import Layout, Place


def layout_tables(layout: Layout) -> RenderableType:
    """The schedule, each block with the slots in it, and what it comes to."""
    return Group(*_parts(layout))


def _parts(layout: Layout) -> Iterator[RenderableType]:
    yield Text(f"phases: {layout.schedule}", style="bold")
    for number, block in enumerate(layout.blocks):
        yield Text(f"\n{block.nbytes:,} bytes of {block.device}'s {block.placement} memory", style="bold")
        yield _block(layout, number)
    yield _totals(layout)


def _block(layout: Layout, number: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("from", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("slot", "needed in", "and why it lies there"):
        table.add_column(name, overflow="fold")
    places = [place for place in layout.places if place.block == number]
    for place in sorted(places, key=lambda place: (place.offset, -place.nbytes, str(place))):
        table.add_row(*map(Text, _cells(layout, place)))
    return table


def _cells(layout: Layout, place: Place) -> Iterator[str]:
    yield f"{place.offset:,}"
    yield f"{place.nbytes:,}"
    yield str(place)
    yield str(place.lifetime)
    yield "; ".join(layout.sharing(place.member, place.slot)) or f"shares with none: {place.lifetime.why}"


def _totals(layout: Layout) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("in all", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    rows = {
        "each slot with memory of its own": layout.apart,
        "one memory for slots of one name, where they never meet": layout.by_name,
        "this layout": layout.nbytes,
        "needed at once, at most": layout.peak,
        "saved against memory of each one's own": layout.saved,
    }
    for what, nbytes in rows.items():
        table.add_row(Text(what), Text(f"{nbytes:,}"))
    return table
