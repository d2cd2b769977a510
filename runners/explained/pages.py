"""Pages: explanations with all their facts, and the results of commands."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ...dataflow.shown import Shown, Table
from ..serial import to_data


class Explained(Shown):
    """Shows a result whose page has all its data."""

    __slots__ = ()

    def facts(self) -> Any:
        """Return the whole result as plain data."""
        return to_data(self)


@attrs.frozen
class Page(Shown):
    """The result of a command: its tables."""

    found: Sequence[Table]

    def tables(self) -> Iterator[Table]:
        """Return all tables."""
        return iter(self.found)
