"""What checks find, what they look at, and the report that tells of it."""

from collections.abc import Mapping
from typing import Any, Final

import attrs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...dataflow.errors import CheckError
from ...dataflow.sources import NO_SIDE, Side

CHECKS: Final = ("poison", "parity", "addresses", "coverage", "races")
"""Every check, in the order in which they are run."""


@attrs.frozen
class Finding:
    """Something wrong: which check found it, the slot through which it came, where one is to blame, and what it is."""

    check: str
    slot: str | None
    message: str

    def __str__(self) -> str:
        """On one line."""
        return f"{self.check}: {self.message}"


@attrs.frozen(eq=False)
class Case:
    """One batch that checks run a step on: the batch, its side arguments, and live rows of the leading axis."""

    batch: Any
    side: Side = NO_SIDE
    rows: int = 0


@attrs.frozen(kw_only=True)
class CheckReport:
    """What checks of one runner came to.

    steps: by check, how many cases it looked at. notes: what was left out, and why. seconds: how long it all took.
    """

    runner: str
    findings: tuple[Finding, ...]
    steps: Mapping[str, int]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def of(self, check: str) -> tuple[Finding, ...]:
        """What one check found."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def raise_if_failed(self) -> None:
        """CheckError with every finding, where there is one."""
        if self.findings:
            raise CheckError(str(self))

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "runner": self.runner,
            "ok": self.ok,
            "steps": dict(self.steps),
            "findings": [attrs.asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        """A line for the whole, then one a finding and one a note."""
        total = ", ".join(f"{name} on {count} steps" for name, count in self.steps.items())
        head = f"{self.runner}: {_counted(len(self.findings), 'finding')} ({total}; {self.seconds:.1f} s)"
        return "\n".join([head, *map(str, self.findings), *(f"note: {note}" for note in self.notes)])

    def table(self) -> RenderableType:
        """What `rich` prints: a row a check, then what was found and noted."""
        title = f"{self.runner}: {_counted(len(self.findings), 'finding')} in {self.seconds:.1f} s"
        checks = Table(title=title, title_justify="left")
        for heading in ("check", "steps", "findings", "slots"):
            checks.add_column(heading, justify="right" if heading in ("steps", "findings") else "left")
        for name in dict.fromkeys((*self.steps, *(finding.check for finding in self.findings))):
            found = self.of(name)
            slots = dict.fromkeys(finding.slot for finding in found if finding.slot is not None)
            checks.add_row(name, str(self.steps.get(name, 0)), str(len(found)), ", ".join(slots))
        lines = [*map(str, self.findings), *(f"note: {note}" for note in self.notes)]
        return Group(checks, *(Text(line) for line in lines))


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
