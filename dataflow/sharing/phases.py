"""Phases: which runners are in use one after the other, and which may be at once."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from ..errors import ConfigError

Pair = tuple[str, str]


def _names(value: Any) -> tuple[str, ...]:
    """Names in a row; text alone would be a row of letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        message = f"phases: expected names in a list or tuple, got {value!r}"
        raise ConfigError(message)
    names = tuple(value)
    if not all(isinstance(name, str) for name in names):
        message = f"phases: expected names, got {names!r}"
        raise ConfigError(message)
    return names


def _pairs(value: Any) -> tuple[Pair, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        message = f"overlaps: expected pairs of phases in a list or tuple, got {value!r}"
        raise ConfigError(message)
    pairs = tuple(_names(pair) for pair in value)
    for pair in pairs:
        if len(pair) != 2:  # noqa: PLR2004 - a pair
            message = f"overlaps: expected pairs of phases, got {pair!r}"
            raise ConfigError(message)
    return tuple((first, second) for first, second in pairs)


@attrs.frozen
class Schedule:
    """The phases of a loop, and which of them may be in use at once.

    A phase begins with the first write to an input of one of its runners, by a fill or a producer, and ends when the
    step is done and its outputs have been read. order: phases that run one after the other, then from the first again;
    one may be left out of a round, none may come out of turn. overlaps: pairs of phases of which one may begin before
    the other has ended. anytime: phases that keep to no order, and so may overlap with all.
    Raises ConfigError for a name that is unknown, empty, or said twice.
    """

    order: tuple[str, ...] = attrs.field(converter=_names)
    overlaps: tuple[Pair, ...] = attrs.field(default=(), converter=_pairs)
    anytime: tuple[str, ...] = attrs.field(default=(), converter=_names)

    def __attrs_post_init__(self) -> None:
        """Refuse what is no schedule."""
        faults = [*self._faults()]
        if faults:
            message = f"no schedule: {'; '.join(faults)}"
            raise ConfigError(message)

    def _faults(self) -> Iterator[str]:
        phases = self.phases
        yield from (f"{name!r} is no phase's name" for name in phases if not name.strip())
        yield from (f"phase {name!r} is named {count} times" for name, count in Counter(phases).items() if count > 1)
        for pair in self.overlaps:
            for name in pair:
                if name not in phases:
                    known = ", ".join(map(repr, phases))
                    yield f"overlaps names {name!r}, which stands neither in order nor in anytime: phases are {known}"
            if pair[0] == pair[1]:
                yield f"overlaps pairs {pair[0]!r} with itself: runners of one phase never share, leave it out"

    @property
    def phases(self) -> tuple[str, ...]:
        """All of them: those in order, then those at any time."""
        return (*self.order, *self.anytime)

    @functools.cached_property
    def _overlapping(self) -> frozenset[Pair]:
        return frozenset(self.overlaps) | {(second, first) for first, second in self.overlaps}

    def meet(self, first: str, second: str) -> bool:
        """Whether two phases may be in use at once; a phase meets itself."""
        return first == second or bool({first, second} & {*self.anytime}) or (first, second) in self._overlapping

    def span(self, first: str, last: str) -> tuple[str, ...]:
        """The phases from one of the order to another, both included, past the end of a round where need be."""
        start, stop, count = self.order.index(first), self.order.index(last), len(self.order)
        return tuple(self.order[(start + step) % count] for step in range((stop - start) % count + 1))

    @functools.cached_property
    def at_once(self) -> tuple[tuple[str, ...], ...]:
        """The largest sets of phases that may all be in use at once: cliques, by Bron and Kerbosch's algorithm."""
        found: list[tuple[str, ...]] = []

        def grow(chosen: tuple[str, ...], left: list[str], done: list[str]) -> None:
            if not left and not done:
                found.append(chosen)
            for number, name in enumerate(left):
                rest, before = left[number + 1 :], [*done, *left[:number]]
                grow(
                    (*chosen, name),
                    [one for one in rest if self.meet(one, name)],
                    [one for one in before if self.meet(one, name)],
                )

        grow((), [*self.phases], [])
        return tuple(found)

    def __str__(self) -> str:
        """The round, and what may overlap."""
        parts = [" -> ".join(self.order)] if self.order else []
        parts += [f"{first} and {second} may overlap" for first, second in self.overlaps]
        parts += [f"{name} at any time" for name in self.anytime]
        return "; ".join(parts)
