"""`slotgraph backends`: which devices steps can run on here, why others cannot, and what each can do."""

from typing import Any

from ...backends import load, names
from ...dataflow.serial import to_data
from ..explained.tables import Table
from .screen import Form, FormOption, show


def backends(*, form: FormOption = Form.TABLE) -> None:
    """List the backends: those that can run here, why others cannot, and what each device can do.

    \b
    Examples:
      slotgraph backends
      slotgraph backends --format json
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    found = [_facts_of(name) for name in names()]
    able = {facts["name"]: facts["capabilities"] for facts in found if facts["capabilities"] is not None}
    rows = [{name: value for name, value in facts.items() if name != "capabilities"} for facts in found]
    shown = [Table("backends", rows)]
    if able:
        fields = next(iter(able.values()))
        facts = [{"capability": one, **{name: data[one] for name, data in able.items()}} for one in fields]
        shown.append(Table("capabilities", facts))
    show(form, found, *shown)


def _facts_of(name: str) -> dict[str, Any]:
    """What is known of one backend; one that fails to load is listed with what it raised."""
    facts = {"name": name, "available": False, "device": None, "reason": "", "capabilities": None}
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
