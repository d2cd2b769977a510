"""What a recorded file says of its steps, their values, the runner and its declaration: plain records."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import attrs

from ..decision import Why

FORMAT: Final = 1
"""The number of this way to write files; a file of another number is refused."""
MOST_RANKS: Final = 1 << 20
"""Ranks that a file may tell of."""

ValueKind: TypeAlias = Literal["tensor", "array", "list", "tuple", "plain", "other"]
Part: TypeAlias = Literal["slots", "fields", "staged", "outputs"]
Where: TypeAlias = Literal["device", "host"]


@attrs.frozen(kw_only=True)
class Value:
    """One value of a step.

    kind: a tensor, an array, a list or a tuple of numbers, each with its elements in the file as a tensor of a dtype
    and a shape; "plain" with its data in `value`; "other" for what is no data. where: a tensor's place. dense: whether
    it lay in one piece. kept: whether the elements are in the file. why: why they are not, or what it is instead.
    """

    name: str
    kind: ValueKind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    where: Where = "host"
    dense: bool = True
    kept: bool = True
    value: Any = None
    why: str = ""

    @property
    def has_tensor(self) -> bool:
        """Whether its elements are a tensor of the file."""
        return self.kept and self.kind not in ("plain", "other")

    @property
    def is_lost(self) -> bool:
        """Whether the file cannot tell what it was."""
        return self.kind == "other" or not self.kept

    def __str__(self) -> str:
        """What it is, in a word or two."""
        if self.kind == "other":
            return self.why
        if self.kind == "plain":
            return "plain data" if self.kept else self.why
        what = f"{self.dtype} [{', '.join(map(str, self.shape))}], {self.kind}"
        return f"{what} on the device" if self.where == "device" else what


@attrs.frozen(kw_only=True)
class Raised:
    """The error that ended a step."""

    kind: str
    message: str
    traceback: str = ""


@attrs.frozen(kw_only=True)
class RanksRecord:
    """The ranks that ran each step together: which one this is, of how many; equal, shards: as of `Ranks`."""

    rank: int
    size: int
    equal: bool
    shards: int


@attrs.frozen(kw_only=True)
class Together:
    """What ranks told of a step.

    live: on each varying axis, the rows of each rank. forced: the rank whose need is the step's path and bucket, None
    where nothing was exchanged; why: in one word. alone: what this rank would have done by itself, in a sentence.
    """

    live: tuple[tuple[str, tuple[int, ...]], ...]
    forced: int | None = None
    why: str = "fits"
    alone: str = ""


@attrs.frozen(kw_only=True)
class StepRecord:
    """One step.

    number: which of the recording's, from 0. path, bucket, reason: the runner's decision, or why it made none; that of
    all ranks, where there are some. live: rows on each varying axis. slots: what the batch brought for each copied
    slot; absent: optional ones that it came without. fields: its fields that are no slots. outputs: what the step
    returned, leaf by leaf, where asked for.
    replays: how often it was run. notes: what is not in the file, and why. ranks: what they told; None where there are
    none, or the step ended before.
    """

    number: int
    path: str = ""
    bucket: int | None = None
    reason: str = ""
    live: tuple[tuple[str, int], ...] = ()
    slots: tuple[Value, ...] = ()
    absent: tuple[str, ...] = ()
    fields: tuple[Value, ...] = ()
    staged: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] | None = None
    replays: int = 0
    raised: Raised | None = None
    notes: tuple[str, ...] = ()
    ranks: Together | None = None

    def parts(self) -> "list[tuple[Part, tuple[Value, ...]]]":
        """The values of each part."""
        return [
            ("slots", self.slots),
            ("fields", self.fields),
            ("staged", self.staged),
            ("outputs", self.outputs or ()),
        ]

    def values(self) -> "list[tuple[str, Value]]":
        """Each value with the name that its elements have in the file."""
        return [(key_of(self.number, part, one.name), one) for part, found in self.parts() for one in found]

    def missing(self) -> list[str]:
        """What the batch brought for slots and is not in the file, a line each: without it the step cannot be run."""
        return [f"slot {one.name!r}: {one.why or one}" for one in (*self.slots, *self.staged) if one.is_lost]


@attrs.frozen(kw_only=True)
class SlotRecord:
    """A slot as it is declared."""

    name: str
    kind: str
    shape: tuple[str, ...]
    dtype: str
    placement: str
    tail: str
    source: str
    optional: bool


@attrs.frozen(kw_only=True)
class RunnerRecord:
    """The runner that was recorded.

    kind: its name. inputs: its declaration's. config, settings: as far as they are plain data. sizes: of each fixed
    axis, and capacities. buckets: padded sizes by rows. slots, fields, disabled: the declaration. ranks: those that ran
    each step together, if any did.
    """

    kind: str
    inputs: str
    backend: str
    lowering: str
    config: Any
    settings: Any
    sizes: tuple[tuple[str, int], ...]
    buckets: tuple[int, ...]
    slots: tuple[SlotRecord, ...]
    fields: tuple[str, ...]
    disabled: tuple[str, ...]
    fixed: tuple[str, ...]
    ranks: RanksRecord | None = None


@attrs.frozen(kw_only=True)
class Header:
    """All that a file says beside the elements of its values."""

    format: int
    versions: tuple[tuple[str, str], ...]
    runner: RunnerRecord
    steps: tuple[StepRecord, ...]
    notes: tuple[str, ...] = ()


def key_of(number: int, part: Part, name: str) -> str:
    """The name of a value's elements in the file."""
    return f"{number}.{part}.{name}"


def ranks_faults(ranks: RanksRecord | None, steps: Sequence[StepRecord]) -> Iterator[str]:
    """What makes no sense in what a file says of ranks."""
    if ranks is not None and not (0 <= ranks.rank < ranks.size <= MOST_RANKS and ranks.shards > 0):
        yield f"there is no rank {ranks.rank} of {ranks.size}, with {ranks.shards} shards, as which its runner ran"
        return
    for step in steps:
        told = step.ranks
        if told is None:
            continue
        sized = ranks is not None and all(_is_told(rows, ranks.size) for _, rows in told.live)
        forced = told.forced is None or (ranks is not None and 0 <= told.forced < ranks.size)
        if not sized or not forced or told.why not in get_args(Why):
            yield f"what ranks told of step {step.number} is not what {ranks.size if ranks else 0} ranks tell"


def _is_told(rows: Sequence[int], size: int) -> bool:
    return len(rows) == size and all(one >= 0 for one in rows)
