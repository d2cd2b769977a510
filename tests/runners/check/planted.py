"""Planted bugs: runners with one fault each, what finds it, and in which words."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

import slotgraph
from slotgraph import BATCH, CACHE_LOC, TOKENS, DecodeRunner, Inputs, computed, copied, keep, output
from slotgraph.dataflow.slots import Copied
from slotgraph.extend import once, slot
from slotgraph.runners.check.checks import CheckReport
from slotgraph.runners.check.trial import Finding
from tests.runners.models import TABLE, WORDS

ROOM = 64
BUCKETS = [2, 4, 8]


class Sound(Inputs):
    """One slot of each rule."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, limit=WORDS - 1)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, limit=WORDS - 1)
    places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1)
    flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=False)
    temperatures: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=once(1.0))
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=keep("only live rows are counted"))
    seen: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("an id like any other"), poison="stale", limit=3)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=TOKENS, dtype=torch.int64)
    logits: torch.Tensor = output(TOKENS, TABLE.shape[1], dtype=torch.float32)


def sound(view: Any) -> torch.Tensor:
    """A step whose rows are each their own affair; it writes a cache, and reads it again."""
    table, cache = tables_on(view.ids.device)
    scale = torch.where(view.flags, view.weights, -view.weights) / view.temperatures
    hidden = table[view.twice] + table[view.positions] * scale[:, None] + table[view.seen] + view.lens[:, None]
    cache[view.places] = hidden
    view.logits.copy_(cache[view.places] + view.ids[:, None])
    return torch.mul(view.logits, 3)


_TABLES: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def tables_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of words and a cache on a device; moved there in a warm-up, since a captured step could not."""
    if device not in _TABLES:
        _TABLES[device] = TABLE.to(device), torch.zeros(ROOM, TABLE.shape[1], device=device)
    return _TABLES[device]


def runner_of(step: Callable[[Any], Any], backend: Any, inputs: type[Inputs] = Sound, **options: Any) -> Any:
    """A captured runner."""
    given: dict[str, Any] = {"buckets": BUCKETS, "progress": False, **options}
    runner = DecodeRunner(inputs, step, backend=backend, **given)
    runner.capture()
    return runner


def found_by(check: str, runner: Any, batches: Any = None, **options: Any) -> list[Finding]:
    """What one check finds."""
    return list(slotgraph.check(runner, batches, only=(check,), progress=False, **options).findings)


@attrs.frozen
class Planted:
    """A bug: what it is called, the runner that has it, the check that finds it, and the slot.

    fatal: whether it stops a device for good. lowering: the one that it is a bug under, if another writes every tail in
    each step. noted: the note that it is on a device, which may run more than operators tell.
    """

    what: str
    check: str
    slot: str
    step: Callable[[Any], Any] = sound
    inputs: type[Inputs] = Sound
    fatal: bool = False
    lowering: str = "auto"
    noted: str | None = None

    def report(self, backend: Any, **options: Any) -> CheckReport:
        """What its check says of a runner that has it."""
        runner = runner_of(self.step, backend, self.inputs, lowering=self.lowering)
        return slotgraph.check(runner, progress=False, rounds=4, **{"only": (self.check,), **options})


def _advances(view: Any) -> Any:
    """Writes positions where a flag says so, which none does while it is captured."""
    outputs = sound(view)
    view.positions.add_(view.flags.any().long())
    return outputs


def _writes_half(view: Any) -> Any:
    made = sound(view)
    view.half[::2].copy_(made[::2])
    return made


def _half(positions: torch.Tensor, out: torch.Tensor) -> None:
    """Fills the first half alone."""
    rows = out.shape[0] // 2
    torch.mul(positions[:rows], 2, out=out[:rows])


class HalfWritten(Sound):
    """An output that is written in part."""

    half: torch.Tensor = output(TOKENS, TABLE.shape[1], dtype=torch.float32)


class HalfComputed(Sound):
    """A function that leaves rows out."""

    halves: torch.Tensor = computed(_half, shape=TOKENS, dtype=torch.int64)


class Unread(Sound):
    """A slot that nothing reads."""

    extra: torch.Tensor = copied(BATCH, 3, dtype=torch.float32, pad=0)


@attrs.frozen(kw_only=True)
class Ruleless(Copied):
    """A kind of slot that forgets its tail."""

    def rule(self) -> None:
        """None."""

    def faults(self) -> Iterator[str]:
        """None, it says."""
        yield from ()


class ForgottenTail(Sound):
    """A slot of that kind."""

    extra: torch.Tensor = slot(Ruleless(shape=(TOKENS,), dtype=torch.int64, limit=3))


OURS: list[Planted] = [
    Planted(
        "floats of padded rows reach live ones: the largest weight of a bucket",
        "poison",
        "weights",
        lambda view: sound(view) * view.weights.amax(),
    ),
    Planted(
        "whole numbers of padded rows do: ranks among all ids",
        "poison",
        "ids",
        lambda view: sound(view) + (view.ids[None, :] < view.ids[:, None]).sum(1, keepdim=True),
    ),
    Planted("truth values do: any flag of the bucket", "poison", "flags", lambda view: sound(view) + view.flags.any()),
    Planted(
        "a tail that is kept, for nobody reads it, is read",
        "poison",
        "lens",
        lambda view: sound(view) + view.lens.sum(),
    ),
    Planted(
        "such a tail indexes a table",
        "poison",
        "lens",
        lambda view: sound(view) + tables_on(view.ids.device)[0][view.lens.long()],
        fatal=True,
    ),
    Planted(
        "what earlier steps left, in a tail that is set once, is read",
        "poison",
        "temperatures",
        lambda view: sound(view) + view.temperatures.amin(),
    ),
    Planted(
        "the step writes a slot that it was to read, where a flag says so",
        "poison",
        "positions",
        _advances,
        lowering="foreach",
    ),
    Planted(
        "an output is added to what the step before left there",
        "poison",
        "logits",
        lambda view: view.logits.clone() + sound(view),
    ),
    Planted("an output is written in part", "coverage", "half", _writes_half, HalfWritten),
    Planted(
        "a function with `out` leaves rows as they were",
        "coverage",
        "halves",
        lambda view: sound(view) + view.halves[:, None],
        HalfComputed,
    ),
    Planted(
        "a kind of slot forgets its tail",
        "poison",
        "extra",
        lambda view: sound(view) + view.extra[:, None],
        ForgottenTail,
    ),
    Planted(
        "a slot is filled in each step, and nothing reads it",
        "coverage",
        "extra",
        sound,
        Unread,
        noted="no operator of the step reads slot 'extra': a kernel that is launched by itself may",
    ),
]
"""Bugs that poison and coverage find."""
