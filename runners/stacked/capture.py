"""Capturing the stack of a step: what of a bucket is captured, on which arguments, and what its graphs may not read."""

import functools
import re
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...backends.operators import OperatorWatch, compiled_eagerly, is_plain, run_under, tensors_in, written
from ...dataflow.axes import BATCH, Axis, Step
from ...dataflow.bucket import Absent
from ...dataflow.buffers import Buffers, span
from ...dataflow.computation import initial_value, write
from ...dataflow.errors import CaptureError
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.ready import Ready
from ...dataflow.tails import holds
from ...dataflow.views import Aliases, ViewInfo, carried, viewer
from ..capture import Filling, told_as_capture_error
from ..config import is_collection, refuse
from ..graphs import Look
from ..outputs import cut_rows, map_tensors
from ..running import Running, running, under_way
from ..stage import Stage, V
from ..state import State, reached
from .replay import VALUES, Stack, StackCall, broken, other_object, slots_of

T = TypeVar("T")
Operator = str | Callable[..., Any]
_PLACE: Final = re.compile(r'File "([^"]+)", line (\d+)')
_OWN: Final = str(Path(__file__).parents[1])
_LIVE: Final = "live"
_DEPTH: Final = 5
"""How far into an object tensors are looked for."""
_CLOSED: Final = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)
"""What is not looked into: it has the same tensors in each step."""
_FIXED: Final = frozenset({"device", "dtype", "layout", "ndim", "dim", "is_cuda", "is_cpu", "requires_grad"})
"""What may be asked of a slot over requests in a graph: it is the same in each step."""


def fill_placeholder(stage: Stage[Any], buffers: Buffers, step: Step, absent: Absent) -> dict[str, Any]:
    """Fill a bucket from the declaration's placeholder, or a slot's pad value; returns its fields: ComputeError."""
    declaration, capabilities = stage.declaration, stage.backend.capabilities
    request = Step({BATCH: 1, **step.live_sizes}, {BATCH: 1, **step.padded_sizes})  # also where no slot is over those
    values = dict(stage.inputs.placeholder(request))
    for name in values.keys() - {*declaration.sources, *declaration.fields, *declaration.disabled}:
        raise CaptureError(
            f"{declaration.name}.placeholder() names {name!r}, which is neither a copied slot nor a field"
        )
    given = dict[str, torch.Tensor]()
    for buffer in [buffers[name] for name in declaration.sources if name not in absent]:
        name, slot = buffer.name, buffer.slot
        given[name] = target = torch.empty_like(buffer.view(step.live_sizes))
        first = values[name] if name in values else initial_value(name, slot, buffers.capacity, capabilities)
        if isinstance(first, bool | int | float) and holds(target.dtype, first):
            target.fill_(first)
        else:
            write(target, first, f"slot {name!r}: its placeholder")
    fields = carried(declaration.fields, values)
    buffers.distrust()
    fill_slot_by_slot(declaration, buffers, capabilities, step, fields, given=given)
    return fields


def live_viewer(stage: Stage[V], buffers: Buffers, ready: Ready) -> Callable[[Any], V]:
    """A call that makes the view of a batch: request slots are cut to the live requests, every other axis is padded."""
    made: Callable[[Any], V] | None = ready.notes.get(_LIVE)
    if made is None:
        live = ready.step.live_sizes
        sizes = {axis: live[axis] if axis == BATCH else size for axis, size in ready.step.padded_sizes.items()}
        slots = stage.declaration.slots
        views = {
            name: view if view is None or name not in slots else buffers[name].view(sizes)
            for name, view in ready.views.items()
        }
        info = ViewInfo(Step(live, sizes), stage.relations, stage.declaration)
        made = ready.notes[_LIVE] = viewer(stage.views, Aliases(views), stage.declaration.fields, info)
    return made


