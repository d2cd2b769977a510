"""`slotgraph backends`: which devices steps can run on here, why others cannot, and what each can do."""

from collections.abc import Iterator
from typing import Any

import attrs
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...backends.registry import load, names
from ...dataflow.capabilities import Capabilities
from ...dataflow.serial import to_data
from .screen import Form, FormOption, show, table


def backends(*, form: FormOption = Form.TABLE) -> None:
    """List the backends: those that can run here, why others cannot, and what each device can do.

    \b
    Examples:
      slotgraph backends
      slotgraph backends --format json
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    found = [_facts_of(name) for name in names()]
    show(form, found, Group(*_tables(found)))


def _facts_of(name: str) -> dict[str, Any]:
    """What is known of one backend; one that fails to load is listed with what it raised."""
    facts = {"name": name, "available": False, "reason": "", "device": None, "capabilities": None}
    try:
        kind = load(name)
        available = kind.is_available()
        facts |= {"available": bool(available), "reason": available.reason}
        if available:
            backend = kind()
            facts |= {"device": str(backend.device), "capabilities": to_data(backend.capabilities)}
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything, and is reported, not hidden
        facts |= {"available": False, "reason": f"{type(error).__name__}: {error}"}
    return facts


def _tables(found: list[dict[str, Any]]) -> Iterator[Table]:
    """A row a backend; then one a capability, with a column for each backend that can run here."""
    made = table("backend", "here", "device", "why not")
    for facts in found:
        here = Text("yes", style="green") if facts["available"] else Text("no", style="red")
        made.add_row(Text(facts["name"]), here, facts["device"] or "-", Text(facts["reason"] or "-"))
    yield made
    able = [facts for facts in found if facts["capabilities"] is not None]
    if able:
        made = table("capability", *(facts["name"] for facts in able))
        for field in attrs.fields(Capabilities):
            made.add_row(field.name, *(Text(_words(facts["capabilities"][field.name])) for facts in able))
        yield made


def _words(value: Any) -> str:
    """A capability's value as one reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = [f"{key}: {one}" for key, one in value.items()]
    return (", ".join(map(str, value)) or "-") if isinstance(value, list) else "-" if value is None else str(value)
