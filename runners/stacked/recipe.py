"""Captures the stack of a step: finds its arguments in a rehearsal, and splits it at named operators."""

import contextvars
import functools
import re
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from ...dataflow.axes import BATCH, Axis, Live, Step
from ...dataflow.buffers import Buffers
from ...dataflow.computation import initial_value, write
from ...dataflow.errors import CaptureError
from ...dataflow.fill.bucket import Bucket
from ...dataflow.guard import outside_inference
from ...dataflow.inputs import V
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.plan import Absent
from ...dataflow.tails import holds
from ...dataflow.views import Aliases, Viewer, Views, carried
from ..engine.capture import capture_errors
from ..engine.config import is_collection, refuse
from ..engine.current import CurrentStep, current_step, with_current
from ..engine.graphs import Around, Filling, Look
from ..engine.outputs import cut_rows, map_tensors
from ..engine.stage import Stage
from ..engine.state import State
from .breaks import broken
from .rehearsal import Rehearsal, operator_name
from .stack import Stack, StackCall

Operator = str | Callable[..., Any]
_PLACE: Final = re.compile(r'File "([^"]+)", line (\d+)')
_OWN: Final = str(Path(__file__).parents[1])


def fill_placeholder(
    stage: Stage[Any], buffers: Buffers, step: Step, absent: Absent, frozen: Mapping[str, Any]
) -> dict[str, Any]:
    """Fill a bucket from the declaration's placeholder, or from slots' pad values, and return the placeholder's fields.

    Raise CaptureError if the placeholder names an unknown slot, and ComputeError if a value does not fit.
    """
    declaration = stage.declaration
    capabilities = stage.backend.capabilities
    request = Step({BATCH: 1, **step.live_sizes}, {BATCH: 1, **step.padded_sizes})  # even if no slot has the axis
    made = stage.inputs.placeholder(request)
    if not isinstance(made, Mapping):
        what = f"{declaration.name}.placeholder() returned {type(made).__name__}"
        raise CaptureError(f"{what}: return a mapping of slots and fields to values")
    values = {**declaration.by_slot(made), **frozen}
    for name in values.keys() - {*declaration.sources, *declaration.fields, *declaration.disabled}:
        raise CaptureError(
            f"{declaration.name}.placeholder() names {name!r}, which is neither a copied slot nor a field"
        )
    given = dict[str, torch.Tensor]()
    for buffer in [buffers[name] for name in declaration.sources if name not in absent]:
        name = buffer.name
        slot = buffer.slot
        given[name] = target = torch.empty_like(buffer.view(step.live_sizes))
        first = values[name] if name in values else initial_value(name, slot, buffers.capacity, capabilities)
        if isinstance(first, bool | int | float) and holds(target.dtype, first):
            target.fill_(first)
        else:
            write(target, first, f"slot {name!r}: its placeholder")
    declaration.check_fields(values)
    buffers.distrust()
    fill_slot_by_slot(declaration, buffers, capabilities, step, values, given=given)
    return carried(declaration.fields, values)


def live_viewer(stage: Stage[V], bucket: Bucket, **info: Any) -> Viewer[V]:
    """Return the maker of views of a bucket, with request slots cut to the live requests and all others padded.

    info: Further values of `ViewInfo`.
    """
    slots = stage.declaration.slots
    varying = stage.declaration.varying
    requests = varying.index(BATCH) if BATCH in varying else None
    over_requests = [name for name, slot in slots.items() if BATCH in slot.axes and bucket.views[name] is not None]

    def views_of(live: Live) -> Views:
        if requests is None:
            return bucket.views
        shown = [*bucket.padded]
        shown[requests] = live[requests]
        with outside_inference():
            cut = {name: bucket.rows[name].cut(bucket.buffers[name].tensor, tuple(shown)) for name in over_requests}
        return {**bucket.views, **cut}

    @functools.lru_cache(1)
    def aliases(live: Live) -> Aliases:
        return Aliases(views_of(live))

    def step_of(live: Live) -> Step:
        step = bucket.step(live)
        return step if requests is None else Step(step.live_sizes, {**step.padded_sizes, BATCH: live[requests]})

    return stage.viewer(bucket, lambda live: aliases(live)(), step_of, **info)