def capture_stack(
    stage: Stage[V],
    buffers: Buffers,
    stack: Stack,
    filling: Filling,
    absent: Absent,
    look: Look,
    *,
    splitter: "Splitter | None",
    output_rows: Axis | None,
) -> tuple[StackCall, State]:
    """Run the step on the declaration's placeholder, and make a call of its stack, whose arguments stay in place.

    splitter: what marks the breaks of the stack, if not its code. CaptureError where the step cannot be captured so.
    """
    bucket, code = filling.bucket, stack.code(stage)
    sizes = {**bucket.sizes, BATCH: 1}
    live = tuple(sizes[axis] for axis in stage.declaration.varying)
    calls, outputs = list[tuple[Any, Any]](), None
    with told_as_capture_error(), stage.backend.stream(), torch.no_grad():
        fields = fill_placeholder(stage, buffers, stage.declaration.step(live, bucket.sizes), absent)
        make = live_viewer(stage, buffers, bucket.ready(live, absent))
        view, shown = make(fields), stage.sealed(make(None))

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return code(*args, **kwargs)

        def whole() -> None:
            nonlocal outputs
            calls.clear()
            outputs = under_way(Running(view, "capture"), stack.run, stage, view, noted)
            if len(calls) != 1:
                raise CaptureError(f"{stack.wrong_calls(len(calls))}: it is captured for one call a step")

        state = look(whole)
        call = StackCall(stage.backend, code, calls[0], view, shown, buffers.holds)
        with state.kept():
            _watch(call, stage, buffers, frozenset() if splitter is None else splitter.names)
            objects = [place for place in sorted(call.read) if not isinstance(call.leaves[place], torch.Tensor)]
            if objects and stack.module is not None:
                whole()
                again = pytree.tree_leaves(calls[0])
                for place in objects:
                    if again[place] is not call.leaves[place]:
                        raise CaptureError(other_object(place, call.leaves[place]))
            if splitter is not None:
                parts = under_way(call.at_capture(), splitter, code, *call.arguments())
                call.run = lambda *_, **__: parts()  # which hold their arguments already
        if output_rows is not None:
            each = "request of the placeholder" if output_rows == BATCH else "padded token"
            cut_rows(outputs, sizes[output_rows], each)
    buffers.distrust()
    return call, state


def _watch(call: StackCall, stage: Stage[Any], buffers: Buffers, breaks: frozenset[str]) -> None:
    """Run it under watch: what its graphs do with the arguments, and that none reads a slot over requests."""
    forbidden = {name: buffers[name].tensor for name, slot in stage.declaration.slots.items() if BATCH in slot.axes}
    named = {**slots_of(call.view), **slots_of(call.own)}
    fence = Fence({key: name for key, name in named.items() if name in forbidden}, breaks)
    slots = slots_of(call.view)  # of those a fill takes care, but for what is an argument itself
    known = (*VALUES, *_CLOSED)
    rest = [
        (place, one) for place, one in enumerate(call.leaves) if one is not call.view and not isinstance(one, known)
    ]
    given = [
        (place, one)
        for place, leaf in rest
        for *_, one in reached(leaf, _CLOSED, _DEPTH)
        if one is leaf or id(one) not in slots
    ]
    watch = ReadWatch(forbidden, given)
    args, kwargs = call.arguments()
    run = functools.partial(run_under, watch, lambda: call.run(*args, **kwargs))
    try:
        with compiled_eagerly():
            under_way(call.at_capture(), run_under, fence, run)
    except CaptureError as error:
        if not breaks:
            raise
        raise CaptureError(f"{error} (splits names {', '.join(sorted(breaks))})") from error
    call.read, call.written = watch.read, watch.written


class ReadWatch(OperatorWatch):
    """Looks at every operator outside of breaks: which places of `given` graphs read and write.

    forbidden: slots over requests, by name: a graph that reads one holds for one number of requests alone.
    """

    def __init__(self, forbidden: Mapping[str, torch.Tensor], given: Iterable[tuple[int, torch.Tensor]]) -> None:
        super().__init__()
        self.read, self.written = set[int](), set[int]()
        self._forbidden = [(*span(tensor), name) for name, tensor in forbidden.items() if tensor.numel()]
        self._given = [(*span(tensor), place) for place, tensor in given if tensor.numel()]

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what an operator reads and writes, and run it. CaptureError where no graph may read that."""
        step, name = running(), operator_name(operator)
        if step is None or step.inside is not None:
            return operator(*args, **kwargs)
        taken = tensors_in((args, kwargs))
        for slot in _at(taken, self._forbidden):
            raise CaptureError(_reads(name, slot))
        self.read.update(_at(taken, self._given))
        if is_plain(operator):
            self.written.update(_at(written(operator, args, kwargs), self._given))
        step.operator = name
        try:
            return operator(*args, **kwargs)
        finally:
            step.operator = None


def _at(tensors: Iterable[torch.Tensor], known: Sequence[tuple[int, int, T]]) -> Iterator[T]:
    """What lies where one of these tensors begins."""
    for address in [tensor.data_ptr() for tensor in tensors if tensor.numel()]:
        yield from (what for low, high, what in known if low <= address < high)


class Fence(TorchFunctionMode):
    """Looks at functions of torch outside of breaks: none may ask anything that changes of a slot over requests."""

    def __init__(self, slots: Mapping[int, str], breaks: frozenset[str]) -> None:
        super().__init__()
        self._slots = slots
        self._breaks = breaks

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, or raise CaptureError."""
        # of the getter of an attribute, the attribute's name
        name = operator_name(getattr(func, "__self__", func) if func.__name__ == "__get__" else func)
        step, given = running(), kwargs or {}
        if step is None or step.inside is not None or name in _FIXED:
            return func(*args, **given)
        if name in self._breaks:
            step.inside = name
            try:
                return func(*args, **given)
            finally:
                step.inside = None
        for leaf in pytree.tree_leaves((args, given)):
            if id(leaf) in self._slots:
                raise CaptureError(_reads(name, self._slots[id(leaf)]))
        return func(*args, **given)


