"""The picture of what follows from what: from the batch over copied and computed slots to the step.

Every slot has a row of its own, so that its line to the step crosses no other box. What a computed slot needs is tapped
from these lines by a bus of its own, as in the drawing of a circuit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from xml.etree import ElementTree as ET

import attrs

from ...dataflow.compute import RANKS, SETTINGS, STEP
from ...dataflow.explain import Explanation, SlotFacts
from .markup import node
from .svg import NORMAL, SMALL, Picture, box, clipped, coloured, dot, hint, letters, line, tip, width_of

PITCH: Final = 44.0
HEIGHT: Final = 34.0
TOP: Final = 44.0
EDGE: Final = 10.0
PAD: Final = 10.0
LANE: Final = 9.0
GAP: Final = 26.0
BATCH: Final = "batch"
PRODUCER: Final = "producer"
_MOST_NAME: Final = 230.0
_MOST_SAID: Final = 150.0
_GIVEN: Final[Mapping[str, str]] = {STEP: "sizes of the step", SETTINGS: "settings", RANKS: "ranks"}


@attrs.frozen
class Row:
    """One row: a slot, or something beside the batch that a computed slot needs, by its name.

    outside: where the slot's value comes from, and label: what is read there, where it has another name.
    """

    name: str
    slot: SlotFacts | None = None
    outside: str | None = None
    label: str = ""


@attrs.define(eq=False)
class _Columns:
    """Left edges of the columns, and their widths."""

    outside: float
    first: float
    slot: float
    computed: Sequence[float]
    lanes: Sequence[float]
    width: float
    step: float
    step_width: float
    output: float


def dependencies(explanation: Explanation, step: Sequence[str], name: str = "dependencies") -> Picture:
    """The picture. step: what is written on the step's box, a line each."""
    return _Drawing(explanation, step, name).picture()


def rows_of(explanation: Explanation) -> list[Row]:
    """All rows: slots by where they come from, then what else is given, computed slots in order, and outputs."""
    slots = {slot.name: slot for slot in explanation.slots}
    computed = [slots[name] for name in explanation.order]
    plain = [slot for slot in explanation.slots if slot.function is None]
    fed = [Row(slot.name, slot, _outside(slot), _label(slot)) for slot in plain if slot.kind != "output"]
    rank = {outside: at for at, outside in enumerate(dict.fromkeys(row.outside for row in fed))}
    last = {None: len(rank) + 1, PRODUCER: len(rank)}
    fed.sort(key=lambda row: last.get(row.outside, rank[row.outside]))
    given = dict.fromkeys(need for slot in computed for need in slot.needs if need not in slots)
    outputs = [Row(slot.name, slot) for slot in plain if slot.kind == "output"]
    return [*fed, *(Row(need) for need in given), *(Row(slot.name, slot) for slot in computed), *outputs]


def _outside(slot: SlotFacts) -> str | None:
    if slot.source is not None:
        return f"argument {slot.argument}" if slot.argument else BATCH
    return PRODUCER if slot.kind == "staged" else None


def _label(slot: SlotFacts) -> str:
    """What a source is called, where it has not the slot's name."""
    if slot.source is None or slot.source == f"batch.{slot.name}":
        return ""
    return slot.source.removeprefix("batch.").removeprefix("argument ")


def depths_of(explanation: Explanation) -> dict[str, int]:
    """How many computed slots lie on the way to each computed slot, itself included."""
    slots, depths = {slot.name: slot for slot in explanation.slots}, dict[str, int]()
    for name in explanation.order:
        depths[name] = 1 + max((depths.get(need, 0) for need in slots[name].needs), default=0)
    return depths


