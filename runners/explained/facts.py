"""An explanation's facts as rows of named cells: the same for a terminal's tables and a page's."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ...dataflow.explain import Explanation, SlotFacts
from ...dataflow.tables import origin
from .pool_facts import PoolFacts
from .records import BucketFacts, Decisions, Fill, FillTime, MemoryFacts, Place, RunnerExplanation

Row: TypeAlias = Mapping[str, Any]
"""Cells by their column; a number stands as one, None for what is not there."""


def slot_rows(explanation: Explanation) -> list[Row]:
    """The declared slots."""
    return [_slot(slot) for slot in explanation.slots]


def _slot(slot: SlotFacts) -> Row:
    kind = f"{slot.kind}, optional" if slot.optional else slot.kind
    row = {
        "slot": slot.name,
        "kind": kind if slot.when is None else f"{kind}, when {slot.when}",
        "shape": _extent(slot.shape),
        "dtype": f"{slot.dtype} ({slot.role})" if slot.role else slot.dtype,
        "on": slot.placement,
        "tail": slot.tail,
        "comes from": origin(slot),
    }
    return row if slot.nbytes is None else {**row, "padded to": _extent(slot.padded or ()), "bytes": slot.nbytes}


def step_rows(fill: Fill) -> list[Row]:
    """What a step does, in the plan's order."""
    return [
        {
            "step": number,
            "does": step.kind,
            "how": step.label,
            "calls": step.calls,
            "bytes": step.nbytes,
            "where": "in the graph" if step.inside else "if dirty" if step.maybe else "",
            "slots": ", ".join(step.slots),
        }
        for number, step in enumerate(fill.steps, 1)
    ]


def bucket_rows(explanation: RunnerExplanation) -> list[Row]:
    """Each bucket's sizes, calls, bytes and use."""
    return [{**_bucket(bucket), **_use(bucket, explanation)} for bucket in explanation.buckets]


def _bucket(bucket: BucketFacts) -> Row:
    fill, missing = bucket.fill, [graph for graph in bucket.graphs if graph.why]
    return {
        "bucket": bucket.rows,
        "padded sizes": ", ".join(f"{axis}={size}" for axis, size in bucket.sizes),
        "graphs": f"{len(bucket.graphs) - len(missing)} of {len(bucket.graphs)}",
        "uploads": fill.uploads,
        "launches": fill.launches,
        "copies": fill.copies,
        "resets": fill.resets,
        "computed": fill.computed,
        "bytes copied": fill.copied,
        "uploaded": fill.uploaded,
        "in slots": bucket.nbytes,
    }


def _use(bucket: BucketFacts, explanation: RunnerExplanation) -> Row:
    """How a bucket was used, where any was."""
    if not any(one.use for one in explanation.buckets):
        return {}
    use = bucket.use
    row: Row = {
        "steps": 0 if use is None else use.steps,
        "live rows": 0 if use is None else use.live,
        "waste": None if use is None else f"{use.waste:.0%}",
    }
    timed = any(one.use and one.use.time for one in explanation.buckets)
    return {**row, "fill us, p50 / p90": time_text(use.time if use else None)} if timed else row


def graph_rows(explanation: RunnerExplanation) -> list[Row]:
    """Each graph, or why there is none."""
    return [
        {
            "bucket": bucket.rows,
            "without": ", ".join(graph.absent),
            "graphs to launch": graph.parts,
            "bytes": graph.nbytes,
            "bytes of outputs": graph.outputs,
            "why there is none": graph.why,
        }
        for bucket in explanation.buckets
        for graph in bucket.graphs
    ]


def place_rows(memory: MemoryFacts) -> list[Row]:
    """Where each slot lies."""
    return [_place(place) for place in memory.places]


def _place(place: Place) -> Row:
    return {
        "slot": place.slot,
        "lies in": f"{place.allocation}, handed in" if place.adopted else place.allocation,
        "offset": place.offset,
        "bytes": place.nbytes,
        "gap": place.gap,
        "dtype": place.dtype,
        "capacity": _extent(place.shape),
        "counts": place.since if place.since == place.until else f"{place.since} to {place.until}",
        "kept between steps": place.lasting,
        "shared with": ", ".join(place.shares),
    }


def pool_rows(pool: PoolFacts) -> list[Row]:
    """Where each slot of each runner of a pool lies, who shares with it, and why that is safe."""
    return [
        {
            "slot": place.name,
            "block": place.block,
            "offset": place.offset,
            "bytes": place.nbytes,
            "holds in": "always" if place.always else ", ".join(place.phases),
            "why": place.why,
            "shared with": ", ".join(place.shares),
        }
        for place in pool.places
    ]


def pool_lines(pool: PoolFacts) -> Iterator[str]:
    """A pool's phases and bytes in sentences."""
    members = ", ".join(f"{name} in {phase}" for name, phase in pool.members)
    yield f"phases: {', '.join(pool.phases)}; runners: {members}"
    if pool.overlaps:
        yield f"may be in use at once: {', '.join(f'{one} and {other}' for one, other in pool.overlaps)}"
    saved = pool.apart - pool.nbytes
    yield (
        f"{pool.nbytes:,} bytes: {saved:,} fewer than {pool.apart:,} without sharing; {pool.by_name:,} if only slots "
        f"of one name shared; {pool.peak:,} must hold at once"
    )


def account_rows(explanation: RunnerExplanation) -> list[Row]:
    """Bytes of everything that the runner holds, and of what it has beside that."""
    account, eager = explanation.memory.account, explanation.eager
    own = eager.own if explanation.buckets else 0
    rows = [
        ("inputs", account.inputs, "slots, alignment included"),
        ("graphs", account.graphs, "what graphs hold beside inputs and outputs"),
        ("outputs", account.outputs, "what steps returned at capture, in no slot"),
        ("uploads", account.uploads, "the kernel's tables, the packet, and the memory that uploads start from"),
        ("eager inputs", own, "slots of steps that were larger than every bucket"),
        ("in all", account.total + own, "all that is the runner's own"),
        ("shared", account.shared, "slots in a pool's memory, which is no runner's own"),
        ("driver", explanation.driver or 0, "gone from the device in the capture, beside all of that"),
    ]
    return [
        {"what": what, "bytes": nbytes, "that is": told} for what, nbytes, told in rows if nbytes or what == "in all"
    ]


def decision_rows(decisions: Decisions) -> list[Row]:
    """Steps by path, fills by lowering, and detours."""
    counted = (("path", decisions.paths), ("lowering", decisions.lowerings), ("detour", decisions.detours))
    return [
        {"decided": what, "": name, "times": times}
        for what, counts in counted
        for name, times in counts.items()
        if times
    ]


def reason_rows(decisions: Decisions) -> list[Row]:
    """Why steps ran eagerly."""
    return [
        {
            "why": reason.why,
            "steps": reason.steps,
            "live rows": reason.live,
            "fill us, p50 / p90": time_text(reason.time),
            "that is": reason.meaning,
        }
        for reason in decisions.reasons
    ]


def time_text(time: FillTime | None) -> str | None:
    """What fills took, in microseconds: half of them at most, and nine tenths."""
    return None if time is None else f"{time.p50:.1f} / {time.p90:.1f}"


def option_text(value: Any) -> str:
    """A setting or a figure in one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {option_text(one)}" for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(option_text, value)) or "none"
    return str(value)


def _extent(sizes: Sequence[object]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
