"""Coverage: every slot is written in each step, or is constant, and none is there that nothing reads."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, Generic

import torch

from ...dataflow.capabilities import HOST
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import Once
from ..bits import bits
from ..runner import Runner
from ..stage import V
from ..state import State
from .fills import garbage, is_filled, over_garbage
from .reads import read_slots
from .replays import Leaves, Replays
from .report import Case, Finding
from .tails import live_part
from .together import Together

COVERAGE: Final = "coverage"
_NAMED: Final = 4
"""Rows that a finding names."""
_KEPT: Final = "still hold what lay there before"
_RULE: Final = "a kind of slot that a fill copies or resets must say so, by reads() and rule()"
_WRITE: Final = "write every live row in each step, or leave the slot out of the declaration"
_FILL: Final = "a function that takes `out` must fill all of it, padded rows too"


def check(
    runner: Runner[V],
    cases: Iterable[Case],
    state: State,
    notes: dict[str, None],
    seed: int,
    read_outside: Collection[str] = (),
) -> list[Finding]:
    """Fill each case over two kinds of garbage, run it over two more, and look at what its operators take.

    notes: slots that no operator of the step reads, but something else may. read_outside: slots that are known to be
    read between fill and replay. Cases that no graph takes are passed over.
    """
    found: dict[str | None, Finding] = {}
    read: set[str] = set(read_outside)
    present: set[str] = set()
    together = Together(runner.parts)
    for index, case in enumerate(cases):
        if runner.decide(case.batch, **case.side).bucket is None:
            continue
        proof = _Coverage(runner, case, state, seed + index)
        for finding in proof.findings():
            found.setdefault(finding.slot, finding)
        if together.any(bool(found)):  # what lies in slots that no one writes is nothing to run a step on
            continue
        present.update(name for name, value in vars(proof.filled()).items() if value is not None)
        with state.kept():
            read.update(read_slots(runner.parts, proof.filled()))
    if not found:
        for name in _unread(runner, present - read):
            _judge(runner, name, found, notes)
    return list(found.values())


def _unread(runner: Runner[V], names: Collection[str]) -> Iterator[str]:
    """Slots of these that a step ought to read, in the declaration's order."""
    for name, slot in runner.parts.stage.declaration.slots.items():
        if name in names and not isinstance(slot, Output) and not slot.is_parameter:
            yield name


def _judge(runner: Runner[V], name: str, found: dict[str | None, Finding], notes: dict[str, None]) -> None:
    """A slot that nothing reads is a finding where that can be known."""
    stage = runner.parts.stage
    slot = stage.declaration.slots[name]
    reason = _may_be_read(slot, lent=name in stage.lend, device=stage.backend.device)
    if reason is not None:
        notes[f"no operator of the step reads slot {name!r}: {reason}"] = None
        return
    message = (
        f"nothing reads slot {name!r}: no operator of the step takes it, and no computed slot needs it; leave it out "
        f"of the declaration, drop=[{name!r}], or name it in read_outside= if it is read between fill and replay"
    )
    found[name] = Finding(COVERAGE, name, message)


def _may_be_read(slot: Slot, *, lent: bool, device: torch.device) -> str | None:
    """Why a slot may well be read though no operator of the step takes it, or None."""
    if slot.optional:
        return "it is optional"
    if isinstance(slot, Constant):
        return "it is constant"
    if lent:
        return "it is lent to something outside"
    if isinstance(slot.rule(), Once):
        return "it is written once"
    if slot.placement == HOST:
        return "it is on the host, where it may be read before the replay"
    return "a kernel that is launched by itself may" if device.type != "cpu" else None


class _Coverage(Generic[V]):
    """One case, filled and run over garbage."""

    def __init__(self, runner: Runner[V], case: Case, state: State, seed: int) -> None:
        self._runner = runner
        self._case = case
        self._state = state
        self._seed = seed
        self._declared = runner.parts.stage.declaration.slots
        self._together = Together(runner.parts)

    def filled(self) -> V:
        """The view of a fill."""
        return self._runner.fill(self._case.batch, **self._case.side)

    def findings(self) -> Iterator[Finding]:
        """Slots that a fill leaves unwritten; where there are none, those that the step leaves so."""
        found = self._by_fill()
        yield from found if self._together.any(bool(found)) else self._by_step()

    def _by_fill(self) -> list[Finding]:
        """What a fill must write, it writes: nothing of it hangs on the garbage that was there."""
        (one, undo), (other, _) = self._over_garbage(flipped=False), self._over_garbage(flipped=True)
        found = []
        for name in (name for name in one if is_filled(self._runner, name)):
            rows = _rows(one[name], other[name])
            if rows:
                found.append(
                    Finding(COVERAGE, name, f"slot {name!r} is not written by a fill: {rows} {_KEPT}; {_RULE}")
                )
        if found:
            undo()
        return found

    def _over_garbage(self, *, flipped: bool) -> tuple[Leaves, Callable[[], None]]:
        """What slots hold after a fill over garbage, and what puts back what they held before it."""
        seed = torch.Generator().manual_seed(self._seed)
        with over_garbage(self._runner, self._case, seed, flipped=flipped) as undo:
            view = self.filled()
        return Replays(self._runner, view, self._state, self._case).filled, undo

    def _by_step(self) -> Iterator[Finding]:
        """What the step must write, it writes: outputs' live rows, and what the device computes."""
        replays = Replays(self._runner, self.filled(), self._state, self._case)
        names = [n for n in replays.slots if isinstance(self._declared[n], Output) or not is_filled(self._runner, n)]
        one, other = (replays.left(names, self._put(replays, names, flipped=flipped)) for flipped in (False, True))
        if isinstance(one, Exception) or isinstance(other, Exception):  # which is for other checks to tell of
            return
        for name in names:
            slot, after, again = self._declared[name], one[name], other[name]
            if isinstance(slot, Output):
                after, again = (live_part(slot, tensor, replays.step) for tensor in (after, again))
            rows = _rows(after, again)
            if rows and isinstance(slot, Output):
                yield Finding(
                    COVERAGE, name, f"output slot {name!r} is not written by the step: {rows} {_KEPT}; {_WRITE}"
                )
            elif rows:
                yield Finding(COVERAGE, name, f"slot {name!r} is not written by its function: {rows} {_KEPT}; {_FILL}")

    def _put(self, replays: Replays[V], names: list[str], *, flipped: bool) -> Callable[[], None]:
        def put() -> None:
            seed = torch.Generator().manual_seed(self._seed)
            for name in names:
                replays.slots[name].copy_(garbage(replays.slots[name], seed, flipped=flipped))

        return put


def _rows(one: torch.Tensor, other: torch.Tensor) -> str:
    """Rows in which two tensors differ by a bit, as text; empty where they do not."""
    differs = (bits(one) != bits(other)).any(-1).reshape(one.shape)
    if not differs.any():
        return ""
    if not one.dim():
        return "it"
    rows = differs.reshape(one.shape[0], -1).any(-1).nonzero()[:, 0].tolist()
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:_NAMED]))}{more}"
