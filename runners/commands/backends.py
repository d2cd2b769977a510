"""`slotgraph backends`: which devices steps can run on here, why others cannot, and what each can do."""

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import attrs
import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...backends.base import Backend
from ...backends.registry import load, names
from ...dataflow.capabilities import Capabilities
from ...dataflow.serial import to_data
from .screen import screen


class Format(StrEnum):
    """How backends are listed."""

    TABLE = "table"
    JSON = "json"


@attrs.frozen
class BackendFacts:
    """A backend: whether it can run here, why not, its device, and what it can do; None where it cannot run."""

    name: str
    available: bool
    reason: str
    device: str | None
    capabilities: Capabilities | None


_Format = Annotated[Format, typer.Option("--format", help="A table, or JSON for scripts.")]


def backends(*, form: _Format = Format.TABLE) -> None:
    """List the backends: those that can run here, why others cannot, and what each device can do.

    \b
    Examples:
      slotgraph backends
      slotgraph backends --format json
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    found = [facts_of(name) for name in names()]
    if form == Format.JSON:
        typer.echo(json.dumps(to_data(found), indent=2))
    else:
        screen().print(Group(_availability(found), *_capabilities(found)))


def facts_of(name: str) -> BackendFacts:
    """What is known of one backend; one that fails to load is listed with what it raised."""
    try:
        kind = load(name)
        available = kind.is_available()
        backend = kind() if available else None
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything, and is reported, not hidden
        return BackendFacts(
            name, available=False, reason=f"{type(error).__name__}: {error}", device=None, capabilities=None
        )
    return BackendFacts(
        name, bool(available), available.reason, _device(backend), backend.capabilities if backend else None
    )


def _device(backend: Backend | None) -> str | None:
    return str(backend.device) if backend else None


def _availability(found: list[BackendFacts]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("backend", "here", "device", "why not"):
        table.add_column(title, overflow="fold")
    for facts in found:
        here = Text("yes", style="green") if facts.available else Text("no", style="red")
        table.add_row(Text(facts.name), here, facts.device or "-", Text(facts.reason or "-"))
    return table


def _capabilities(found: list[BackendFacts]) -> Iterator[Table]:
    """One row a capability, one column a backend that can run here."""
    here = [(facts.name, to_data(facts.capabilities)) for facts in found if facts.capabilities is not None]
    if not here:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("capability", *(name for name, _ in here)):
        table.add_column(title, overflow="fold")
    for field in attrs.fields(Capabilities):
        table.add_row(field.name, *(Text(_words(data[field.name])) for _, data in here))
    yield table


def _words(value: Any) -> str:
    """A capability's value as one reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {one}" for key, one in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
