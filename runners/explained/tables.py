"""An explanation as tables, the same for a terminal and for a page, and as a mermaid diagram."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ...dataflow.explain import Explanation, SlotFacts, mermaid
from ...dataflow.sharing import Layout
from ..decision import Decision, Why
from ..ranks.group import HOST
from .records import BucketFacts, FillStep, RankFacts, RunnerExplanation

Row = Mapping[str, Any]
"""Cells by their column; a number stands as one, None for what is not there."""
_MEANINGS: Final[Mapping[Why, str]] = {
    "fits": "a bucket fits",
    "too_large": "the batch is larger than the largest bucket",
    "waste": "the bucket would be more padding than max_waste allows",
    "not_captured": "the bucket was not captured",
    "absent": "no graph was captured for batches without these slots",
    "field_differs": "a field has another value than graphs were captured with",
    "width_differs": "requests have another number of tokens than graphs were captured for",
    "disabled": "graphs are switched off",
    "always_eager": "an eager runner captures nothing",
}
_HELD: Final = {
    "inputs": "slots, alignment included",
    "graphs": "what graphs hold beside inputs and outputs",
    "outputs": "what steps returned at capture, in no slot",
    "uploads": "the kernel's tables, the packet, and the memory that uploads start from",
    "eager": "slots of steps that were larger than every bucket",
    "total": "all that is the runner's own",
    "shared": "slots in a pool's memory, which is no runner's own",
    "driver": "gone from the device in the capture, beside all of that",
}


@attrs.frozen
class Table:
    """Rows of the same columns under a title, and text below them, such as a plan."""

    title: str
    rows: Sequence[Row] = ()
    text: str = ""


def tables(explanation: Explanation | RunnerExplanation) -> RenderableType:
    """All tables of a declaration or of a runner, for a rich console."""
    parts: list[RenderableType] = []
    for table in tables_of(explanation):
        parts.append(Text(f"\n{table.title}" if parts else table.title, style="bold"))
        if table.rows:
            shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
            for name in table.rows[0]:
                shown.add_column(name, justify="right" if is_number(table, name) else "left", overflow="fold")
            for row in table.rows:
                shown.add_row(*(Text(cell_text(value)) for value in row.values()))
            parts.append(shown)
        if table.text:
            parts.append(Text(table.text))
    return Group(*parts)


def is_number(table: Table, column: str) -> bool:
    """Whether a column holds numbers."""
    return any(isinstance(row[column], int) and not isinstance(row[column], bool) for row in table.rows)


def cell_text(value: Any) -> str:
    """What stands in a cell: text, numbers, names, or names with values."""
    if value is None or value in ("", (), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={cell_text(one)}" for name, one in value.items())
    return ", ".join(map(cell_text, value)) if isinstance(value, list | tuple) else str(value)


def _row(record: Any, *fields: str) -> Row:
    """Some fields of a record, as they are called there."""
    return {name: getattr(record, name) for name in fields}


def diagram(explanation: Explanation | RunnerExplanation) -> str:
    """The dependencies as a mermaid diagram; a runner's has its kind, graphs and rank on the captured step."""
    if isinstance(explanation, Explanation):
        return mermaid(explanation)
    rows = [bucket.rows for bucket in explanation.buckets if any(not graph.why for graph in bucket.graphs)]
    named = ", ".join(map(str, rows)) if not rows[8:] else f"{rows[0]} to {rows[-1]}"
    graphs = f"{len(rows)} buckets: {named}" if len(rows) > 1 else f"bucket {named}" if rows else "nothing captured"
    lines = [explanation.kind, "without graphs" if explanation.path == "eager" else graphs]
    lines.append(f"filled {explanation.lowering}")
    if explanation.ranks is not None:
        lines.append(f"rank {explanation.ranks.rank} of {explanation.ranks.size}")
    return mermaid(explanation.declaration, lines)


def tables_of(explanation: Explanation | RunnerExplanation) -> list[Table]:
    """The tables that have something to say."""
    made = _of_declaration(explanation) if isinstance(explanation, Explanation) else _of_runner(explanation)
    return [table for table in made if table.rows or table.text]


