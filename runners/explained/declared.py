"""Explains a declaration as data, as text and as a picture."""

import html
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import attrs

from ...dataflow.axes import Axis, Sizes, extent
from ...dataflow.capabilities import (
    Capabilities,
    LoweringName,
    Placement,
    Role,
    chosen_lowering,
    dtype_text,
    resolve_dtype,
)
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError
from ...dataflow.plan import PLAIN, FillPlan, Pattern, plan_fill, slot_bytes
from ...dataflow.sources import linear
from ...dataflow.transition import Advance
from .pages import Shown, Table, TableRow, pairs

Extents = Mapping[Axis, tuple[int, int]]
"""The live and padded size of every axis."""

NOT_SIZED: Final[Extents] = {}


@attrs.frozen
class AxisSize:
    """One axis of the explained step: its live rows, and the rows that they are padded to."""

    name: str
    live: int
    padded: int
    fixed: bool


@attrs.frozen(kw_only=True)
class SlotFacts:
    """One slot in words and numbers.

    Attributes:
        shape: The declared sizes.
        dtype: The dtype on this backend. `role` is its declared name if the backend decides.
        tail: The rule, as written in a declaration.
        source: The source of a copy, as written in a declaration.
        value: The value of a constant.
        limit: The largest value of host data.
        parameter: The operator's argument that takes the value at each replay.
        function: The name of a computed slot's function.
        needs: What the function takes.
        runs_on: Where the function runs.
        then: What it advances to in the next step of `steps()`.
        padded: The size of its view, or None without sizes.
        nbytes: Its bytes, or None without sizes.
        copied: Bytes that the copy of live rows moves, or None without sizes.
    """

    name: str
    kind: str
    shape: tuple[str, ...]
    dtype: str
    role: str | None
    placement: Placement
    tail: str | None
    source: str | None
    limit: str | None
    parameter: str | None
    value: str | None
    function: str | None
    needs: tuple[str, ...]
    runs_on: Placement | None
    then: Advance | None
    when: str | None
    optional: bool
    padded: tuple[int, ...] | None
    nbytes: int | None
    copied: int | None


@attrs.frozen(kw_only=True, repr=False)
class Explanation(Shown):
    """A declaration as data: its slots, the order of computed ones, and for given sizes the plan and its bytes.

    Attributes:
        fields: Names that are not slots, carried from the batch.
        disabled: Slots that the settings switched off.
        nbytes: Bytes of all slots at their padded sizes.
        copied: Bytes that one step copies.
    """

    declaration: str
    backend: str
    axes: tuple[AxisSize, ...]
    slots: tuple[SlotFacts, ...]
    fields: tuple[str, ...]
    disabled: tuple[str, ...]
    order: tuple[str, ...]
    plan: FillPlan | None
    nbytes: int | None
    copied: int | None

    def tables(self) -> Iterator[Table]:
        """Yield bytes, slots and plan."""
        size, copied = self.nbytes or 0, self.copied or 0
        sized = f"{size:,} bytes: at padded sizes" if self.plan else "not known: Give the size of every axis"
        found = {"slots": f"{len(self.slots)}: declared", "buffers": sized}
        yield Table(f"{self.declaration} on {self.backend}", pairs(found))
        yield self.slot_table()
        if self.plan:
            axes = (f"{a.name}={a.padded}" if a.fixed else f"{a.name}={a.live}/{a.padded}" for a in self.axes)
            text = f"{self.plan}\n{size:,} bytes of buffers for this bucket; this step copies {copied:,}"
            yield Table(f"plan for {', '.join(axes)}", text=text)

    def slot_table(self) -> Table:
        """Return all slots, the other names, and what is not known."""
        remarks = {
            "carried from the batch as they are": self.fields,
            "switched off by the settings": self.disabled,
            "computed in this order": self.order,
            "which of them the step reads": ("not known here; slotgraph.check(runner) finds those that it does not",),
        }
        text = "\n".join(f"{what}: {', '.join(names)}" for what, names in remarks.items() if names)
        return Table(f"slots of {self.declaration}", [_slot(slot) for slot in self.slots], text)


def _slot(slot: SlotFacts) -> TableRow:
    kind = (
        f"{slot.kind}{f' on the {slot.runs_on}' if slot.runs_on else ''}",
        f"argument {slot.parameter}" if slot.parameter else "",
        "optional" if slot.optional else "",
        f"when {slot.when}" if slot.when else "",
    )
    origin = "batch" if slot.source == f"batch.{slot.name}" else slot.source
    if slot.function is not None:
        origin = f"{slot.function}({', '.join(slot.needs)})"
    elif slot.value is not None:
        origin = f"set once: {slot.value}"
    elif slot.limit is not None:
        origin = f"{origin}, at most {slot.limit}"
    row = {
        "slot": slot.name,
        "kind": ", ".join(filter(None, kind)),
        "shape": f"[{', '.join(slot.shape)}]",
        "dtype": f"{slot.dtype} ({slot.role})" if slot.role else slot.dtype,
        "on": slot.placement,
        "tail": slot.tail,
        "comes from": origin,
    }
    if slot.then is not None:
        row["then"] = slot.then.value
    return row if slot.padded is None else {**row, "padded to": str([*slot.padded]), "bytes": slot.nbytes}


