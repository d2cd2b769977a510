"""The pictures of memory: addresses downwards, phases to the right, a box a slot.

A box is coloured where its bytes must hold, and pale where they are only kept for it. Heights grow with the logarithm
of bytes, since slots of 4 bytes lie beside slots of megabytes; addresses and bytes are written beside them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final
from xml.etree import ElementTree as ET

import attrs

from .markup import node
from .svg import SMALL, Picture, box, clipped, coloured, hint, letters, line, width_of

EDGE: Final = 10.0
TOP: Final = 24.0
HEAD: Final = 38.0
AREA: Final = 760.0
NARROW: Final = 150.0
LEAST: Final = 20.0
TALLER: Final = 2.5
GAP: Final = 3.0


@attrs.frozen(kw_only=True)
class Spot:
    """A slot in a picture: what is written on it, its colour, bytes from `start` to `stop`, and when they must hold.

    columns: the phases, by number. held: whether it has its bytes in all other phases, too. gap: bytes behind it that
    alignment costs. told: what a browser shows over it.
    """

    label: str
    kind: str
    start: int
    stop: int
    columns: tuple[int, ...]
    held: bool
    gap: int
    told: str


@attrs.frozen
class Area:
    """One allocation and what lies in it."""

    title: str
    spots: Sequence[Spot]


def memory_picture(areas: Sequence[Area], phases: Sequence[str], *, title: str, told: str, name: str) -> Picture:
    """The picture of some allocations over the same phases."""
    return _Drawing(areas, phases, Picture(name, title, told)).picture()


def heights_of(spots: Sequence[Spot]) -> dict[int, float]:
    """Where each first and each last byte stands, from the top: in order, and each box high enough for its letters."""
    found: dict[int, float] = {}
    before = -GAP
    for bound in sorted({bound for spot in spots for bound in (spot.start, spot.stop)}):
        ends = [found[spot.start] + _height(spot) for spot in spots if spot.stop == bound and spot.start < bound]
        before = found[bound] = max([before + GAP, *ends])
    return found


def _height(spot: Spot) -> float:
    return LEAST + TALLER * max(0.0, math.log2(max(spot.stop - spot.start, 1) / 64))


class _Drawing:
    """The picture in the making."""

    def __init__(self, areas: Sequence[Area], phases: Sequence[str], picture: Picture) -> None:
        self._areas, self._phases, self._picture = areas, phases, picture
        spots = [spot for area in areas for spot in area.spots]
        widest = max((width_of(f"{spot.start:,}", SMALL) for spot in spots), default=0.0)
        self._left = EDGE + widest + 8
        self._column = max(NARROW, AREA / max(len(phases), 1))
        self._right = self._left + self._column * len(phases)
        self._beside = max((width_of(_bytes(spot), SMALL) for spot in spots if spot.held), default=0.0)

    def picture(self) -> Picture:
        """Allocations below one another."""
        for index, phase in enumerate(self._phases):
            text = clipped(phase, self._column - 8)
            drawn = letters(text, self._left + (index + 0.5) * self._column, TOP - 6, class_="strong", at="middle")
            self._picture.add(node("g", drawn, hint(phase)))
        top = TOP
        for area in self._areas:
            top = self._area(area, top + HEAD)
        self._picture.reach(self._right + self._beside + EDGE + 8, top + EDGE)
        return self._picture

    def _area(self, area: Area, top: float) -> float:
        """One allocation; where it ends."""
        at = heights_of(area.spots)
        bottom = top + max(at.values(), default=0.0)
        self._picture.add(letters(clipped(area.title, self._right - EDGE), EDGE, top - 10, class_="strong"))
        for index in range(len(self._phases) + 1):
            x = self._left + index * self._column
            self._picture.add(line((x, top), (x, bottom), class_="rule dashed"))
        self._picture.add([self._held(spot, top, at) for spot in area.spots if spot.held])
        self._picture.add([self._spot(spot, top, at) for spot in area.spots])
        self._picture.add(self._margin(area.spots, top, at))
        return bottom

    def _held(self, spot: Spot, top: float, at: dict[int, float]) -> ET.Element:
        """Bytes that are a slot's in all phases."""
        height = at[spot.stop] - at[spot.start]
        return box(self._left, top + at[spot.start], self._right - self._left, height, class_="held", radius=3)

    def _spot(self, spot: Spot, top: float, at: dict[int, float]) -> ET.Element:
        first, height = top + at[spot.start], at[spot.stop] - at[spot.start]
        drawn = [self._run(spot, run, (first, height)) for run in _runs(spot.columns)]
        return node("g", drawn, self._gap(spot, first + height), hint(spot.told), class_="row")

    def _run(self, spot: Spot, run: tuple[int, int], lies: tuple[float, float]) -> Iterator[ET.Element]:
        """The box of some phases next to one another; with its bytes where they are not in the margin."""
        (first, height), left, right = lies, self._x(run[0]), self._x(run[1])
        base, room = first + height / 2 + 4, right - left - 16
        yield box(left + 1.5, first + 0.5, right - left - 3, height - 1, class_=f"node {coloured(spot.kind)}", radius=4)
        if not spot.held:
            yield letters(_bytes(spot), right - 9, base, size=SMALL, class_="faint", at="end")
            room -= width_of(_bytes(spot), SMALL) + 10
        yield letters(clipped(spot.label, room), left + 9, base)

    def _gap(self, spot: Spot, bottom: float) -> ET.Element | None:
        """What alignment costs, a thin line below the slot."""
        if not spot.gap:
            return None
        width = spot.gap / (spot.gap + spot.stop - spot.start) * (self._right - self._left)
        return node("rect", x=self._left, y=bottom + 0.7, width=width, height=1.4, class_="gap")

    def _margin(self, spots: Sequence[Spot], top: float, at: dict[int, float]) -> Iterator[ET.Element]:
        """Addresses on the left, where there is room for another line, and on the right bytes that are in no box."""
        free = -math.inf
        for spot in sorted(spots, key=lambda one: (one.start, one.stop)):
            middle = top + (at[spot.start] + at[spot.stop]) / 2 + 4
            if middle >= free:
                free = middle + SMALL * 1.3
                yield letters(f"{spot.start:,}", self._left - 8, middle, size=SMALL, class_="faint", at="end")
                if spot.held:
                    yield letters(_bytes(spot), self._right + 8, middle, size=SMALL, class_="faint")

    def _x(self, column: int) -> float:
        return self._left + column * self._column


def _runs(columns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Columns next to one another, as the first and one past the last."""
    start = 0
    for index, column in enumerate(columns):
        if index + 1 == len(columns) or columns[index + 1] != column + 1:
            yield columns[start], column + 1
            start = index + 1


def _bytes(spot: Spot) -> str:
    return f"{spot.stop - spot.start:,} B" + (f" + {spot.gap:,}" if spot.gap else "")
