"""Steps whose stack is captured: the call that is captured, its arguments and results, and replays."""

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS, Axis, Live
from ...dataflow.buffers import overlaps, span
from ...dataflow.errors import CaptureError, ReplayError
from ...dataflow.guard import GRADIENTS, outside_inference, without_gradients
from ...dataflow.inputs import Inputs, V
from ...dataflow.views import Viewer
from ..engine.bits import text_of
from ..engine.current import CURRENT, CurrentStep, Interrupts, OwnValue, current_step, untraced, with_current
from ..engine.graphs import Captured, GraphSet
from ..engine.outputs import cut_live, cut_rows, map_tensors
from ..engine.routes import Route
from ..engine.stage import Stage
from ..engine.statistics import Counts
from .breaks import FACTS, VALUES, share_storage


@attrs.frozen(eq=False)
class Stack:
    """The part of a step that is captured.

    Attributes:
        module: A module that the step calls, or None for the whole step.
        name: Its name in errors.
    """

    module: nn.Module | None = None
    name: str = ""

    def code(self, stage: Stage[Any]) -> Callable[..., Any]:
        """Return the captured function."""
        return stage.call if self.module is None else self.module.forward

    def run(self, stage: Stage[Any], view: Any, answer: Callable[..., Any]) -> Any:
        """Run a step with `answer` in place of the captured function."""
        if self.module is None:
            return stage.run(view, answer)
        own = self.module.__dict__
        before = own.get("forward")
        own["forward"] = answer
        try:
            return stage.run(view)
        finally:
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before

    def wrong_calls(self, times: int) -> str:
        """Return the error text for a step that does not call the stack once."""
        return f"the step called the stack, {self.name}, {times} times"


