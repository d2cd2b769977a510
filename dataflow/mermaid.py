"""The dependency graph of a declaration as a mermaid diagram: from the batch over the slots to the captured step."""

from collections.abc import Collection, Iterator, Sequence
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
_GIVEN: Final = {STEP: "sizes of the step", SETTINGS: "settings of the runner", RANKS: "ranks of the runner"}


def mermaid(explanation: Explanation, step: Sequence[str] = ("captured step",)) -> str:
    """The diagram as text, for a Markdown block or mermaid's own tools; the same for equal explanations.

    step: what is written on the step, a line each.
    """
    names = {slot.name for slot in explanation.slots}
    given, slots, edges = dict[str, None](), list[str](), dict[str, None]()
    for slot in explanation.slots:
        here = f"slot_{slot.name}"  # with a prefix, since mermaid stumbles over slots called `end` or `graph`
        for start, label, arrow in _inputs(slot, names):
            if label:
                given[f"{start}([{_quoted(label)}]):::outside"] = None
            edges[f"{start} {arrow} {here}"] = None
        style = f":::{slot.kind}" if slot.kind in _STYLES else ""
        slots.append(f"{here}[{_quoted(_label(slot))}]{style}")
        handed = "" if slot.parameter is None else f"|{_quoted(f'argument {slot.parameter}')}|"
        edges[f"captured --> {here}" if slot.kind == "output" else f"{here} -->{handed} captured"] = None
    used = {slot.kind for slot in explanation.slots} | ({"outside"} if given else set())
    styles = [f"classDef {kind} {style}" for kind, style in _STYLES.items() if kind in used]
    captured = f"captured[[{_quoted('<br/>'.join(step))}]]"
    return "\n    ".join(["flowchart LR", *given, *slots, captured, *edges, *styles]) + "\n"


def _inputs(slot: SlotFacts, names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """What a slot's value comes from: its node, its label if it is no slot, and the arrow to the slot."""
    if slot.source is not None:
        arrow = "-.->" if slot.optional else "-->"
        told = "" if slot.source == f"batch.{slot.name}" else f"|{_quoted(slot.source)}|"
        where = f"argument {slot.argument}" if slot.argument else "batch"
        yield where.replace(" ", "_"), where, f"{arrow}{told}"
    if slot.kind == "staged":
        yield "producer", "producer", "-->"
    for need in slot.needs:
        known = need in names
        yield f"slot_{need}" if known else f"given_{need}", "" if known else _GIVEN.get(need, f"field {need}"), "-->"


def _label(slot: SlotFacts) -> str:
    where = f" on the {slot.runs_on}" if slot.runs_on else ""
    return f"{slot.name}<br/>{slot.dtype} [{', '.join(slot.shape)}]<br/>{slot.kind}{where}"


def _quoted(text: str) -> str:
    """Text that mermaid takes as it stands; of HTML only our own line breaks are left."""
    safe = text
    for sign, entity in (("#", "#35;"), ("&", "#amp;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        safe = safe.replace(sign, entity)
    return '"' + safe.replace("#lt;br/#gt;", "<br/>") + '"'
