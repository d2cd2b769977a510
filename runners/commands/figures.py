"""What `slotgraph bench` found, as data: figures of time and memory, and what follows from them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import attrs

from ...dataflow.planner import slot_bytes
from ..decode import DecodeRunner
from .lowerings import BARE, BY_HAND
from .runner_races import Race
from .timing import Spread, Times
from .workload import Sources, Workload, integers_of

What = Literal["fill", "step"]
FILL: Final = "fill"
STEP: Final = "step"
OURS: Final = "ours"


class Key(NamedTuple):
    """What figures that belong beside one another have in common."""

    slots: int
    lowest: int
    live: int
    padded: int
    sources: Sources

    @property
    def rows(self) -> str:
        """Live of padded rows, or the range of live ones."""
        return f"{self.live}/{self.padded}" if self.lowest == self.live else f"{self.lowest}-{self.live}"


@attrs.frozen(kw_only=True)
class Figure:
    """One measurement of `live` of `padded` rows; `lowest` is below `live` where the live size changed in each step.

    what: a fill and its view, or a whole step. gpu: None where it was not measured.
    """

    what: What
    lowering: str
    sources: Sources
    slots: int
    lowest: int
    live: int
    padded: int
    host: Spread
    gpu: Spread | None

    @property
    def changes(self) -> bool:
        """Whether the live size changed in each step."""
        return self.lowest != self.live

    @property
    def key(self) -> Key:
        """The figures that it belongs to."""
        return Key(self.slots, self.lowest, self.live, self.padded, self.sources)

    def as_row(self) -> dict[str, Any]:
        """The row that goes into JSON."""
        live = {"lowest": self.lowest, "highest": self.live} if self.changes else {"live": self.live}
        return {
            "what": self.what,
            "lowering": self.lowering,
            "sources": self.sources,
            "slots": self.slots,
            **live,
            "padded": self.padded,
            **_spread("host", self.host),
            **_spread("gpu", self.gpu),
        }


def _spread(name: str, spread: Spread | None) -> dict[str, float | None]:
    names = (f"{name}_us", f"{name}_p10_us", f"{name}_p90_us")
    values = (None, None, None) if spread is None else (spread.median, spread.p10, spread.p90)
    return {key: value if value is None else round(value, 3) for key, value in zip(names, values, strict=True)}


@attrs.frozen(kw_only=True)
class RunnerFigure:
    """Fill and view of one runner, by hand and by itself.

    live, padded: tokens of a prefill, else requests. nbytes: what a step copies. gpu: None where it was not measured.
    """

    phase: str
    runner: str
    declaration: str
    slots: int
    nbytes: int
    live: int
    padded: int
    per_slot: Spread
    ours: Spread
    per_slot_gpu: Spread | None
    ours_gpu: Spread | None

    @classmethod
    def of(cls, race: Race, per_slot: Times, ours: Times) -> "RunnerFigure":
        """What was measured of a race's two runs."""
        kind = race.kind
        return cls(
            phase=kind.phase,
            runner=kind.runner,
            declaration=kind.declared,
            slots=len(kind.declaration.slots),
            nbytes=race.nbytes,
            live=kind.live,
            padded=kind.shown,
            per_slot=per_slot[0],
            ours=ours[0],
            per_slot_gpu=per_slot[1],
            ours_gpu=ours[1],
        )

    @property
    def rows(self) -> str:
        """Live of padded rows."""
        return f"{self.live}/{self.padded}"

    @property
    def ratio(self) -> float:
        """How many times more the host takes by hand."""
        return self.per_slot.median / self.ours.median

    def as_row(self) -> dict[str, Any]:
        """The row that goes into JSON."""
        told = ("phase", "runner", "declaration", "slots", "nbytes", "live", "padded")
        return {
            **{name: getattr(self, name) for name in told},
            **_spread("per_slot_host", self.per_slot),
            **_spread("ours_host", self.ours),
            **_spread("per_slot_gpu", self.per_slot_gpu),
            **_spread("ours_gpu", self.ours_gpu),
        }