class StackCall:
    """The captured call of one bucket: a function and its arguments. Tensors that are no slots are copied.

    Attributes:
        backend: The backend that captures it.
        run: The function.
        own: The step's view.
        view: The view that the captured part gets instead.
        hands_out: Whether some outputs are objects of the running step.
        leaves: The arguments of the capture, flat.
        inside: Indices of the arguments in the slots' memory.
        sources: By identity of an argument object at capture, the function that returns the running step's object.
        written: Arguments that graphs or breaks write, and that graphs read.
    """

    def __init__(
        self,
        backend: Backend,
        run: Callable[..., Any],
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        own: Inputs,
        view: Inputs,
        holds: Callable[[torch.Tensor], bool],
    ) -> None:
        self.backend = backend
        self.run = run
        self.own = own
        self.view = view
        self.hands_out = False
        args, kwargs = arguments
        leaves, self._structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        given = (*args, *kwargs.values())
        is_flat = len(leaves) == len(given) and all(map(operator.is_, leaves, given))
        self._kinds = (*map(type, given), *kwargs) if is_flat else None
        self.inside = set[int]()
        self.leaves = list[Any]()
        for place, leaf in enumerate(leaves):
            kept = view if leaf is own else leaf
            if isinstance(leaf, torch.Tensor) and holds(leaf):
                self.inside.add(place)
            elif isinstance(leaf, torch.Tensor):
                with outside_inference():  # so that steps outside of inference mode can write it
                    kept = leaf.detach().clone()
            self.leaves.append(kept)
        self.sources: dict[int, OwnValue] = {}
        for one in (view, own):
            self.sources[id(one)] = operator.attrgetter("view")
            for key, name in slots_of(one).items():
                self.sources[key] = lambda step, name=name: step.view.__dict__[name]  # type: ignore[misc]
        for place, leaf in enumerate(self.leaves):
            if not isinstance(leaf, VALUES):
                self.sources[id(leaf)] = lambda step, place=place: step.arguments[place]  # type: ignore[misc]
        self.settle(frozenset(), frozenset(), ())

    def settle(self, read: Collection[int], written: Collection[int], apart: Sequence[tuple[int, int]]) -> None:
        """Decide how each argument is passed, given the arguments that graphs read, and that graphs or breaks write.

        apart: Pairs of arguments that may not share memory, because one of them is written.
        """
        self._apart = apart
        self._values = list[tuple[int, Any]]()
        self._same = list[tuple[int, Any]]()
        self._moved = list[tuple[int, Any]]()
        self._twins = list[tuple[int, int]]()
        first = dict[int, int]()
        for place, kept in enumerate(self.leaves):
            if isinstance(kept, VALUES):
                self._values.append((place, kept))
            elif kept is self.view:
                self._same.append((place, kept))
            elif place in read:
                (self._moved if isinstance(kept, torch.Tensor) else self._same).append((place, kept))
            elif first.setdefault(id(kept), place) != place:
                self._twins.append((first[id(kept)], place))
        moved = {id(kept) for _, kept in (*self._moved, *self._same)} - {id(self.view)}
        self.written = [(place, kept) for place, kept in self._moved if place in written]
        self._live = {key: source for key, source in self.sources.items() if key not in moved}

    def arguments(self) -> Any:
        """Return the arguments of the capture."""
        return pytree.tree_unflatten(self.leaves, self._structure)

    def at_capture(self, recording: Interrupts | None = None) -> CurrentStep:
        """Return the `CurrentStep` for the capture."""
        arguments = [self.own if leaf is self.view else leaf for leaf in self.leaves]
        return CurrentStep(self.own, "capture", arguments, self._live, recording, self.view)

    def __call__(self) -> Any:
        """Run the function, at capture, and at each replay of a backend without graphs."""
        step = current_step()
        args, kwargs = self.arguments()
        if step is not None and step.sources is self._live:  # at a replay
            outputs = self.run(*args, **kwargs)
            return self.named(outputs) if self.hands_out else outputs
        with torch.no_grad():
            return with_current(self.at_capture(self.backend), lambda: self.named(self.run(*args, **kwargs)))

    def take(  # noqa: C901 - in one function, because each step calls it
        self, args: Sequence[Any], kwargs: Mapping[str, Any], step: CurrentStep
    ) -> None:
        """Copy a step's arguments to the tensors that graphs read, and keep the flat list for breaks."""
        leaves = [*args, *kwargs.values()]
        view = step.view
        if (*map(type, leaves), *kwargs) != self._kinds:  # flattening would take ten times as long
            leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
            if structure != self._structure:
                raise ReplayError("the stack was called with other arguments than at capture")
        for place, kept in self._values:
            leaf = leaves[place]
            if type(leaf) is not type(kept) or leaf != kept:
                raise _changed(place, leaf, kept)
        for place, kept in self._same:
            if leaves[place] is not (view if kept is self.view else kept):
                raise ReplayError(other_object(place, kept))
        for place, kept in self._moved:
            leaf = leaves[place]
            if leaf is kept:
                continue
            if not isinstance(leaf, torch.Tensor) or FACTS(leaf) != FACTS(kept):
                raise _changed(place, leaf, kept)
            if leaf.data_ptr() != kept.data_ptr() or leaf.stride() != kept.stride():
                if place in self.inside:
                    raise ReplayError(other_object(place, kept))
                kept.copy_(leaf)
        if self._apart or self._twins:
            self._check_apart(leaves)
        step.arguments = leaves
        step.sources = self._live

    def _check_apart(self, leaves: Sequence[Any]) -> None:
        """Raise ReplayError for arguments that are one object where the capture had two, or two where it had one."""
        for one, other in self._twins:
            if leaves[one] is not leaves[other]:
                raise ReplayError(
                    f"arguments {one} and {other} of the stack were one object at capture, and are two now: breaks "
                    f"could not distinguish them"
                )
        for one, other in self._apart:
            if share_memory(leaves[one], leaves[other]):
                raise ReplayError(shared_arguments(one, other))

    def named(self, outputs: Any) -> Any:
        """Replace outputs that are objects of the step (arguments, the view, parts of these) by their sources."""
        self.hands_out = False

        def name(leaf: Any) -> Any:
            source = self.sources.get(id(leaf))
            if source is None and isinstance(leaf, torch.Tensor):
                source = self._part(leaf)
            if source is not None:
                self.hands_out = True
                return Own(source)
            return leaf

        def name_within(leaf: Any) -> Any:
            return name(leaf) if id(leaf) in self.sources else map_tensors(leaf, name, name)

        return pytree.tree_map(name_within, outputs, is_leaf=lambda one: id(one) in self.sources)

    def _part(self, output: torch.Tensor) -> OwnValue | None:
        """Return the source of an output in a tensor argument's memory, or None for any other output."""
        for place, kept in enumerate(self.leaves):
            if isinstance(kept, torch.Tensor) and place not in self.inside and share_storage(kept, output):
                if output.dtype != kept.dtype:
                    raise CaptureError(
                        f"the stack returns a part of its argument {place} as another dtype, {text_of(output)}, which "
                        f"later steps cannot make from their own argument: return a clone"
                    )
                return _part_of(place, kept, output)
        return None


