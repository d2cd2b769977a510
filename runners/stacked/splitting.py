"""Splitting: a step traced whole by torch.compile, and cut at named operators, which run between the graphs.

The tracer sees every operator without a change to the model, refuses what it cannot follow instead of leaving it out,
and serves all sizes of tokens with one trace. What it hands over is a torch.fx graph; torch's own split_module cuts
that into modules, of which those with a named operator become breaks.
"""

import re
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from ...dataflow.errors import CaptureError
from ..config import is_collection, refuse
from ..outputs import map_tensors
from .replay import broken

Operator = str | Callable[..., Any]
_PLACE: Final = re.compile(r'File "([^"]+)", line (\d+)')
_OWN: Final = str(Path(__file__).parents[1])
_SHOWN: Final = 12
"""Operators that an error lists."""


class Splitter:
    """Cuts a step at operators: "namespace::operator" as in `torch.ops`, a python function's name, or either itself."""

    def __init__(self, operators: Collection[Operator]) -> None:
        if not is_collection(operators) or not operators:
            refuse("splits", "names of the operators to cut at, at least one, in a list or tuple", operators)
        self.names = frozenset(_name_of(operator) for operator in operators)
        self._compiled: Callable[..., Any] | None = None
        self._runs: list[tuple[fx.GraphModule, tuple[Any, ...], Sequence[Any]]] = []

    def __call__(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
        """The parts of `run`, always the same function, on these arguments, as a call that gives what it gives.

        Runs it once. CaptureError where it cannot be traced whole, or calls none of the operators.
        """
        if self._compiled is None:
            self._compiled = self._compile(run)
        self._runs.clear()
        try:
            with warnings.catch_warnings(), _floats_are_values():
                warnings.simplefilter("ignore")  # the tracer's own remarks
                outputs = self._compiled(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            inner = getattr(error, "inner_exception", None)  # what the tracer makes of a refusal by `_cut`
            if isinstance(inner, CaptureError):
                raise inner from None
            raise CaptureError(f"the step could not be traced whole: {_told(error)}") from error
        if not self._runs:
            raise CaptureError("the step could not be traced: it calls no operator of torch")
        module, given, returned = self._runs[-1]
        known = {id(value): place for place, value in enumerate(returned)}

        def call() -> Any:
            made = _several(module(*given))
            return map_tensors(outputs, lambda tensor: made[known[id(tensor)]] if id(tensor) in known else tensor)

        return call

    def _compile(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def entry(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        # The tracer keeps what it learned by code object: one of its own for each step.
        own = types.FunctionType(entry.__code__.replace(), entry.__globals__, "entry", None, entry.__closure__)
        compiled: Callable[..., Any] = torch.compile(own, backend=self._receive, fullgraph=True, dynamic=True)
        return compiled

    def _receive(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """What torch.compile hands over, cut."""
        cut = self._cut(module)

        def run(*given: Any) -> Any:
            outputs = cut(*given)
            self._runs.append((cut, given, _several(outputs)))
            return outputs

        return run

    def _cut(self, module: fx.GraphModule) -> fx.GraphModule:
        parts: dict[fx.Node, int] = {}
        breaks: dict[int, str] = {}
        at, seen = 0, []
        for node in module.graph.nodes:
            if node.op in {"placeholder", "output"}:
                continue
            name = operator_name(node.target) if node.op == "call_function" else str(node.target)
            seen.append(name)
            if name in self.names:
                parts[node], breaks[at + 1] = at + 1, name
                at += 2
            else:
                parts[node] = at
        if not breaks:
            raise CaptureError(
                f"splits names {_listed(self.names)}, and the step calls none of them, but {_listed(seen)}"
            )
        from torch.fx.passes.split_module import split_module  # noqa: PLC0415 - a tenth of the package's own import

        cut = split_module(module, None, parts.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
        for number, name in breaks.items():
            part = getattr(cut, f"submod_{number}")
            _ = part.code  # has torch make its forward, which it puts off
            part.forward = broken(name, part.forward)
        return cut


def _several(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, list | tuple) else (outputs,)


def _floats_are_values() -> Any:
    """Have the tracer take floats as they are: as tensors, which it makes of them, the host would read them back."""
    import torch._dynamo  # noqa: PLC0415 - it takes a second, which whoever cuts nothing need not wait

    return torch._dynamo.config.patch(specialize_float=True)  # noqa: SLF001 - where torch documents it


def _name_of(operator: Operator) -> str:
    if isinstance(operator, str):
        return operator
    if not callable(operator):
        refuse("splits", "an operator's name, or the operator", operator)
    name = getattr(operator, "_qualname", None)  # of a custom operator
    return name if isinstance(name, str) else operator_name(operator)


def operator_name(target: Any) -> str:
    """An operator's name, "namespace::operator"; of a function in Python its own."""
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - no public name
        return str(target._schema.name).split(".")[0]  # noqa: SLF001 - likewise
    if isinstance(target, torch._ops.OpOverloadPacket):  # noqa: SLF001 - likewise
        return target._qualified_op_name  # noqa: SLF001 - likewise
    return str(getattr(target, "__name__", target))


def _listed(names: Collection[str]) -> str:
    different = sorted(set(names))
    more = len(different) - _SHOWN
    return (", ".join(different[:_SHOWN]) or "no operator of torch") + (f" and {more} more" if more > 0 else "")


def _told(error: BaseException) -> str:
    """What the tracer could not follow, where, and what to do about it if that is known."""
    cause = error
    while cause.__cause__ is not None and type(cause.__cause__).__name__.startswith("Observed"):
        cause = cause.__cause__  # what the step's own code raised while it was traced
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines[:3])}"
    places = [f"{file}, line {line}" for file, line in _PLACE.findall(str(error)) if not file.startswith(_OWN)]
    if places:
        text += f" (in {places[-1]})"
    if "ContextVar" in text:
        text += (
            "; what asks for the step that runs, as graph_break and current_view do, belongs in an operator of splits"
        )
    return text