def _of_declaration(one: Explanation) -> Iterator[Table]:
    yield Table(f"{one.declaration} on {one.backend}", [_slot(slot) for slot in one.slots], _remarks(one))
    sizes = (f"{a.name}={a.padded}" if a.fixed else f"{a.name}={a.live}/{a.padded}" for a in one.axes)
    told = f"\n{one.nbytes or 0:,} bytes of buffers for this bucket; this step copies {one.copied or 0:,}"
    yield Table(
        "plan" if one.plan is None else f"plan for {', '.join(sizes)}",
        text="Give the size of every axis to see the plan and its bytes." if one.plan is None else f"{one.plan}{told}",
    )


def _slot(slot: SlotFacts) -> Row:
    kind = [slot.kind if slot.runs_on is None else f"{slot.kind} on the {slot.runs_on}"]
    kind += [f"argument {slot.parameter}"] if slot.parameter is not None else []
    kind += ["optional"] if slot.optional else []
    kind += [f"when {slot.when}"] if slot.when is not None else []
    row = {
        "slot": slot.name,
        "kind": ", ".join(kind),
        "shape": _extent(slot.shape),
        "dtype": f"{slot.dtype} ({slot.role})" if slot.role else slot.dtype,
        "on": slot.placement,
        "tail": slot.tail,
        "comes from": _origin(slot),
    }
    return row if slot.padded is None else {**row, "padded to": _extent(slot.padded), "bytes": slot.nbytes}


def _origin(slot: SlotFacts) -> str:
    """Where the value comes from, in a word or two."""
    if slot.function is not None:
        return f"{slot.function}({', '.join(slot.needs)})"
    if slot.value is not None:
        return f"set once: {slot.value}"
    if slot.source is not None:
        source = "batch" if slot.source == f"batch.{slot.name}" else slot.source
        return source if slot.limit is None else f"{source}, at most {slot.limit}"
    return {"staged": "a producer", "output": "the step writes it"}.get(slot.kind, "-")


def _remarks(one: Explanation) -> str:
    remarks = {
        "carried from the batch as they are": one.fields,
        "switched off by the settings": one.disabled,
        "computed in this order": one.order,
    }
    return "\n".join(f"{what}: {', '.join(names)}" for what, names in remarks.items() if names)


