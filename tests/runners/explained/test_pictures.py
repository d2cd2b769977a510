"""The pictures show each thing once, in its place: no box on another, no letters outside or over one another."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import Inputs
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.explain import explain_declaration
from slotgraph.runners.explained import fill_picture
from slotgraph.runners.explained.dependencies import dependencies, depths_of, rows_of
from slotgraph.runners.explained.memory_picture import Area, Spot, heights_of, memory_picture
from slotgraph.runners.explained.pictures import pictures
from slotgraph.runners.explained.svg import Picture, clipped, width_of
from tests.runners.explained.houses import full_batch, full_runner, many_runner, proxy
from tests.strategies import declarations

NAMESPACE = "{http://www.w3.org/2000/svg}"


class Rectangle(NamedTuple):
    """A box from its left upper corner to its right lower one."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Rectangle") -> bool:
        """Whether both have more than an edge in common."""
        return (
            self.left < other.right - 0.1
            and other.left < self.right - 0.1
            and self.top < other.bottom - 0.1
            and other.top < self.bottom - 0.1
        )

    def holds(self, other: "Rectangle") -> bool:
        """Whether the other is inside."""
        return (
            self.left <= other.left + 0.1
            and self.top <= other.top + 0.1
            and self.right >= other.right - 0.1
            and self.bottom >= other.bottom - 0.1
        )


def drawn(picture: Picture) -> ET.Element:
    """A picture, parsed."""
    return ET.fromstring(picture.text)  # noqa: S314 - our own text


def canvas(root: ET.Element) -> Rectangle:
    """The whole picture."""
    return Rectangle(*map(float, root.attrib["viewBox"].split()))


def boxes(root: ET.Element, class_: str = "node") -> list[Rectangle]:
    """The boxes of a class."""
    found = [one.attrib for one in root.iter(f"{NAMESPACE}rect") if class_ in one.get("class", "").split()]
    places = [[float(one[name]) for name in ("x", "y", "width", "height")] for one in found]
    return [Rectangle(x, y, x + width, y + height) for x, y, width, height in places]


def words(root: ET.Element) -> Iterator[tuple[str, Rectangle]]:
    """Each line of text, and at most where it is."""
    for one in root.iter(f"{NAMESPACE}text"):
        text, size = one.text or "", float(one.attrib["font-size"])
        width, x, y = width_of(text, size), float(one.attrib["x"]), float(one.attrib["y"])
        left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "start")]
        yield text, Rectangle(left, y - size * 0.78, left + width, y + size * 0.2)


def assert_sound(picture: Picture) -> None:
    """Nothing is outside, no text over another, no empty box."""
    root = drawn(picture)
    whole, texts = canvas(root), [*words(root)]
    assert [text for text, place in texts if not whole.holds(place)] == []
    pairs = itertools.combinations([one for one in texts if one[0]], 2)
    assert [(one[0], other[0]) for one, other in pairs if one[1].meets(other[1])] == []
    shapes = boxes(root) + boxes(root, "held") + boxes(root, "outside")
    assert all(whole.holds(shape) and shape.right > shape.left and shape.bottom > shape.top for shape in shapes)


@given(inputs=declarations())
@settings(max_examples=25)
def test_dependencies_of_any_declaration(inputs: type[Inputs]) -> None:
    """Each slot has one box, no box lies on another, and each need is tapped once."""
    explanation = explain_declaration(inputs.slotgraph, Capabilities(), "cpu")
    picture = dependencies(explanation, ["a step"])
    assert_sound(picture)
    root = drawn(picture)
    nodes = boxes(root)
    assert len(nodes) == len(explanation.slots)
    assert not any(one.meets(other) for one, other in itertools.combinations(nodes, 2))
    taps = list(root.iter(f"{NAMESPACE}circle"))
    assert len(taps) == sum(len(slot.needs) for slot in explanation.slots)


@given(inputs=declarations())
@settings(max_examples=25)
def test_needs_come_before(inputs: type[Inputs]) -> None:
    """A slot's row is below, and its column to the right of, all that it needs."""
    explanation = explain_declaration(inputs.slotgraph, Capabilities(), "cpu")
    at = {row.name: index for index, row in enumerate(rows_of(explanation))}
    depths = depths_of(explanation)
    for slot in explanation.slots:
        for need in slot.needs:
            assert at[need] < at[slot.name]
            assert depths.get(need, 0) < depths[slot.name]


