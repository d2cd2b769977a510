"""Gathering: every source of a plan out of a batch, in the plan's order, as few look-ups as the batch allows."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .sources import Side, Source, look_up

Sources = tuple[Any, ...]
Getter = Callable[[Any], Sources]


def chosen(places: Sequence[int]) -> Callable[[Sources], Sources]:
    """A call that takes some sources out of all, in a given order, always as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda sources: tuple([sources[place] for place in places])


class Gather:
    """Reads a fixed list of sources from batches; an absent one comes as None."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        names = [source.plain_name for source in sources]
        self._names = tuple(name for name in names if name is not None) if None not in names else ()
        self._getters: dict[type, Getter] = {}

    def __call__(self, batch: Any, side: Side) -> Sources:
        """The sources' values, in order."""
        if self._names:
            getter = self._getters.get(type(batch)) or self._getter(type(batch))
            try:
                return getter(batch)
            except (AttributeError, KeyError):
                return self._one_by_one(batch, side)
        return self._one_by_one(batch, side)

    def _one_by_one(self, batch: Any, side: Side) -> Sources:
        return tuple([source.read(batch, side) for source in self._sources])

    def _getter(self, kind: type) -> Getter:
        names = self._names
        if hasattr(kind, "__missing__"):  # which an index would call

            def getter(batch: Any) -> Sources:
                return tuple([look_up(batch, name) for name in names])

        else:
            make = operator.itemgetter if issubclass(kind, Mapping) else operator.attrgetter
            many = make(*names)
            getter = many if len(names) > 1 else lambda batch: (many(batch),)  # type: ignore[assignment] # a tuple of all
        self._getters[kind] = getter
        return getter