def _extent(sizes: Sequence[object]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _of_runner(one: RunnerExplanation) -> Iterator[Table]:
    lines = [f"path {one.path}, lowering {one.lowering}"]
    lines.append(cell_text(one.configuration))
    if one.asked is not None:
        alone = one.ranks is not None and one.ranks.on is not None
        lines.append(f"this batch: {_decided(one.asked)}")
        lines[-1] += "; what this rank would do alone: the others were not asked" if alone else ""
    yield Table(f"{one.kind} on {one.backend} ({one.device})", text="\n".join(lines))
    declaration = one.declaration
    yield Table(
        f"slots of {declaration.declaration}", [_slot(slot) for slot in declaration.slots], _remarks(declaration)
    )
    for name, fill in one.fills:
        steps = [{"step": number, **_step(step)} for number, step in enumerate(fill.steps, 1)]
        yield Table(f"steps of a fill, {name}", steps, str(fill.plan))
    yield Table("buckets", [_bucket(bucket, one.statistics) for bucket in one.buckets])
    graphs = [
        {"bucket": bucket.rows, **_row(graph, "absent", "parts", "nbytes", "outputs", "why")}
        for bucket in one.buckets
        for graph in bucket.graphs
    ]
    yield Table("graphs", graphs)
    fields = ("slot", "allocation", "offset", "nbytes", "gap", "shape", "since", "until", "lasting", "shares")
    yield Table("memory layout", [_row(place, *fields) for place in one.memory.places])
    lie = [_row(piece, "name", "placement", "nbytes", "unused", "adopted") for piece in one.memory.allocations]
    yield Table("allocations", lie)
    if one.pool is not None:
        yield Table("shared memory", _shared(one.pool), "\n".join(_sums(one.pool)))
    yield from _counted(one.statistics)
    if one.ranks is not None:
        yield Table("ranks", _ranks(one.ranks, one.statistics["ranks"]["exchanges"]))
    forced = [
        {"forced by": f"rank {rank}", "why": why, "steps": steps, "meaning": _meaning(why)}
        for rank, reasons in one.statistics["ranks"]["forced"].items()
        for why, steps in reasons.items()
    ]
    yield Table("steps that one rank forced on all", forced)


def _step(step: FillStep) -> Row:
    where = "in the graph" if step.inside else "if dirty" if step.maybe else ""
    return {**_row(step, "kind", "label", "calls", "nbytes"), "where": where, "slots": step.slots}


def _bucket(bucket: BucketFacts, statistics: Mapping[str, Any]) -> Row:
    use = statistics["buckets"].get(str(bucket.rows), {})
    return {
        "bucket": bucket.rows,
        "sizes": dict(bucket.sizes),
        "graphs": f"{sum(not graph.why for graph in bucket.graphs)} of {len(bucket.graphs)}",
        **_row(bucket.fill, "uploads", "launches", "copies", "resets", "computed", "copied", "uploaded"),
        "nbytes": bucket.nbytes,
        **{name: use.get(name) for name in ("steps", "live", "waste")},
        "fill us, p50 / p90": _times(statistics["fills"]["buckets"].get(str(bucket.rows))),
    }


def _shared(pool: Layout) -> list[Row]:
    """Where each slot of each runner of a pool lies, who shares with it, and why that is safe."""
    return [
        {
            **_row(place, "member", "slot", "block", "offset", "nbytes"),
            "phases": "always" if place.always else ", ".join(place.phases),
            "why": place.why,
            "shares": pool.shared_with(place.member, place.slot),
        }
        for place in pool.places
    ]


def _sums(pool: Layout) -> Iterator[str]:
    yield f"phases: {pool.schedule}"
    phases = {place.member: place.phase for place in pool.places}
    yield f"runners: {', '.join(f'{name} in {phase}' for name, phase in phases.items())}"
    yield (
        f"{pool.nbytes:,} bytes: {pool.saved:,} fewer than {pool.apart:,} without sharing; {pool.by_name:,} if only "
        f"slots of one name shared; {pool.peak:,} must hold at once"
    )


def _counted(statistics: Mapping[str, Any]) -> Iterator[Table]:
    """Bytes of everything that the runner holds, and the books: steps by path, fills by lowering, detours, reasons."""
    memory = {**statistics["memory"], "driver": statistics["capture"]["driver"]}
    held = [
        {"what": what, "bytes": memory[what], "meaning": told}
        for what, told in _HELD.items()
        if memory[what] or what == "total"
    ]
    yield Table("bytes held", held)
    decided = [
        {"decided": what, "": name, "times": times}
        for what, key in (("path", "steps"), ("lowering", "lowerings"), ("detour", "detours"))
        for name, times in statistics[key].items()
        if times
    ]
    yield Table("decisions", decided)
    times = statistics["fills"]["eager"]
    reasons = [
        {"why": why, **counts, "fill us, p50 / p90": _times(times.get(why)), "meaning": _meaning(why)}
        for why, counts in statistics["eager"].items()
    ]
    yield Table("eager steps", reasons)


def _ranks(ranks: RankFacts, exchanges: int) -> list[Row]:
    if ranks.on is not None:
        exchange = "before each step, " + ("in host memory" if ranks.on == HOST else f"on {ranks.on}")
    else:
        exchange = "none: there is one rank" if ranks.size == 1 else "none before a step: all get the same batches"
    facts = {
        "rank": f"{ranks.rank} of {ranks.size}",
        "exchange": exchange,
        "exchanges so far": exchanges,
        "shards of a bucket's tokens": ranks.shards,
        "asked for by slots": ranks.asked,
        "agreed on last": ranks.agreed and _decided(ranks.agreed),
    }
    return [{"ranks": what, "": cell_text(told)} for what, told in facts.items()]


def _decided(one: Decision) -> str:
    """A decision in one line."""
    path = one.path if one.bucket is None else f"{one.path}, bucket {one.bucket}"
    forced = "" if one.rank is None else f", forced by rank {one.rank}"
    return f"{path}{forced}: {one.reason}"


def _meaning(why: str) -> str:
    return {str(known): meaning for known, meaning in _MEANINGS.items()}.get(why, why)


def _times(times: Mapping[str, Any] | None) -> str | None:
    """What fills took, in microseconds: half of them at most, and nine tenths."""
    return None if times is None or times["p50"] is None else f"{times['p50']:.1f} / {times['p90']:.1f}"