@pytest.mark.parametrize("lowering", ["foreach", "slot_by_slot", "fused", "in_graph"])
def test_pictures_of_a_full_runner(lowering: str) -> None:
    """All pictures are sound, by each lowering, with steps done."""
    runner = full_runner(lowering=lowering)
    runner.capture()
    for rows in (1, 5, 7):
        runner(full_batch(rows), **proxy(rows))
    for picture in pictures(slotgraph.explain(runner)).values():
        assert_sound(picture)


@pytest.mark.parametrize("lowering", ["slot_by_slot", "in_graph"])
def test_pictures_of_many_slots(lowering: str) -> None:
    """They are sound with 48 slots and nine buckets too, and no wider than a page."""
    explanation = slotgraph.explain(many_runner(lowering))
    assert len(explanation.declaration.slots) == 48
    for picture in pictures(explanation).values():
        assert_sound(picture)
        assert canvas(drawn(picture)).right < 1450


def test_fills_are_as_wide_as_calls() -> None:
    """In a row, a step of more calls has the wider box, in proportion; what the graph does is in the graph's."""
    runner = full_runner(lowering="slot_by_slot")
    rows = fill_picture.rows_of(slotgraph.explain(runner))
    root = drawn(fill_picture.fill_picture(rows[:1], "a runner"))
    steps = rows[0].fill.steps
    upper = [shape for shape in boxes(root) if shape.bottom - shape.top > 20]
    widths = {step.calls: shape.right - shape.left for step, shape in zip(steps, upper, strict=True) if step.calls}
    assert len(widths) > 2
    assert len({round(width / calls, 3) for calls, width in widths.items()}) == 1
    rows = fill_picture.rows_of(slotgraph.explain(full_runner(lowering="in_graph")))
    root = drawn(fill_picture.fill_picture(rows[:1], "a runner"))
    (graph,) = boxes(root, "graph")
    inside = [shape for shape in boxes(root) if graph.holds(shape) and shape != graph]
    assert len(inside) == sum(step.inside for step in rows[0].fill.steps) == 3


def test_alike_buckets_share_a_row() -> None:
    """Buckets that do the same are one row; the eager fill has one of its own."""
    labels = [row.label for row in fill_picture.rows_of(slotgraph.explain(many_runner("slot_by_slot")))]
    assert labels == ["9 buckets, 1 to 256", "eager, not padded"]
    labels = [row.label for row in fill_picture.rows_of(slotgraph.explain(many_runner("foreach")))]
    assert labels == ["8 buckets, 1 to 128", "bucket 256", "eager, not padded"], "the last has copies apart"


def spots() -> st.SearchStrategy[list[Spot]]:
    """Slots in one allocation, no two of which share a byte in the same phase."""

    def made(found: Sequence[tuple[int, int, int]]) -> list[Spot]:
        taken: list[Spot] = []
        for at, (start, nbytes, column) in enumerate(found):
            spot: Any = Spot(
                label=f"slot_{at}",
                kind="copied",
                start=start,
                stop=start + nbytes,
                columns=(column,),
                held=False,
                gap=0,
                told="",
            )
            if not any(
                one.columns == spot.columns and one.start < spot.stop and spot.start < one.stop for one in taken
            ):
                taken.append(spot)
        return taken

    numbers = st.tuples(st.integers(0, 64), st.integers(0, 1 << 20), st.integers(0, 2))
    return st.lists(numbers, min_size=1, max_size=12).map(made)


@given(found=spots())
@settings(max_examples=40)
def test_addresses_keep_their_order(found: list[Spot]) -> None:
    """A later byte stands lower, each box is high enough for its name, and boxes meet only where bytes do."""
    at = heights_of(found)
    bounds = sorted(at)
    assert all(at[one] < at[other] for one, other in itertools.pairwise(bounds))
    assert all(at[spot.stop] - at[spot.start] >= 19.9 for spot in found if spot.stop > spot.start)
    root = drawn(memory_picture([Area("memory", found)], ["a", "b", "c"], title="t", told="t", name="n"))
    shapes = boxes(root)
    for (one, other), (shape, another) in zip(
        itertools.combinations(found, 2), itertools.combinations(shapes, 2), strict=True
    ):
        meet = one.columns == other.columns and one.start < other.stop and other.start < one.stop
        assert shape.meets(another) == meet


@given(text=st.text(max_size=40), room=st.floats(0, 300))
def test_clipped_text_fits(text: str, room: float) -> None:
    """Cut text is no wider than its room, and what fits is not cut."""
    cut = clipped(text, room)
    assert width_of(cut) <= room + 0.02
    if width_of(text.replace("\n", " ")) <= room and re.fullmatch(r"[a-z ]*", text):
        assert cut == text
