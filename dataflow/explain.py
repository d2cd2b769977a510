"""What a declaration says, as data, as text and as a picture."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from .axes import Axis, Sizes, extent
from .capabilities import Capabilities, Lowering, Placement, Role, chosen_lowering, dtype_text, resolve_dtype
from .declaration import Declaration
from .errors import ConfigError
from .plan import FillPlan, plan_fill, slot_bytes
from .slots import Constant, Padded, Slot
from .sources import RANKS, SETTINGS, STEP, SideArgument

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


Extents = Mapping[Axis, tuple[int, int]]
"""Live and padded size of every axis."""

NOT_SIZED: Final[Extents] = {}


@attrs.frozen
class AxisSize:
    """One axis of the step that is explained: rows that are live, and rows that they are padded to."""

    name: str
    live: int
    padded: int
    fixed: bool


@attrs.frozen(kw_only=True)
class SlotFacts:
    """One slot in words and numbers.

    shape: the declared sizes. dtype: on this backend; `role` is its declared name where the backend decides.
    tail, source, value: the rule, where a copy comes from, and what a constant holds, as one writes them.
    limit: the largest value that host data may hold. argument: the side argument that the source is read from.
    parameter: the operator's argument that takes the value at each replay.
    function, needs, runs_on: of a computed slot. padded: the size of its view, nbytes: its bytes, copied: bytes that
    the live rows' copy moves; None without sizes.
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
    argument: str | None
    parameter: str | None
    value: str | None
    function: str | None
    needs: tuple[str, ...]
    runs_on: Placement | None
    when: str | None
    optional: bool
    padded: tuple[int, ...] | None
    nbytes: int | None
    copied: int | None


@attrs.frozen(kw_only=True)
class Explanation:
    """A declaration as data: its slots, the order of computed ones, and for given sizes the plan and its bytes.

    fields: names that are no slots, carried from the batch. disabled: slots that the settings switched off.
    nbytes: bytes of all slots at their padded sizes. copied: bytes that one step copies.
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


def explain_declaration(
    declaration: Declaration,
    capabilities: Capabilities,
    backend: str,
    extents: Extents = NOT_SIZED,
    absent: Iterable[str] = (),
    in_place: Iterable[str] = (),
    lowering: Lowering | None = None,
    *,
    hosted: Iterable[str] = (),
) -> Explanation:
    """Explain a declaration on one backend; with `extents` also the plan and bytes of a step of these sizes.

    absent: optional slots that the step comes without. in_place: copied slots that a producer writes instead. lowering:
    how the plan is run; None for the device's preferred way. hosted: slots that the batch brings host data for.
    ConfigError where sizes do not fit together or miss an axis, or where a named slot is not optional, or not copied.
    """
    how = chosen_lowering(capabilities, lowering)
    live, padded = _checked_sizes(declaration, extents)
    missing, written = check_optional(declaration, absent), check_copied(declaration, in_place)
    brought = check_hosted(declaration, hosted)
    still = (*missing, *written)
    slots = tuple(_facts(name, declaration, capabilities, live, padded, still) for name in declaration.slots)
    plan = None
    if extents:
        plan = plan_fill(
            declaration, padded, capabilities, lowering=how, absent=missing, in_place=written, hosted=brought
        )
    return Explanation(
        declaration=declaration.name,
        backend=backend,
        axes=tuple(AxisSize(axis.name, live[axis], size, axis.fixed) for axis, size in padded.items()),
        slots=slots,
        fields=tuple(declaration.fields),
        disabled=declaration.disabled,
        order=declaration.order,
        plan=plan,
        nbytes=sum(slot.nbytes or 0 for slot in slots) if extents else None,
        copied=sum(slot.copied or 0 for slot in slots) if extents else None,
    )


def _checked_sizes(declaration: Declaration, extents: Extents) -> tuple[Sizes, Sizes]:
    """Live and padded sizes by axis, in order of their names. ConfigError where they do not fit the declaration."""
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


def check_optional(declaration: Declaration, absent: Iterable[str]) -> tuple[str, ...]:
    """Names of optional slots. ConfigError where one is none."""
    optional = [name for name, _ in declaration.optional]
    known = f"optional are {', '.join(optional)}" if optional else "no slot is optional"
    return _checked(declaration, absent, optional, "a batch cannot come without {!r}: " + known)


def check_hosted(declaration: Declaration, hosted: Iterable[str]) -> tuple[str, ...]:
    """Names of slots that a batch may bring host data for. ConfigError where it cannot."""
    return check_copied(declaration, hosted, "a batch cannot bring host data for {!r}")


def check_copied(
    declaration: Declaration, wanted: Iterable[str], fault: str = "a producer cannot write {!r} in place"
) -> tuple[str, ...]:
    """Names of slots that are copied. ConfigError, which says what cannot be done, where one is not."""
    return _checked(declaration, wanted, declaration.sources, fault + ": it is no slot that is copied")


def _checked(declaration: Declaration, names: Iterable[str], known: Collection[str], fault: str) -> tuple[str, ...]:
    found = tuple(names)
    for name in found:
        if name not in known:
            raise ConfigError(f"{declaration.name}: {fault.format(name)}")
    return found


def _facts(
    name: str, declaration: Declaration, capabilities: Capabilities, live: Sizes, padded: Sizes, still: tuple[str, ...]
) -> SlotFacts:
    """One slot's facts; still: slots that no copy moves."""
    slot = declaration.slots[name]
    source, compute, limit = slot.reads(name), slot.computes(), slot.limit
    dtype = resolve_dtype(slot.dtype, capabilities)
    moved = extent(slot.shape, live) if padded and source is not None and name not in still else (0,)
    return SlotFacts(
        name=name,
        kind=slot.kind,
        shape=tuple(map(str, slot.shape)),
        dtype=dtype_text(dtype),
        role=slot.dtype.name if isinstance(slot.dtype, Role) else None,
        placement=slot.placement,
        tail=_tail(slot),
        source=None if source is None else str(source),
        limit=None if limit is None else str(limit),
        argument=source.parts[0] if isinstance(source, SideArgument) else None,
        parameter=slot.parameter(name),
        value=_named(slot.initial()) if isinstance(slot, Constant) else None,
        function=compute.name if compute else None,
        needs=compute.needs if compute else (),
        runs_on=declaration.side(name) if compute else None,
        when=None if slot.when is None else _named(slot.when),
        optional=slot.optional,
        padded=extent(slot.shape, padded) if padded else None,
        nbytes=slot_bytes(slot, padded, capabilities) if padded else None,
        copied=math.prod(moved) * dtype.itemsize if padded else None,
    )


def _tail(slot: Slot) -> str | None:
    """The tail rule, and what the slot holds at first where that is another value."""
    rule = slot.rule() if slot.varying else None
    starts = slot.starts if isinstance(slot, Padded) else None
    return None if rule is None else str(rule) if starts is None else f"{rule}, starts as {starts}"


def _named(value: object | Callable[..., object]) -> str:
    """A function's name, a role's, or the value itself."""
    return str(getattr(value, "__qualname__", None) or getattr(value, "name", None) or value)


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