@attrs.frozen
class HabitFigure:
    """A whole step of one habit by one lowering; base: the same without the peculiarity, None for that one itself.

    gpu: None where it was not measured. detours: steps that the runner filled by another lowering than its own.
    """

    habit: str
    lowering: str
    host: Spread
    gpu: Spread | None
    base: "HabitFigure | None"
    detours: int

    @property
    def ratio(self) -> float:
        """How many times as much as the base the host takes."""
        return 1.0 if self.base is None else self.host.median / self.base.host.median

    @property
    def gpu_ratio(self) -> float | None:
        """The same of the device."""
        base = self if self.base is None else self.base
        return None if self.gpu is None or base.gpu is None else self.gpu.median / base.gpu.median

    def as_row(self) -> dict[str, Any]:
        """The row that goes into JSON."""
        told = {"habit": self.habit, "lowering": self.lowering, "detours": self.detours}
        return {**told, **_spread("host", self.host), **_spread("gpu", self.gpu), "ratio": round(self.ratio, 3)}


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes of one runner.

    declared: of its slots at full capacity, as one adds them up by hand. inputs: what was allocated for them. table,
    packet, ring: what feeds the fused kernel, the ring on the host.
    """

    slots: int
    capacity: int
    lowering: str
    declared: int
    inputs: int
    table: int
    packet: int
    ring: int

    @classmethod
    def of(cls, workload: Workload, runner: DecodeRunner[Any]) -> "Memory":
        """What a runner holds by now: a ring grows with what goes through it."""
        captured = [runner.graphs.get(rows, frozenset()) for rows in workload.buckets]
        fillings = [one.filling for one in captured if one is not None]
        uploads = [filling.bucket.feed().upload for filling in fillings if filling.kernel is not None]
        packet = uploads[0].packet.nbytes if uploads else 0
        slots, capabilities = workload.inputs.slotgraph.slots, workload.backend.capabilities
        return cls(
            slots=workload.slots,
            capacity=workload.buckets[-1],
            lowering=runner.lowering,
            declared=sum(slot_bytes(slot, workload.capacity, capabilities) for slot in slots.values()),
            inputs=runner.graphs.memory().inputs,
            table=sum(filling.table.nbytes for filling in fillings if filling.table is not None),
            packet=packet,
            ring=uploads[0].nbytes - packet if uploads else 0,
        )


@attrs.frozen(kw_only=True)
class Integers:
    """What a whole number costs more from a list than from an array, in nanoseconds of a step on the host."""

    slots: int
    live: int
    lowering: str
    integers: int
    ns_each: float


@attrs.frozen
class Results:
    """All that a run found; `ours` is the lowering that the backend prefers."""

    figures: Sequence[Figure]
    memory: Sequence[Memory]
    ours: str
    runners: Sequence[RunnerFigure] = ()
    habits: Sequence[HabitFigure] = ()

    def grouped(self, what: What) -> Mapping[Key, Mapping[str, Figure]]:
        """Figures of one case together, by lowering."""
        found: dict[Key, dict[str, Figure]] = {}
        for figure in self.figures:
            if figure.what == what:
                found.setdefault(figure.key, {})[figure.lowering] = figure
        return found

    def integers(self) -> Iterator[Integers]:
        """For each case that was measured from lists and from arrays."""
        cases = self.grouped(STEP)
        for key, by_list in cases.items():
            by_array = cases.get(key._replace(sources="numpy"))
            if key.sources == "lists" and by_array is not None:
                count = integers_of(key.slots, key.live)
                for name in (name for name in by_list if name in by_array and name != BARE):
                    more = by_list[name].host.median - by_array[name].host.median
                    each = round(1e3 * more / count, 2)
                    yield Integers(slots=key.slots, live=key.live, lowering=name, integers=count, ns_each=each)

    def as_data(self, conditions: Mapping[str, Any]) -> dict[str, Any]:
        """Plain data: `rows` of steady live sizes, `changing` ones, memory, list costs, runners, habits, and more."""
        return {
            "rows": [figure.as_row() for figure in self.figures if not figure.changes],
            "changing": [figure.as_row() for figure in self.figures if figure.changes],
            "memory": [attrs.asdict(one) for one in self.memory],
            "lists": [attrs.asdict(one) for one in self.integers()],
            "runners": [one.as_row() for one in self.runners],
            "habits": [one.as_row() for one in self.habits],
            "conditions": {"ours": self.ours, **conditions},
        }


def rivals(names: Sequence[str]) -> list[str]:
    """The hand-written ones among contestants."""
    return [name for name in names if name in BY_HAND]