def _reads(what: str, slot: str) -> str:
    return (
        f"{what} reads slot {slot!r}, whose rows are requests, outside of a break: its graph would hold for one number "
        f"of requests. Read it in a break, which gets each step's own rows when it is handed view.{slot} or the view"
    )


class Splitter:
    """Has a step traced whole by torch.compile, for all sizes of tokens, and makes breaks of the named operators.

    operators: "namespace::operator" as in `torch.ops`, a python function's name, or either itself.
    """

    def __init__(self, operators: Collection[Operator]) -> None:
        known = is_collection(operators) and all(isinstance(one, str) or callable(one) for one in operators)
        if not (known and len(operators)):
            refuse("splits", "names of the operators to cut at, at least one, in a list or tuple", operators)
        self.names = frozenset(one if isinstance(one, str) else operator_name(one) for one in operators)
        self._compiled: Callable[..., Any] | None = None
        self._runs: list[tuple[fx.GraphModule, tuple[Any, ...], Sequence[Any]]] = []

    def __call__(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
        """Run it once; its parts on these arguments, as a call. CaptureError where it cannot be traced whole."""
        if self._compiled is None:
            self._compiled = self._compile(run)
        self._runs.clear()
        try:
            import torch._dynamo  # noqa: PLC0415 - it takes a second, which a runner without splits need not wait

            # floats stay as they are: the host would read back the tensors which the tracer makes of them
            values = torch._dynamo.config.patch(specialize_float=True)  # noqa: SLF001 - where torch documents it
            with warnings.catch_warnings(), values:
                warnings.simplefilter("ignore")  # the tracer's own remarks
                outputs = self._compiled(*args, **kwargs)
        except Exception as error:
            inner = getattr(error, "inner_exception", error)  # what the tracer makes of a refusal by `_cut`
            if isinstance(inner, CaptureError):
                raise inner from None
            raise CaptureError(f"the step could not be traced whole: {_told(error)}") from error
        if not self._runs:
            raise CaptureError("the step could not be traced: it calls no operator of torch")
        module, given, returned = self._runs[-1]
        known = {id(value): place for place, value in enumerate(returned)}

        def call() -> Any:
            made = module(*given)
            return map_tensors(outputs, lambda tensor: made[known[id(tensor)]] if id(tensor) in known else tensor)

        return call

    def _compile(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def entry(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        # The tracer keeps what it learned by code object: one of its own for each step.
        own = types.FunctionType(entry.__code__.replace(), entry.__globals__, "entry", None, entry.__closure__)
        compiled: Callable[..., Any] = torch.compile(own, backend=self._cut, fullgraph=True, dynamic=True)
        return compiled

    def _cut(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """What torch.compile hands over, with breaks."""
        seen = set[str]()
        for node in module.graph.nodes:
            if node.op in {"call_function", "call_method"}:
                body = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
                name = operator_name(body)
                seen.add(name)
                if name in self.names:
                    node.op, node.target = "call_function", broken(name, body)
        if not seen & self.names:
            named, called = ", ".join(sorted(self.names)), ", ".join(sorted(seen)) or "no operator of torch"
            raise CaptureError(f"splits names {named}, and the step calls none of them, but {called}")
        module.recompile()

        def run(*given: Any) -> Any:
            outputs = module(*given)
            self._runs.append((module, given, outputs))
            return outputs

        return run


def operator_name(target: Any) -> str:
    """An operator's name, "namespace::operator"; of a function in Python its own."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):  # noqa: SLF001 - no public names
        return "::".join(str(target).split(".")[:2])
    return str(getattr(target, "_qualname", getattr(target, "__name__", target)))  # the first of a custom operator


def _told(error: BaseException) -> str:
    """What the tracer could not follow, where, and what to do about it if that is known."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines[:3])}"
    for file, line in [one for one in _PLACE.findall(str(error)) if not one[0].startswith(_OWN)][-1:]:
        text += f" (in {file}, line {line})"
    if "ContextVar" in text:
        text += (
            "; what asks for the step that runs, as graph_break and current_view do, belongs in an operator of splits"
        )
    return text
