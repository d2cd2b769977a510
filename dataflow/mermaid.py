"""The dependency graph of a declaration as a mermaid diagram: from the batch over the slots to the captured step."""

from collections.abc import Iterator, Sequence
from typing import Final

from .compute import RANKS, SETTINGS, STEP
from .explain import Explanation, SlotFacts

_STYLES: Final = {
    "outside": "fill:#eeeeee,stroke:#888888,color:#222222",
    "copied": "fill:#dcebfa,stroke:#3b78b5,color:#222222",
    "parameter": "fill:#d5efef,stroke:#2f8a8a,color:#222222",
    "computed": "fill:#e4f3dc,stroke:#5a9a3a,color:#222222",
    "constant": "fill:#f6f0d8,stroke:#b09a3c,color:#222222",
    "staged": "fill:#fae3d4,stroke:#c2703d,color:#222222",
    "output": "fill:#efe0f5,stroke:#8a4fa8,color:#222222",
}
"""A colour for each kind of slot; a kind of the user's own is drawn without one."""


def mermaid(explanation: Explanation, step: Sequence[str] = ("captured step",)) -> str:
    """The diagram as text, for a Markdown block or mermaid's own tools; the same for equal explanations.

    step: what is written on the step, a line each.
    """
    nodes = [*dict.fromkeys(_nodes(explanation)), f"captured[[{_quoted('<br/>'.join(step))}]]"]
    edges = list(dict.fromkeys(_edges(explanation)))
    used = [kind for kind in _STYLES if any(f":::{kind}" in node for node in nodes)]
    styles = [f"classDef {kind} {_STYLES[kind]}" for kind in used]
    return "\n".join(["flowchart LR", *(f"    {line}" for line in (*nodes, *edges, *styles))]) + "\n"


def _nodes(explanation: Explanation) -> Iterator[str]:
    for slot in explanation.slots:
        if slot.source is not None:
            yield _argument(slot) if slot.argument else f"batch([{_quoted('batch')}]):::outside"
        if slot.kind == "staged":
            yield f"producer([{_quoted('producer')}]):::outside"
        yield from (_needed(name) for name in slot.needs if not _is_slot(name, explanation))
    for slot in explanation.slots:
        yield f"{_id(slot.name)}[{_quoted(_label(slot))}]" + (f":::{slot.kind}" if slot.kind in _STYLES else "")


def _edges(explanation: Explanation) -> Iterator[str]:
    for slot in explanation.slots:
        here = _id(slot.name)
        if slot.source is not None:
            start = f"argument_{slot.argument}" if slot.argument else "batch"
            plain = slot.source == f"batch.{slot.name}"
            dashed = "-.->" if slot.optional else "-->"
            yield f"{start} {dashed} {here}" if plain else f"{start} {dashed}|{_quoted(slot.source)}| {here}"
        if slot.kind == "staged":
            yield f"producer --> {here}"
        for need in slot.needs:
            yield f"{_id(need) if _is_slot(need, explanation) else f'given_{need}'} --> {here}"
        yield _to_step(slot)


def _to_step(slot: SlotFacts) -> str:
    """How the step gets at a slot: reads it, writes it, or is handed it at each replay."""
    here = _id(slot.name)
    if slot.kind == "output":
        return f"captured --> {here}"
    handed = "" if slot.parameter is None else f"|{_quoted(f'argument {slot.parameter}')}|"
    return f"{here} -->{handed} captured"


def _is_slot(name: str, explanation: Explanation) -> bool:
    return any(slot.name == name for slot in explanation.slots)


def _argument(slot: SlotFacts) -> str:
    return f"argument_{slot.argument}([{_quoted(f'argument {slot.argument}')}]):::outside"


def _needed(name: str) -> str:
    label = {STEP: "sizes of the step", SETTINGS: "settings of the runner", RANKS: "ranks of the runner"}.get(
        name, f"field {name}"
    )
    return f"given_{name}([{_quoted(label)}]):::outside"


def _label(slot: SlotFacts) -> str:
    where = f" on the {slot.runs_on}" if slot.runs_on else ""
    return f"{slot.name}<br/>{slot.dtype} [{', '.join(slot.shape)}]<br/>{slot.kind}{where}"


def _id(name: str) -> str:
    """A node's name: prefixed, since mermaid stumbles over slots called `end` or `graph`."""
    return f"slot_{name}"


def _quoted(text: str) -> str:
    """Text that mermaid takes as it stands; of HTML only our own line breaks are left."""
    safe = text
    for sign, entity in (("#", "#35;"), ("&", "#amp;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        safe = safe.replace(sign, entity)
    return '"' + safe.replace("#lt;br/#gt;", "<br/>") + '"'
