"""Parity: a step's graph against the step as it is written, on the same padded view and on a batch without padding."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
import torch

from ...dataflow.buffers import Buffers
from ...dataflow.errors import MissingSourceError
from ...dataflow.inputs import Inputs
from ...dataflow.slots import Constant, Output
from ..eagerly import Eagerly
from ..parts import Parts
from ..runner import Runner
from ..state import Apart, Copies, State
from .comparison import (
    GRAPH_AND_EAGER,
    USUAL,
    Mismatch,
    Seen,
    Tolerance,
    computed_apart,
    differences,
    first_difference,
    seen,
)
from .eagerly import graph_of, ran_eagerly
from .otherwise import other_tails
from .report import Case, Finding
from .together import Together

NAME: Final = "parity"
BITWISE: Final[Mapping[torch.dtype, Tolerance]] = {}
_AGAIN: Final = ("eager", "eager again")
T = TypeVar("T")
Written = Sequence[tuple[torch.Tensor, torch.Tensor]]


def check(
    runner: Runner[Any],
    cases: Sequence[Case],
    state: State,
    *,
    tolerance: Mapping[torch.dtype, Tolerance] = BITWISE,
    unpadded: Mapping[torch.dtype, Tolerance] = USUAL,
) -> list[Finding]:
    """Hold a runner's graphs to its step on some batches; each difference once, where it came up first.

    tolerance: by dtype, how far a replay may be from the step on the same padded view; bit for bit where nothing is
    said. unpadded: how far it may be from the step on the batch without padding. Batches that no graph takes are passed
    over. Raises CheckError where there is no room for copies of the state.
    """
    found: dict[tuple[str, ...], Finding] = {}
    state.check_room(1 + Twin.COPIES)
    for case in cases:
        if runner.parts.graphs is None or runner.decide(case.batch, **case.side).path == "eager":
            continue
        for one in _check(runner, case, state, tolerance, unpadded):
            found.setdefault((one.slot or "", one.message.split(":")[0]), one)
    return list(found.values())


def _check(
    runner: Runner[Any],
    case: Case,
    state: State,
    tolerance: Mapping[torch.dtype, Tolerance],
    unpadded: Mapping[torch.dtype, Tolerance],
) -> Iterator[Finding]:
    """What is wrong with one batch: of the first kind, since the second follows from it."""
    if runner.parts.stage.declaration.ranks is not None:
        runner.fill(case.batch, **case.side)  # by which ranks know what all bring, as computed slots may ask
    with state.kept(), written_slots_kept(buffers_in(runner.parts)):
        exact = _without_padding(runner.parts, case)
    view = runner.fill(case.batch, **case.side)
    with state.kept():
        twin = Twin(runner.parts, state, tolerance)
        with Together(runner.parts).raising("the step as it is written"):
            twin.before(view)
        replayed = seen(view, runner.replay(view))
        fault = twin.fault(view, replayed)
    if fault is not None:
        yield Finding(NAME, fault.slot, fault.message)
    elif isinstance(exact, str):
        live = runner.parts.size(case.batch, case.side)[-1]
        if live:  # an empty batch is padded in each step, and nothing of it comes out
            yield Finding(NAME, None, exact)
    else:
        yield from _unpadded_fault(replayed, exact, unpadded)


def _without_padding(parts: Parts[Any], case: Case) -> Seen | str:
    """What the step does with a batch where nothing is padded; a sentence where it raises there."""
    eager, graphs = parts.eager, parts.graphs
    try:
        view = eager.fill(case.batch, **case.side)
    except MissingSourceError:
        if graphs is None:
            raise
        eager = Eagerly(parts.stage, parts.name, parts.size, buffers=graphs.buffers)  # which carries nothing
        view = eager.fill(case.batch, **case.side)
    try:
        return seen(view, eager.run(view))
    except Exception as error:  # noqa: BLE001 - whatever a step makes of other sizes is a result
        return f"the step raised on the batch without padding: {type(error).__name__}: {error}"


def _unpadded_fault(graph: Seen, eager: Seen, tolerance: Mapping[torch.dtype, Tolerance]) -> Iterator[Finding]:
    found = first_difference(graph, eager, tolerance=tolerance)
    if found is None:
        return
    if found.slot is not None:
        yield Finding(NAME, found.slot, f"{found}: the fill of the padded bucket is not that of the batch")
        return
    apart = computed_apart(graph, eager)
    told = "; ".join(map(str, apart)) or "all slots agree in their live rows"
    message = (
        f"{found}; {told}; on the padded view the step gives what the graph gives: padded rows, or what is computed "
        "for the bucket, reach live ones"
    )
    yield Finding(NAME, apart[0].slot if apart else None, message)


@attrs.frozen
class Fault:
    """What a replay did otherwise than the step: the slot, where one is to blame, and a sentence."""

    slot: str | None
    message: str


class Twin:
    """The step as it is written beside one replay of its graph, from the same slots and state."""

    COPIES: Final = 3
    """Of the state, at most at once: at the beginning, as the step left it, and as the replay did."""

    def __init__(self, parts: Parts[Any], state: State, tolerance: Mapping[torch.dtype, Tolerance] = BITWISE) -> None:
        self._parts = parts
        self._state = state
        self._tolerance = tolerance
        self._begin: Copies | None = None
        self._slots: Written = ()
        self._eager: Seen | None = None
        self._left: Copies | None = None

    def before(self, view: Inputs) -> None:
        """Run the step on a view that is about to be replayed; then slots and state are as they were."""
        self._begin, self._slots = self._state.copy(), _written_slots(buffers_in(self._parts))
        self._eager, self._left = self._run(view, self._begin, self._state.copy)

    def _run(self, view: Inputs, begin: Copies, look: Callable[[], T]) -> tuple[Seen, T]:
        """What the step does, and what is seen of the state that it leaves; then slots and state are as they were."""
        with written_slots_kept(buffers_in(self._parts)):
            _put_back(self._slots)
            try:
                return seen(view, ran_eagerly(self._parts, view)), look()
            finally:
                self._state.restore(begin)

    def fault(self, view: Inputs, graph: Seen) -> Fault | None:
        """What the replay did otherwise; None where it did the same. The state is then as the replay left it.

        Of a step that does not do the same twice no more is asked than the usual tolerances.
        """
        begin, eager, left = self._begin, self._eager, self._left
        if begin is None or eager is None or left is None:
            return None
        tolerance = self._tolerance
        found = next(differences(graph, eager, tolerance=tolerance, names=GRAPH_AND_EAGER), None)
        apart = self._state.apart(left)
        told, together = self._state.told(apart), Together(self._parts)
        if not together.any(found is not None or bool(told)):
            return None
        after = self._state.copy()
        self._state.restore(begin)
        again, besides = self._once_more(view, begin, left, tails=2 if together.any(bool(told)) else 0)
        self._state.restore(after)
        if next(differences(eager, again, tolerance=BITWISE, names=_AGAIN), None) is not None:
            tolerance = USUAL  # the step is not the same twice, so no more can be asked of its graph
            found = next(differences(graph, eager, tolerance=tolerance, names=GRAPH_AND_EAGER), None)
        if found is not None:
            return _frozen(found, self._parts, view)
        steady = self._state.told(apart, besides)
        return _left_otherwise(steady[0]) if steady else None

    def _once_more(self, view: Inputs, begin: Copies, left: Copies, tails: int) -> tuple[Seen, list[Apart]]:
        """What the step does a second time, and what it leaves otherwise: as it is, and with other tails."""

        def look() -> Apart:
            return self._state.apart(left)

        again, apart = self._run(view, begin, look)
        besides = [apart]
        for seed in range(tails):
            with other_tails(self._parts, view, seed):
                besides.append(self._run(view, begin, look)[1])
        return again, besides


def _frozen(found: Mismatch, parts: Parts[Any], view: Inputs) -> Fault:
    graph = graph_of(parts, view)
    where = "" if graph is None else f" (bucket {graph.rows})"
    why = "all slots agree: the step reads something that is no slot, such as a host value or an address at capture"
    return Fault(found.slot, f"{found}{where}; {why}")


def _left_otherwise(told: str) -> Fault:
    message = (
        f"a replay leaves other bytes than the step in {told}, though all slots and outputs agree: the step reads "
        "something that is no slot, such as a host value at capture, to tell what it writes there or where"
    )
    return Fault(None, message)


@contextlib.contextmanager
def written_slots_kept(buffers: Buffers | None, *, every: bool = False) -> Iterator[None]:
    """Afterwards the slots that a step may write hold what they held before; every: those that it may not, too."""
    written = _written_slots(buffers, every=every)
    try:
        yield
    finally:
        _put_back(written)


def buffers_in(parts: Parts[Any]) -> Buffers | None:
    """The memory of a runner's slots, as far as it has any yet."""
    return parts.eager.buffers if parts.graphs is None else parts.graphs.buffers


def _written_slots(buffers: Buffers | None, *, every: bool = False) -> Written:
    """The memory of slots that a step may write, or of all but constants, and what it holds."""
    written = [b for b in buffers or () if b.slot.rewritten or isinstance(b.slot, Output)]
    written = [b for b in buffers or () if not isinstance(b.slot, Constant)] if every else written
    with torch.no_grad():
        return [(buffer.tensor, buffer.tensor.clone()) for buffer in written]


def _put_back(written: Written) -> None:
    with torch.no_grad():
        for tensor, before in written:
            tensor.copy_(before)
