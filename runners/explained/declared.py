"""Explains a declaration: as data, as a table and as a diagram."""

from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from ...dataflow.axes import Axis, Sizes
from ...dataflow.capabilities import (
    HOST,
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
from ...dataflow.shown import Table, TableRow
from ...dataflow.sources import linear
from ...dataflow.transition import Advance
from .pages import Explained

Extents = Mapping[Axis, tuple[int, int]]
"""The live and padded size of every axis."""

NOT_SIZED: Final[Extents] = {}


@attrs.frozen(kw_only=True)
class SlotFacts:
    """One slot in words and numbers.

    Attributes:
        shape: The declared sizes.
        dtype: The dtype on this backend. `role` is its declared name if the backend decides.
        tail: The rule, as written in a declaration.
        source: The source of a copy, as written in a declaration.
        function: The name of a computed slot's function.
        needs: What the function takes.
        runs_on: Where the function runs.
        then: How it advances in the next step of `steps()`.
        notes: Other facts of its declaration, such as `optional` or a constant's value.
        nbytes: Its bytes at the padded sizes, or None without sizes.
    """

    name: str
    kind: str
    shape: tuple[str, ...]
    dtype: str
    role: str | None
    placement: Placement
    tail: str | None
    source: str | None
    function: str | None
    needs: tuple[str, ...]
    runs_on: Placement | None
    then: Advance | None
    notes: tuple[str, ...]
    nbytes: int | None

    def row(self) -> TableRow:
        """Return the slot's row of a table, without the reason of a kept tail."""
        origin = self.source or self.kind
        if self.source == f"batch.{self.name}":
            origin = "batch"
        elif self.function is not None:
            origin = f"{self.function}({', '.join(self.needs)})"
        more = ["host" if self.placement == HOST else "", self.role, f"then {self.then.value}" if self.then else ""]
        return {
            "slot": self.name,
            "type": f"{self.dtype} [{', '.join(self.shape)}]",
            "tail": self.tail and self.tail.partition(" (")[0],
            "comes from": ", ".join(filter(None, (origin, *more, *self.notes))),
        }


@attrs.frozen(kw_only=True, repr=False)
class Explanation(Explained):
    """A declaration as data: its slots, the order of computed ones, and for given sizes the plan and its bytes.

    Attributes:
        sizes: Live and padded size by axis.
        fields: Names that are not slots, carried from the batch.
        disabled: Slots that the settings switched off.
        nbytes: Bytes of all slots at their padded sizes, or 0 without sizes.
        copied: Bytes that one step copies, or 0 without sizes.
    """

    declaration: str
    backend: str
    sizes: Mapping[str, tuple[int, int]]
    slots: tuple[SlotFacts, ...]
    fields: tuple[str, ...]
    disabled: tuple[str, ...]
    order: tuple[str, ...]
    plan: FillPlan | None
    nbytes: int
    copied: int

    def tables(self) -> Iterator[Table]:
        """Yield slots, and the plan if there are sizes."""
        yield self.slot_table(f"{self.declaration} on {self.backend}")
        if self.plan is None:
            yield Table("no plan: give the size of every axis, as in --size batch=3/4, or extents={BATCH: (3, 4)}")
        else:
            sizes = ", ".join(f"{axis}={live}/{padded}" for axis, (live, padded) in self.sizes.items())
            copied = f"a step of {sizes} copies {self.copied:,} bytes into {self.nbytes:,} bytes of buffers"
            yield Table(copied, text=self.plan)

    def slot_table(self, title: str) -> Table:
        """Return all slots and the other names."""
        named = {"carried from the batch as they are": self.fields, "switched off by the settings": self.disabled}
        text = "\n".join(f"{what}: {', '.join(names)}" for what, names in named.items() if names)
        return Table(title, [slot.row() for slot in self.slots], text)


def explain_declaration(
    declaration: Declaration,
    capabilities: Capabilities,
    backend: str,
    extents: Extents = NOT_SIZED,
    pattern: Pattern = PLAIN,
    lowering: LoweringName | None = None,
) -> Explanation:
    """Explain a declaration on one backend. With `extents`, also explain the plan and bytes of a step of these sizes.

    `pattern` names slots that are absent, in place, or on the host. `lowering=None` is the device's first.

    Raises:
        ConfigError: Sizes do not fit together or miss an axis, or a named slot is not optional, or not copied.
    """
    how = chosen_lowering(capabilities, lowering)
    _check_sizes(declaration, extents)
    pattern.check(declaration)
    live, padded = ({axis: extents[axis][which] for axis in sorted(extents)} for which in (0, 1))
    moving = {*declaration.sources}.difference(pattern.absent, pattern.in_place)

    slots = tuple(_slot_facts(declaration, name, capabilities, padded) for name in declaration.slots)
    return Explanation(
        declaration=declaration.name,
        backend=backend,
        sizes={axis.name: extents[axis] for axis in live},
        slots=slots,
        fields=tuple(declaration.fields),
        disabled=declaration.disabled,
        order=tuple(declaration.functions),
        plan=plan_fill(declaration, padded, capabilities, pattern, lowering=how) if extents else None,
        nbytes=sum(slot.nbytes or 0 for slot in slots),
        copied=sum(slot_bytes(declaration.slots[name], live, capabilities) for name in moving) if extents else 0,
    )


def _slot_facts(declaration: Declaration, name: str, capabilities: Capabilities, padded: Sizes) -> SlotFacts:
    """Describe one slot. padded: The padded size of every axis, or empty without sizes."""
    slot = declaration.slots[name]
    source = slot.reads(name)
    compute = slot.computes()
    then = slot.advances()
    rule = slot.rule() if slot.varying else None
    starts = "" if slot.starts is None else f", starts as {slot.starts}"
    notes = {
        f"set to {_named(slot.initial())}": not slot.writers,
        "state, kept from step to step": slot.is_state,
        "optional": slot.optional,
        "ragged": slot.ragged,
        f"when {_named(slot.when)}": slot.when,
        f"at most {slot.limit}": slot.limit,
        f"argument {slot.argument}": slot.argument,
    }
    again = compute and compute.again
    if again:
        notes[f"again if {again.name}({', '.join(again.needs)})"] = True
        for need in sorted(declaration.rules.keys() & again.needs):
            notes[f"in each step of steps(), since {need} advances"] = True
    return SlotFacts(
        name=name,
        kind=slot.kind,
        shape=tuple(map(str, slot.shape)),
        dtype=dtype_text(resolve_dtype(slot.dtype, capabilities)),
        role=slot.dtype.name if isinstance(slot.dtype, Role) else None,
        placement=slot.placement,
        tail=f"{rule}{starts}" if rule else None,
        source=str(source) if source else None,
        function=compute.name if compute else None,
        needs=slot.needs,
        runs_on=declaration.side(name) if compute else None,
        then=Advance(name, then.name, then.needs, *(linear(then) or ("", 0))) if then else None,
        notes=tuple(filter(notes.get, notes)),
        nbytes=slot_bytes(slot, padded, capabilities) if padded else None,
    )


def _check_sizes(declaration: Declaration, extents: Extents) -> None:
    """Raise ConfigError if sizes do not fit the declaration."""
    missing = [axis.name for axis in declaration.axes if axis not in extents]
    if extents and missing:
        raise ConfigError(
            f"{declaration.name}: no size for {', '.join(missing)}; give one for every axis, or none at all"
        )
    for axis, (live, padded) in extents.items():
        if not 0 <= live <= padded or (axis.fixed and live != padded):
            wanted = "one size, at least 0" if axis.fixed else "at most as many live rows as padded ones"
            raise ConfigError(f"{axis.name}={live}/{padded}: expected {wanted}")


def _named(value: object) -> object:
    """Return the name of a function or a role, or any other value itself."""
    return getattr(value, "__qualname__", None) or getattr(value, "name", value)


def mermaid(explanation: Explanation) -> str:
    """Return the dependencies as a mermaid diagram in a Markdown block. Equal explanations give equal text.

    One arrow leads from the whole view into the step, since a declaration does not say which slots the step reads.
    """
    lines = ["flowchart LR"]
    view = ['subgraph view["the view, of which the step reads some or all"]']
    names = {slot.name for slot in explanation.slots}

    def node(name: str) -> str:  # with a prefix, since mermaid fails on slots called `end` or `graph`
        return f"slot_{name.replace('.', '__')}" if name in names else f"given_{name}"

    for slot in explanation.slots:
        node_id = node(slot.name)
        kind = f"{slot.kind} on the {slot.runs_on}" if slot.runs_on else slot.kind
        lines.append(f"{node_id}[{_quoted(slot.name, str(slot.row()['type']), kind)}]")
        if slot.source is not None:
            label = "" if slot.source == f"batch.{slot.name}" else f"|{_quoted(slot.source)}|"
            lines.append(f"batch {'-.->' if 'optional' in slot.notes else '-->'}{label} {node_id}")
        lines += [f"{node(need)} --> {node_id}" for need in slot.needs]
        if slot.then is not None:
            label = _quoted(f"then {slot.then.value}")
            lines += [f"{node(need)} -.->|{label}| {node_id}" for need in slot.then.needs]
        if slot.kind == "output":
            lines.append(f"captured --> {node_id}")
        else:
            view.append(node_id)
        if slot.kind == "staged":
            lines.append(f"producer --> {node_id}")
    return "\n    ".join([*lines, *view, "end", "view --> captured"]) + "\n"


def _quoted(*lines: str) -> str:
    """Quote lines of text for mermaid. Characters that may have a meaning in mermaid become character codes."""
    safe = ("".join(one if one.isalnum() or one in " .,()_-+*" else f"#{ord(one)};" for one in line) for line in lines)
    return f'"{"<br/>".join(safe)}"'