def explain_declaration(
    declaration: Declaration,
    capabilities: Capabilities,
    backend: str,
    extents: Extents = NOT_SIZED,
    pattern: Pattern = PLAIN,
    lowering: LoweringName | None = None,
) -> Explanation:
    """Explain a declaration on one backend. With `extents`, also explain the plan and bytes of a step of these sizes.

    `pattern` names slots that the step lacks, wrote in place or has on the host. `lowering=None` is the device's first.

    Raises:
        ConfigError: Sizes do not fit together or miss an axis, or a named slot is not optional, or not copied.
    """
    how = chosen_lowering(capabilities, lowering)
    live, padded = _checked_sizes(declaration, extents)
    pattern.check(declaration)
    moving = {*declaration.sources}.difference(pattern.absent, pattern.in_place)

    def facts(name: str) -> SlotFacts:
        slot = declaration.slots[name]
        source, compute, limit, then = slot.reads(name), slot.computes(), slot.limit, slot.advances()
        dtype, rule = resolve_dtype(slot.dtype, capabilities), slot.rule() if slot.varying else None
        return SlotFacts(
            name=name,
            kind=slot.kind,
            shape=tuple(map(str, slot.shape)),
            dtype=dtype_text(dtype),
            role=slot.dtype.name if isinstance(slot.dtype, Role) else None,
            placement=slot.placement,
            tail=None if rule is None else f"{rule}" if slot.starts is None else f"{rule}, starts as {slot.starts}",
            source=None if source is None else str(source),
            limit=None if limit is None else str(limit),
            parameter=slot.argument,
            value=None if slot.writers else _named(slot.initial()),
            function=compute.name if compute else None,
            needs=slot.needs,
            runs_on=declaration.side(name) if compute else None,
            then=Advance(name, then.name, then.needs, *(linear(then) or ("", 0))) if then else None,
            when=None if slot.when is None else _named(slot.when),
            optional=slot.optional,
            padded=extent(slot.shape, padded) if padded else None,
            nbytes=slot_bytes(slot, padded, capabilities) if padded else None,
            copied=slot_bytes(slot, live, capabilities) * (name in moving) if padded else None,
        )

    slots = tuple(map(facts, declaration.slots))
    return Explanation(
        declaration=declaration.name,
        backend=backend,
        axes=tuple(AxisSize(axis.name, live[axis], size, axis.fixed) for axis, size in padded.items()),
        slots=slots,
        fields=tuple(declaration.fields),
        disabled=declaration.disabled,
        order=tuple(declaration.functions),
        plan=plan_fill(declaration, padded, capabilities, pattern, lowering=how) if extents else None,
        nbytes=sum(slot.nbytes or 0 for slot in slots) if extents else None,
        copied=sum(slot.copied or 0 for slot in slots) if extents else None,
    )


def _checked_sizes(declaration: Declaration, extents: Extents) -> tuple[Sizes, Sizes]:
    """Return live and padded sizes by axis, in order of their names.

    Raise ConfigError if they do not fit the declaration.
    """
    missing = [axis.name for axis in declaration.axes if axis not in extents]
    if extents and missing:
        raise ConfigError(
            f"{declaration.name}: no size for {', '.join(missing)}; give one for every axis, or none at all"
        )
    for axis, (live, padded) in extents.items():
        if not 0 <= live <= padded or (axis.fixed and live != padded):
            wanted = "one size, at least 0" if axis.fixed else "at most as many live rows as padded ones"
            raise ConfigError(f"{axis.name}={live}/{padded}: expected {wanted}")
    known = sorted(extents)
    return {axis: extents[axis][0] for axis in known}, {axis: extents[axis][1] for axis in known}


def _named(value: object | Callable[..., object]) -> str:
    """Return the name of a function or a role, or else the value as text."""
    return str(getattr(value, "__qualname__", None) or getattr(value, "name", None) or value)


def mermaid(explanation: Explanation) -> str:
    """Return what depends on what, as text for mermaid in a Markdown block. It is the same for equal explanations.

    One arrow leads from the whole view into the step, since a declaration does not say which slots the step reads.
    """
    names, lines, view = (
        {slot.name for slot in explanation.slots},
        ["flowchart LR"],
        ['subgraph view["the view, of which the step reads some or all"]'],
    )
    for slot in explanation.slots:
        node = f"slot_{slot.name}"  # with a prefix, since mermaid fails on slots called `end` or `graph`
        kind = f"{slot.kind} on the {slot.runs_on}" if slot.runs_on else slot.kind
        text = _quoted(slot.name, f"{slot.dtype} [{', '.join(slot.shape)}]", kind)
        lines.append(f"{node}[{text}]")
        if slot.source is not None:
            label = "" if slot.source == f"batch.{slot.name}" else f"|{_quoted(slot.source)}|"
            lines.append(f"batch {'-.->' if slot.optional else '-->'}{label} {node}")
        if slot.kind == "staged":
            lines.append(f"producer --> {node}")
        lines += [f"{'slot' if need in names else 'given'}_{need} --> {node}" for need in slot.needs]
        if slot.then is not None:
            label = _quoted(f"then {slot.then.value}")
            lines += [f"{'slot' if need in names else 'given'}_{need} -.->|{label}| {node}" for need in slot.then.needs]
        if slot.kind == "output":
            lines.append(f"captured --> {node}")
        else:
            view.append(node)
    return "\n    ".join([*lines, *view, "end", "view --> captured"]) + "\n"


def _quoted(*lines: str) -> str:
    """Quote lines of text for mermaid, whose entities begin with its own sign."""
    safe = (html.escape(line.replace("#", "#35;"), quote=False).replace('"', "&quot;") for line in lines)
    return f'"{"<br/>".join(line.replace("&", "#") for line in safe)}"'