def capture_stack(
    stage: Stage[V],
    buffers: Buffers,
    stack: Stack,
    filling: Filling,
    look: Look,
    *,
    splitter: "Splitter | None",
    output_rows: Axis | None,
) -> tuple[StackCall, Around, State]:
    """Run the step on the declaration's placeholder, and return the call of its stack, with fixed arguments.

    splitter: Marks the breaks of the stack, if its code does not. Raise CaptureError if the step cannot be captured so.
    """
    bucket = filling.bucket
    code = stack.code(stage)
    sizes = {**bucket.sizes, BATCH: 1}
    live = tuple(sizes[axis] for axis in stage.declaration.varying)
    calls = list[tuple[Any, Any]]()
    outputs = None
    with capture_errors(), stage.backend.stream(), torch.no_grad():
        step = stage.declaration.step(live, bucket.sizes)
        fields = fill_placeholder(stage, buffers, step, bucket.absent, bucket.frozen)
        view = live_viewer(stage, bucket, placeholder=True)(fields, live)
        shown = live_viewer(stage, bucket, **stage.capture_info)(None, live)  # the view for graphs

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return code(*args, **kwargs)

        def whole() -> None:
            nonlocal outputs
            calls.clear()
            outputs = with_current(CurrentStep(view, "capture"), stack.run, stage, view, noted)
            if len(calls) != 1:
                raise CaptureError(f"{stack.wrong_calls(len(calls))}: it is captured for one call a step")

        state = look(whole)
        with state.kept():
            names = frozenset[str]() if splitter is None else splitter.names
            make = functools.partial(StackCall, stage.backend, code, own=view, view=shown, holds=buffers.holds)
            rehearsal = Rehearsal(stage, stack, buffers, names, make)
            try:
                call = rehearsal.run(view, calls[0])
            except CaptureError as error:
                if not names:
                    raise
                raise CaptureError(f"{error} (splits names {', '.join(sorted(names))})") from error
            around = functools.partial(rehearsal.around, view)
            if splitter is not None:
                parts = around(functools.partial(with_current, call.at_capture(), splitter, code, *call.arguments()))
                call.run = lambda *_, **__: parts()  # the traced parts already have their arguments
        if output_rows is not None:
            each = "request of the placeholder" if output_rows == BATCH else "padded token"
            cut_rows(outputs, sizes[output_rows], each)
    buffers.distrust()
    return call, around, state


Traced = tuple[fx.GraphModule, tuple[Any, ...], Sequence[Any]]
"""What the tracer made of a step, its arguments, and its result."""
_TRACED: Final[contextvars.ContextVar[list[Traced]]] = contextvars.ContextVar("slotgraph_traced")


class Splitter:
    """Traces a whole step by torch.compile, for all sizes of tokens, and turns the named operators into breaks.

    Args:
        operators: "namespace::operator" as in `torch.ops`, a Python function's name, or the operator or function
            itself.
    """

    def __init__(self, operators: Collection[Operator]) -> None:
        known = is_collection(operators) and all(isinstance(one, str) or callable(one) for one in operators)
        if not (known and len(operators)):
            refuse("splits", "names of the operators to cut at, at least one, in a list or tuple", operators)
        self.names = frozenset(one if isinstance(one, str) else operator_name(one) for one in operators)
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
        """Run the step once, and return a call of its parts on these arguments.

        Raise CaptureError if it cannot be traced whole.
        """
        if self._compiled is None:
            self._compiled = self._compile(run)
        traced = list[Traced]()
        token = _TRACED.set(traced)
        try:
            import torch._dynamo  # noqa: PLC0415 - it takes a second, which runners without splits save

            # keep floats constant: the tracer would make them tensors, which the host would read back
            values = torch._dynamo.config.patch(specialize_float=True)  # noqa: SLF001 - torch documents it by this name
            with warnings.catch_warnings(), values:
                warnings.simplefilter("ignore")  # warnings of the tracer itself
                outputs = self._compiled(*args, **kwargs)
        except Exception as error:
            inner = getattr(error, "inner_exception", error)  # unwrap errors of `cut`
            if isinstance(inner, CaptureError):
                raise inner from None
            raise CaptureError(f"the step could not be traced whole: {_reason(error)}") from error
        finally:
            _TRACED.reset(token)
        if not traced:
            raise CaptureError("the step could not be traced: it calls no operator of torch")
        module, given, returned = traced[-1]
        known = {id(value): place for place, value in enumerate(returned)}

        def call() -> Any:
            made = module(*given)
            return map_tensors(outputs, lambda tensor: made[known[id(tensor)]] if id(tensor) in known else tensor)

        return call

    def _compile(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def entry(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        # The tracer caches by code object and in the function's globals, so each step gets a copy of both.
        own = types.FunctionType(entry.__code__.replace(), dict(globals()), "entry", None, entry.__closure__)
        compiled: Callable[..., Any] = torch.compile(own, backend=_cutter(self.names), fullgraph=True, dynamic=True)
        return compiled


@functools.cache
def _cutter(names: frozenset[str]) -> Callable[..., Any]:
    """Make a backend for torch.compile that splits what it traced.

    torch keeps each backend for ever, so it must refer to no step.
    """

    def cut(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        seen = set[str]()
        for node in module.graph.nodes:
            if node.op in {"call_function", "call_method"}:
                body = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
                name = operator_name(body)
                seen.add(name)
                if name in names:
                    node.op = "call_function"
                    node.target = broken(name, body)
        if not seen & names:
            named = ", ".join(sorted(names))
            called = ", ".join(sorted(seen)) or "no operator of torch"
            raise CaptureError(f"splits names {named}, and the step calls none of them, but {called}")
        module.recompile()

        def run(*given: Any) -> Any:
            outputs = module(*given)
            _TRACED.get().append((module, given, outputs))
            return outputs

        return run

    return cut


def _reason(error: BaseException) -> str:
    """Describe what the tracer could not follow, at which line, and what to do if that is known."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines[:3])}"
    for file, line in [one for one in _PLACE.findall(str(error)) if not one[0].startswith(_OWN)][-1:]:
        text += f" (in {file}, line {line})"
    if str(current_step) in text:
        text += (
            "; what asks for the step that runs, as graph_break and current_view do, belongs in an operator of splits"
        )
    return text