class _Drawing:
    """The picture in the making."""

    def __init__(self, explanation: Explanation, step: Sequence[str], name: str) -> None:
        self._explanation = explanation
        self._rows = rows_of(explanation)
        self._depths = depths_of(explanation)
        self._at = {row.name: TOP + index * PITCH for index, row in enumerate(self._rows)}
        self._step = step
        count, title = len(explanation.slots), f"Dependencies of {explanation.declaration}"
        order = ", ".join(explanation.order) or "none"
        self._picture = Picture(name, title, f"{count} slots lead to the step. Computed, in this order: {order}.")
        self._columns = self._lay_out()

    def picture(self) -> Picture:
        """Everything drawn: boxes on top of lines."""
        columns, bottom = self._columns, TOP + max(len(self._rows), 1) * PITCH
        self._headings()
        groups = [self._row(row) for row in self._rows]
        self._picture.add(groups, self._outsides())
        self._picture.add(
            self._bar(columns.step, columns.step_width, TOP, bottom - PITCH + HEIGHT, "graph", self._step)
        )
        right = columns.output + columns.width if self._outputs() else columns.step + columns.step_width
        self._picture.reach(right + EDGE, bottom)
        return self._picture

    def _outputs(self) -> list[Row]:
        return [row for row in self._rows if row.slot is not None and row.slot.kind == "output"]

    def _lay_out(self) -> _Columns:
        outsides = [*(row.outside for row in self._rows if row.outside), *(_given(r) for r in self._rows if not r.slot)]
        outside = min(_MOST_SAID, max((width_of(text) for text in outsides), default=0.0)) + 2 * PAD
        said = max((width_of(row.label, SMALL) for row in self._rows), default=0.0)
        slot = EDGE + outside + max(GAP, min(_MOST_SAID, said) + 2 * PAD)
        facts = [row.slot for row in self._rows if row.slot is not None]
        names = max((max(width_of(one.name), width_of(_told(one), SMALL)) for one in facts), default=80.0)
        width = min(_MOST_NAME, names) + 2 * PAD
        computed, lanes, x = [], [], slot + width
        for depth in range(1, max(self._depths.values(), default=0) + 1):
            members = [name for name in self._explanation.order if self._depths[name] == depth]
            lanes.append(x + GAP / 2 + LANE * (len(members) - 1))
            x = lanes[-1] + GAP
            computed.append(x)
            x += width
        handed = max((width_of(_argument(one), SMALL) for one in facts), default=0.0)
        step = x + max(GAP, min(_MOST_SAID, handed) + 2 * PAD)
        told = min(_MOST_NAME, max(width_of(text) for text in self._step)) + 2 * PAD
        first = EDGE + outside
        return _Columns(EDGE, first, slot, computed, lanes, width, step, told, step + told + GAP)

    def _headings(self) -> None:
        columns = self._columns
        named = [("given", columns.outside), ("slots", columns.slot)]
        named += [("computed", x) for x in columns.computed[:1]]
        named += [("the step", columns.step), *([("outputs", columns.output)] if self._outputs() else [])]
        for text, x in named:
            self._picture.add(letters(text, x, TOP - 16, size=NORMAL, class_="faint"))

    def _row(self, row: Row) -> ET.Element:
        """A row with all of its lines, which light up together."""
        drawn = node("g", class_="row")
        if row.slot is None:
            drawn.extend(self._given_row(row))
        else:
            drawn.extend(self._slot_row(row, row.slot))
        return drawn

    def _given_row(self, row: Row) -> Iterator[ET.Element]:
        columns, y = self._columns, self._at[row.name]
        taps = [self._lane(name) for name in self._explanation.order if row.name in self._slot(name).needs]
        yield line((columns.first, y + HEIGHT / 2), (max(taps), y + HEIGHT / 2))
        yield self._bar(columns.outside, columns.first - EDGE, y, y + HEIGHT, "outside", [_given(row)])

    def _slot_row(self, row: Row, slot: SlotFacts) -> Iterator[ET.Element]:
        columns, y = self._columns, self._at[row.name]
        middle, x = y + HEIGHT / 2, self._left(row, slot)
        if row.outside is not None:
            yield line((columns.first, middle), (x, middle), class_="wire dashed" if slot.optional else "wire")
            yield tip(x, middle)
            if row.label:
                text = clipped(row.label, x - columns.first - PAD, SMALL)
                yield node(
                    "g", letters(text, columns.first + PAD / 2, middle - 5, size=SMALL, class_="faint"), hint(row.label)
                )
        if slot.function is not None:
            yield from self._bus(slot, x, middle)
        if slot.kind == "output":
            yield from (line((columns.step + columns.step_width, middle), (x, middle)), tip(x, middle))
        else:
            yield from (line((x + columns.width, middle), (columns.step, middle)), tip(columns.step, middle))
        if slot.parameter is not None:
            yield self._handed(_argument(slot), middle - 5)
        yield self._node(slot, x, y)

    def _handed(self, told: str, y: float) -> ET.Element:
        """That graphs are handed a slot's value, written right before the step."""
        x = self._columns.step - PAD
        text = clipped(told, _MOST_SAID, SMALL)
        return node("g", letters(text, x, y, size=SMALL, class_="faint", at="end"), hint(told))

    def _left(self, row: Row, slot: SlotFacts) -> float:
        if slot.kind == "output":
            return self._columns.output
        return self._columns.computed[self._depths[row.name] - 1] if slot.function is not None else self._columns.slot

    def _bus(self, slot: SlotFacts, x: float, y: float) -> Iterator[ET.Element]:
        """From the lines of what a slot needs, down to it."""
        lane = self._lane(slot.name)
        taps = [self._at[need] + HEIGHT / 2 for need in slot.needs]
        if taps:
            yield line((lane, min(taps)), (lane, y), (x, y), class_="bus")
            yield from (dot(lane, tap) for tap in taps)
            yield tip(x, y)

    def _lane(self, name: str) -> float:
        """Where a computed slot's bus runs: the first slot's next to its column, so that none crosses another's end."""
        depth = self._depths[name]
        members = [one for one in self._explanation.order if self._depths[one] == depth]
        return self._columns.lanes[depth - 1] - LANE * members.index(name)

    def _slot(self, name: str) -> SlotFacts:
        return next(slot for slot in self._explanation.slots if slot.name == name)

    def _node(self, slot: SlotFacts, x: float, y: float) -> ET.Element:
        room = self._columns.width - 2 * PAD
        class_ = f"node {coloured(slot.kind)}" + (" dashed" if slot.optional else "")
        return node(
            "g",
            box(x, y, self._columns.width, HEIGHT, class_=class_),
            letters(clipped(slot.name, room), x + PAD, y + 15, class_="strong"),
            letters(clipped(_told(slot), room, SMALL), x + PAD, y + 28, size=SMALL, class_="faint"),
            hint(_whole(slot)),
        )

    def _outsides(self) -> Iterator[ET.Element]:
        """A bar beside all the rows that come from one place."""
        columns = self._columns
        for outside in dict.fromkeys(row.outside for row in self._rows if row.outside):
            at = [self._at[row.name] for row in self._rows if row.outside == outside]
            yield self._bar(columns.outside, columns.first - EDGE, min(at), max(at) + HEIGHT, "outside", [outside])

    def _bar(self, x: float, width: float, top: float, bottom: float, class_: str, told: Sequence[str]) -> ET.Element:
        room = width - 2 * PAD
        lines = [letters(clipped(text, room), x + PAD, top + 21 + 17 * at) for at, text in enumerate(told)]
        self._picture.reach(x + width + EDGE, top + 21 + 17 * len(told))
        bottom = max(bottom, top + 12 + 17 * len(told))
        return node("g", box(x, top, width, bottom - top, class_=class_), lines, hint("\n".join(told)))


def _argument(slot: SlotFacts) -> str:
    """Of an operator, which takes a slot's value."""
    return "" if slot.parameter is None else f"argument {slot.parameter}"


def _given(row: Row) -> str:
    return _GIVEN.get(row.name, f"field {row.name}")


def _told(slot: SlotFacts) -> str:
    """What stands below a slot's name."""
    host = " host" if slot.placement == "host" else ""
    return f"{slot.dtype} [{', '.join(slot.shape)}]{host}"


def _whole(slot: SlotFacts) -> str:
    """A slot in several lines."""
    lines = [slot.name, f"{slot.kind}, {_told(slot)}"]
    if slot.function is not None:
        lines.append(f"{slot.function}({', '.join(slot.needs)}) on the {slot.runs_on}")
    lines += [f"from {slot.source}"] if slot.source else []
    lines += [f"tail: {slot.tail}"] if slot.tail else []
    lines += [f"{slot.nbytes:,} bytes"] if slot.nbytes is not None else []
    return "\n".join(lines)
