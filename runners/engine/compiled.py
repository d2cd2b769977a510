"""Compiles the functions of computed slots as one, so that a graph has few kernels for them.

Three functions over tables of a request pool put nine kernels into a graph, which take 23 us on one H200; compiled as
one they take 2. Whole numbers stay the same to the byte. Floating-point numbers may be rounded otherwise, so that
functions that make some are compiled only on request.
"""

import contextlib
import functools
import itertools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.dlpack import from_dlpack

from ...dataflow.capabilities import Capabilities
from ...dataflow.computation import Computation, Results, ResultTail, part_of, words
from ...dataflow.guard import outside_inference
from ...dataflow.sources import OUT, Compute

AS_ONE: Final = "compiled as one"
"""The value in `CompiledFunctions.how` for a compiled function."""
OWN_KERNEL: Final = "its own kernel"
"""The value for a function in whose place a kernel of its own runs."""
OTHER_MODES: Final = "torch has other modes in the capture than when it was compiled, such as autocast"
"""The value in `CompiledFunctions.how` for a compiled function that a capture runs as written."""


class _FloatWatch(TorchDispatchMode):
    """Notes whether any operator returns floating-point or complex numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has no types for it
        self.seen = False

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        found = operator(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        self.seen |= any(one.is_floating_point() or one.is_complex() for one in tensors)
        return found


@attrs.frozen
class _Call:
    """One function of a group. Two groups of equal calls run the same code.

    Attributes:
        slot: The slot that it computes.
        compute: How it is declared.
        slots: Its parameters that are slots, `out` among them, with their places in the tensors of the group.
        others: Its other arguments, such as the settings, and None for an absent slot.
        target: The place of the slot.
        tail: The tail that is written behind the result, or None.
        live: The places of the live rows that the tail depends on.
    """

    slot: str
    compute: Compute
    slots: tuple[tuple[str, int], ...]
    others: tuple[tuple[str, Any], ...] = attrs.field(eq=lambda others: [(name, id(one)) for name, one in others])
    target: int
    tail: ResultTail | None
    live: Sequence[int]


Computations = Sequence[Computation]
"""Bound functions in the order in which they run."""


def _calls(group: Computations) -> tuple[list[_Call], list[torch.Tensor]]:
    """Return a group's calls, and all tensors that they read and write, each once.

    Each is an alias with a storage of its own: slots share one, and a compiler would ask whether they overlap.
    """
    places, tensors, calls = dict[Any, int](), list[torch.Tensor](), list[_Call]()

    def place(tensor: torch.Tensor) -> int:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in places:
            places[key] = len(tensors)
            tensors.append(from_dlpack(tensor))
        return places[key]

    for one in group:
        given = dict(one.function.keywords)
        if one.compute.fills:
            given.pop(OUT, None)  # the targets of these slots
        slots = tuple((name, place(value)) for name, value in given.items() if isinstance(value, torch.Tensor))
        others = tuple((name, value) for name, value in given.items() if not isinstance(value, torch.Tensor))
        live = [*map(place, one.live)]
        calls.append(_Call(one.slot, one.compute, slots, others, place(one.target), one.tail, live))
    return calls, tensors


@contextlib.contextmanager
def _alike() -> Iterator[None]:
    """Set the modes that torch compiles for, so that code that was compiled in one of them runs in all."""
    with outside_inference(), torch.no_grad():
        yield


def _compiled(calls: Sequence[_Call], backend: str = "inductor") -> Callable[[Sequence[torch.Tensor]], None]:
    """Return one compiled function that makes these calls."""

    def run(tensors: Sequence[torch.Tensor]) -> None:
        results: Results = {}
        for call in calls:
            target, compute = tensors[call.target], call.compute
            given: dict[str, Any] = {name: tensors[place] for name, place in call.slots}
            given.update(call.others)
            if compute.fills:
                if compute.writes_out:
                    outs = {one.slot: tensors[one.target] for one in calls if one.compute.fills == compute.fills}
                    given[OUT] = compute.arguments(outs)
                value = part_of(results, compute, call.slot, False, **given)  # noqa: FBT003 - this run's own results
            else:
                value = compute.function(**given)
            if not compute.writes_out:
                target.copy_(value)
            if call.tail is not None:
                call.tail.write(target, [tensors[place] for place in call.live])

    # torch keeps what it compiled with the code object, and gives up after some of one: each group has its own
    own = types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
    return torch.compile(own, backend=backend, dynamic=True, fullgraph=True)


@attrs.define(eq=False)
class CompiledFunctions:
    """The compiled functions of computed slots, shared by all buckets of a runner.

    Attributes:
        floats: Whether functions that make floating-point numbers are compiled, too.
        how: By slot, `AS_ONE`, with what was wrong with a kernel of its own, `OWN_KERNEL`, or why its function runs as
            written.
    """

    floats: bool = False
    how: dict[str, str] = attrs.field(factory=dict)
    _known: list[tuple[list[_Call], Callable[[Sequence[torch.Tensor]], None]]] = attrs.field(factory=list)

    def compile(self, computations: Computations) -> list[Callable[[], None]]:
        """Compile a bucket's functions, outside of a capture. Return what runs them, in order.

        Each function is run as written, and compiled, and the results are compared.
        """
        for one in computations:
            if one.slot not in self.how:
                group = [other for other in computations if other is one or other.slot in one.compute.fills]
                how = OWN_KERNEL if _has_kernel(one) else self._why_not(group) or AS_ONE
                self.how.update({other.slot: how for other in group})
        return list(itertools.chain.from_iterable(self._runs(computations)))

    def _runs(self, computations: Computations) -> Iterator[list[Callable[[], None]]]:
        """Yield the calls of functions that are compiled as one, as many as possible, of kernels, and of others."""
        left = list(computations)
        while left:
            kind, group, waiting = self._kind(left[0]), list[Computation](), dict[str, Computation]()
            for one in left:
                if self._kind(one) == kind and waiting.keys().isdisjoint(one.compute.needs):
                    group.append(one)
                else:
                    waiting[one.slot] = one
            run = self._compile(group) if kind else None
            yield [functools.partial(one.run, None) for one in group] if run is None else [run]
            left = [*waiting.values()]

    def _kind(self, one: Computation) -> tuple[str, ...]:
        """Return what functions that run by one call have in common. Empty for a function that runs as written."""
        how = self.how[one.slot]
        return (AS_ONE,) if how.startswith(AS_ONE) else one.compute.fills if how == OWN_KERNEL else ()

    def _compile(self, group: Computations) -> Callable[[], None] | None:
        """Return what runs a group compiled, or by its own kernel, or None if that fails or makes other bytes."""
        is_own = self.how[group[0].slot] == OWN_KERNEL
        what = OWN_KERNEL if is_own else "torch.compile"
        for one in group:
            (attrs.evolve(one, tail=None) if is_own else one).run(None)  # a kernel writes no tails
        expected = [one.target.clone() for one in group]
        try:
            run = _launcher(group) if is_own else self._as_one(group)
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            why = _refused(error, what)
        else:
            pairs = zip(group, expected, strict=True)
            other = next((one.slot for one, value in pairs if not torch.equal(one.target, value)), None)
            if other is None or (self.floats and not is_own):
                return run
            why = f"{what} gives {other!r} other values"
        for one, value in zip(group, expected, strict=True):
            one.target.copy_(value)
        is_compiled_instead = is_own and self._why_not(group) is None
        self.how.update({one.slot: f"{AS_ONE}, since {why}" if is_compiled_instead else why for one in group})
        return self._compile(group) if is_compiled_instead else None

    def _as_one(self, group: Computations) -> Callable[[], None]:
        """Return a call that runs a group compiled as one. It has run once, since torch compiles in the first run."""
        calls, tensors = _calls(group)
        made = next((run for known, run in self._known if known == calls), None)
        if made is None:
            made = _compiled(calls)
            self._known.append((calls, made))
        with warnings.catch_warnings(action="ignore"), _alike():  # a compiler's own, which nobody here can act on
            made(tensors)
        return functools.partial(self._run, made, tensors, group)

    def _run(
        self, compiled: Callable[[Sequence[torch.Tensor]], None], tensors: Sequence[torch.Tensor], group: Computations
    ) -> None:
        """Run a group, as written if torch would have to compile it anew, which it cannot inside of a capture."""
        try:
            with torch.compiler.set_stance("fail_on_recompile"), _alike():
                compiled(tensors)
        except RuntimeError:
            for one in group:
                self.how[one.slot] = OTHER_MODES
                one.run(None)

    def _why_not(self, group: Computations) -> str | None:
        """Run a function as written. Return why it cannot be compiled, or None. group: The slots that it fills."""
        if group[0].fields or group[0].asks_step:
            return "it takes what only a batch has"
        with _FloatWatch() as watch:
            for one in group:
                one.run(None)
        if watch.seen and not self.floats:
            return "it makes floating-point numbers, which may be rounded otherwise: ask by compile_computed=True"
        try:
            calls, tensors = _calls(group)
            with warnings.catch_warnings(action="error"):  # such as that a cache of the function's is ignored
                _compiled(calls, backend="eager")(tensors)
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            return _refused(error, "torch.compile")
        return None


def compiled_functions(capabilities: Capabilities, *, wanted: bool | None) -> CompiledFunctions | None:
    """Return what compiles functions, or None. wanted: See the option `compile_computed`."""
    is_compiled = capabilities.compiles if wanted is None else wanted
    return CompiledFunctions(floats=wanted is True) if is_compiled else None


def _has_kernel(one: Computation) -> bool:
    """Return whether a kernel can run in place of a function: Triton compiles for CUDA devices."""
    return one.compute.kernel is not None and one.target.is_cuda and not (one.fields or one.asks_step)


def _launcher(group: Computations) -> Callable[[], None]:
    """Return a launch of the kernel that fills the slots of a group. It has run once, without the slots' tails."""
    compute, given = group[0].compute, dict(group[0].function.keywords)
    given[OUT] = compute.arguments({one.slot: one.target for one in group})

    def launch() -> None:
        compute.kernel(**given)  # type: ignore[misc] # it has one
        for one in group:
            one.pad(None)

    for one in group:
        words(one.target).bitwise_not_()  # what the kernel leaves alone is found
    compute.kernel(**given)  # type: ignore[misc] # it has one
    return launch


def _refused(error: Exception, what: str) -> str:
    """Return why a function runs as written: what refused it, and the first line of its error."""
    error = getattr(error, "inner_exception", error)  # what a compiler of torch.compile's raised
    line = str(error).strip().split("\n", 1)[0]
    return f"{what} refuses it: {type(error).__name__}: {line:.200}"