class Own:
    """Takes the place of an output that is an object of the running step.

    It is no attrs class, because fields of attrs classes in outputs would be replaced.
    """

    def __init__(self, source: OwnValue) -> None:
        self.source = source


def hand_out(outputs: Any, step: CurrentStep) -> Any:
    """Return the outputs of a replay, with each `Own` replaced by the object of the running step."""
    return map_tensors(outputs, lambda leaf: leaf, lambda leaf: leaf.source(step) if isinstance(leaf, Own) else leaf)


def _part_of(place: int, kept: torch.Tensor, output: torch.Tensor) -> OwnValue:
    """Return a function that takes the same part of each step's argument."""
    size = output.shape
    stride = output.stride()
    offset = output.storage_offset() - kept.storage_offset()

    def part(step: CurrentStep) -> torch.Tensor:
        leaf: torch.Tensor = step.arguments[place]
        if leaf.stride() != kept.stride():
            raise ReplayError(
                f"the stack returns a part of its argument {place}, whose strides are {leaf.stride()} in this step, "
                f"and {kept.stride()} in its graphs: pass a contiguous tensor, or return a clone"
            )
        return leaf.as_strided(size, stride, leaf.storage_offset() + offset)

    return part


def share_memory(one: Any, other: Any) -> bool:
    """Return whether two tensors have a byte in common."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or not overlaps(one, [span(other)]):
        return False
    low = min(one.data_ptr(), other.data_ptr())
    taken = torch.zeros(max(span(one)[1], span(other)[1]) - low, dtype=torch.bool, device="cpu")
    for tensor in (one, other):
        size = (*tensor.shape, tensor.itemsize)
        stride = [step * tensor.itemsize for step in tensor.stride()]
        part = taken.as_strided(size, (*stride, 1), tensor.data_ptr() - low)
        if tensor is other and part.any():
            return True
        part.fill_(True)  # noqa: FBT003 - the value
    return False


def shared_arguments(one: int, other: int) -> str:
    """Return the error text for two arguments of a stack that share memory and may not."""
    return (
        f"arguments {one} and {other} of the stack share memory, and it writes one of them: graphs read copies, so a "
        f"write to one would not change the other; pass only one of them, or a clone"
    )


def _changed(place: int, leaf: Any, kept: Any) -> ReplayError:
    return ReplayError(
        f"argument {place} of the stack is {text_of(leaf)}, and was {text_of(kept)} at capture: pass values that "
        f"change as a tensor of one shape, or in the view"
    )


def other_object(place: int, kept: Any) -> str:
    """Return the error text for an argument that a graph cannot use because each step makes it anew."""
    return (
        f"argument {place} of the stack, of type {type(kept).__name__}, is another object than at capture, whose "
        f"memory graphs read: pass its tensors as separate arguments, or read it in a break"
    )


def slots_of(view: Inputs) -> dict[int, str]:
    """Return the names of a view's slots, by the identity of its tensors."""
    return {id(value): name for name, value in view.__dict__.items() if isinstance(value, torch.Tensor)}


