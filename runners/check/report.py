"""The report of a check: what was found, on how many batches, and what was left out."""

from collections.abc import Mapping
from typing import Any

import attrs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...dataflow.errors import CheckError


@attrs.frozen
class Finding:
    """Something wrong."""

    check: str  # the check that found it
    slot: str | None  # the slot through which it came, if one is to blame
    message: str

    def __str__(self) -> str:
        """On one line."""
        return f"{self.check}: {self.message}"


@attrs.frozen(kw_only=True)
class CheckReport:
    """The results of checks of one runner."""

    runner: str
    findings: tuple[Finding, ...]
    steps: Mapping[str, int]  # how many batches each check looked at
    notes: tuple[str, ...] = ()  # what was left out, and why
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def of(self, check: str) -> tuple[Finding, ...]:
        """What one check found."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def raise_if_failed(self) -> None:
        """Raise CheckError with every finding, if there is one."""
        if self.findings:
            raise CheckError(str(self))

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**attrs.asdict(self), "ok": self.ok}

    @property
    def _lines(self) -> list[str]:
        return [*map(str, self.findings), *(f"note: {note}" for note in self.notes)]

    @property
    def _count(self) -> str:
        return f"{len(self.findings) or 'no'} finding{'' if len(self.findings) == 1 else 's'}"

    def __str__(self) -> str:
        """A line for the whole, then one a finding and one a note."""
        total = ", ".join(f"{name} on {count} steps" for name, count in self.steps.items())
        return "\n".join([f"{self.runner}: {self._count} ({total}; {self.seconds:.1f} s)", *self._lines])

    def table(self) -> RenderableType:
        """What `rich` prints: a row a check, then what was found and noted."""
        table = Table("check", title=f"{self.runner}: {self._count} in {self.seconds:.1f} s", title_justify="left")
        for heading in ("steps", "findings"):
            table.add_column(heading, justify="right")
        table.add_column("slots")
        for name, steps in self.steps.items():
            found = self.of(name)
            slots = dict.fromkeys(finding.slot for finding in found if finding.slot is not None)
            table.add_row(name, str(steps), str(len(found)), ", ".join(slots))
        return Group(table, *map(Text, self._lines))
