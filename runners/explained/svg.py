"""A picture in the making: boxes, lines and letters on a canvas, whose letters are known to fit."""

import unicodedata
from typing import Final
from xml.etree import ElementTree as ET

from .markup import Child, append, clean, node, svg_text
from .style import KINDS, PICTURE

ADVANCE: Final = 0.615
"""Width of a letter over its size: the widest of the fonts that a picture may be shown in."""
_NONE: Final = frozenset({"Mn", "Me", "Cf"})
_WIDE: Final = frozenset({"W", "F"})
NORMAL: Final = 12.0
SMALL: Final = 10.5


class Picture:
    """A canvas. name: for ids, told apart from other pictures of a page. title, told: read out by screen readers."""

    def __init__(self, name: str, title: str, told: str) -> None:
        self.name = name
        self._title, self._told = title, told
        self._parts: list[ET.Element] = []
        self._width = self._height = 0.0

    def add(self, *elements: Child) -> None:
        """Draw on top of all that was drawn."""
        holder = node("g")
        append(holder, elements)
        self._parts += list(holder)

    def reach(self, x: float, y: float) -> None:
        """Have the canvas be so large at least."""
        self._width, self._height = max(self._width, x), max(self._height, y)

    @property
    def element(self) -> ET.Element:
        """The picture, as it stands in a page."""
        width, height, name = round(self._width), round(self._height), self.name
        return node(
            "svg",
            node("title", self._title, id=f"{name}-title"),
            node("desc", self._told, id=f"{name}-told"),
            node("style", PICTURE),
            self._parts,
            xmlns="http://www.w3.org/2000/svg",
            class_="slotgraph",
            id=name,
            viewBox=f"0 0 {width} {height}",
            width=width,
            height=height,
            role="img",
            aria_labelledby=f"{name}-title {name}-told",
        )

    @property
    def text(self) -> str:
        """The picture as a file of its own."""
        return svg_text(self.element)


def width_of(text: str, size: float = NORMAL) -> float:
    """At most so wide is a line of text."""
    return sum(map(_columns, text)) * size * ADVANCE


def clipped(text: str, room: float, size: float = NORMAL) -> str:
    """The text, cut to a room, with dots where it is cut; nothing where not even these fit."""
    text = clean(text).replace("\n", " ")
    if width_of(text, size) <= room + 0.01:
        return text
    kept = ""
    for letter in text:
        if width_of(f"{kept}{letter}…", size) > room:
            break
        kept += letter
    return f"{kept}…" if kept else ""


def letters(
    text: str, x: float, y: float, *, size: float = NORMAL, class_: str | None = None, at: str = "start"
) -> ET.Element:
    """A line of text from its base line; at: which of its ends, or its middle, x is of."""
    return node("text", text, x=x, y=y, font_size=size, class_=class_, text_anchor=None if at == "start" else at)


def box(x: float, y: float, width: float, height: float, *, class_: str, radius: float = 5) -> ET.Element:
    """A box."""
    return node("rect", x=x, y=y, width=width, height=height, rx=radius, class_=class_)


def line(*points: tuple[float, float], class_: str = "wire") -> ET.Element:
    """A line through points."""
    drawn = " L".join(f"{x:.6g} {y:.6g}" for x, y in points)
    return node("path", d=f"M{drawn}", class_=class_)


def tip(x: float, y: float) -> ET.Element:
    """The head of an arrow to the right, which ends at x."""
    return node("path", d=f"M{x - 7:.6g} {y - 3.5:.6g} L{x:.6g} {y:.6g} L{x - 7:.6g} {y + 3.5:.6g} Z", class_="tip")


def dot(x: float, y: float) -> ET.Element:
    """Where two lines meet."""
    return node("circle", cx=x, cy=y, r=3, class_="tap")


def hint(text: str) -> ET.Element:
    """What a browser shows over the element that this is put into."""
    return node("title", text)


def coloured(kind: str) -> str:
    """The class of a kind of slot."""
    return kind if kind in KINDS else "outside"


def _columns(letter: str) -> int:
    if unicodedata.category(letter) in _NONE:
        return 0
    return 2 if unicodedata.east_asian_width(letter) in _WIDE else 1