class StackRoute(Route[V]):
    """A step whose stack replays the graphs of a bucket instead of running its code."""

    captured: Captured

    def __init__(
        self,
        graphs: GraphSet[V],
        stack: Stack,
        captured: Captured,
        viewer: Viewer[V],
        counts: Counts,
        rows: Axis | None,
    ) -> None:
        """Take a bucket's graphs. rows: The axis that the rows of outputs follow, or None if they are whole."""
        super().__init__(captured.filling, viewer, counts, captured)
        self._graphs = graphs
        self._stack = stack
        self._output_rows = rows
        varying = graphs.stage.declaration.varying
        self._requests = varying.index(BATCH) if BATCH in varying else 0

    def run(self, view: V | None, live: Live) -> Any:
        """Run the step on its view, and return outputs for live rows."""
        if GRADIENTS():
            return without_gradients(self.run, view, live)
        hosts = self.filler.hosts
        step = CurrentStep(view, "replay")  # type: ignore[arg-type] # this route has a view
        token = CURRENT.set(weakref.ref(step))  # the step ends with this call, even if an interrupt comes
        try:
            outputs = self._stack.run(self._graphs.stage, view, functools.partial(self._answer, step))
            if hosts.notes:
                hosts.note()
            outputs = self._cut(outputs, step.calls, live)
        except BaseException:  # the step may have written slots
            self.filler.buffers.distrust()
            raise
        finally:
            CURRENT.reset(token)
        self.counts.replayed(live[-1])
        return outputs

    def _cut(self, outputs: Any, calls: int, live: Live) -> Any:
        """Return the live rows of outputs. Raise ReplayError for a wrong row count or number of calls of the stack."""
        if calls != 1:
            raise ReplayError(f"{self._stack.wrong_calls(calls)}, and once at capture")
        if self._output_rows is None:
            return outputs
        if self._output_rows == BATCH:
            rows = live[self._requests]
            kept = None
            each = "request"
        else:
            rows = self.filling.bucket.sizes[TOKENS]
            kept = live[-1]
            each = "padded token"
        if type(outputs) is torch.Tensor and outputs.dim() and outputs.shape[0] == rows:
            return outputs if kept is None else outputs[:kept]
        return cut_rows(outputs, rows, each, kept, ReplayError)

    @untraced  # the step around it may be compiled
    def _answer(self, step: CurrentStep, *args: Any, **kwargs: Any) -> Any:
        """Replay the graphs of a step's stack on its arguments."""
        graphs = self._graphs
        captured = self.captured
        call: StackCall = captured.step  # type: ignore[assignment] # made by `capture_stack`
        step.calls += 1
        call.take(args, kwargs, step)
        clock = graphs.clock
        if graphs.filler.stream() != clock.stream:  # the code around the stack may have changed the stream
            graphs.filler.order()
        before = clock.replays
        graphs.replay(captured)
        outputs = captured.graph.outputs
        # a new tensor, because a caller might reshape the graph's own
        outputs = outputs.detach() if type(outputs) is torch.Tensor else cut_live(outputs, None)
        outputs = graphs.stamped(outputs)
        if clock.replays != before + 1:
            raise ReplayError(
                "a break of this step replayed a graph of the same memory pool, which may overwrite what this step's "
                "later graphs read: run that runner before or after this one's step, or eagerly within the break"
            )
        for place, kept in call.written:  # copy written arguments back to the step's own tensors
            leaf = step.arguments[place]
            if leaf.data_ptr() != kept.data_ptr():
                leaf.copy_(kept)
        return hand_out(outputs, step) if call.hands_out else outputs
