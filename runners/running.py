"""The step under way: which view its eager parts see, and what stands for what in them."""

import contextvars
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

import attrs

from ..backends.base import Backend
from ..dataflow.errors import CaptureError, ReplayError
from ..dataflow.inputs import Inputs

V = TypeVar("V", bound=Inputs)
T = TypeVar("T")
_RUNNING: Final[contextvars.ContextVar["weakref.ref[Running] | None"]] = contextvars.ContextVar(
    "slotgraph_running", default=None
)
_NOTHING: Final[Mapping[int, Any]] = {}
Phase = Literal["capture", "replay", "eager"]


@attrs.define(eq=False)
class Running:
    """One step under way.

    view: what its eager parts see: token slots padded, request slots cut to the live requests, and all fields.
    phase: what it is run for. now: by identity of something that the captured step was given, what stands for it in
    this step. backend: what a break asks to be called between two graphs; None where nothing is being recorded.
    shown: what graphs see in the view's place while their code runs. inside: the break that is being run.
    operator: the operator that is being run in a graph that is looked at.
    """

    view: Inputs
    phase: Phase = "eager"
    now: Mapping[int, Any] = _NOTHING
    backend: Backend | None = None
    shown: Inputs | None = None
    inside: str | None = None
    operator: str | None = None


def running() -> Running | None:
    """The step that this thread runs."""
    reference = _RUNNING.get()
    return None if reference is None else reference()


def under_way(step: Running, function: Callable[..., T], *args: Any) -> T:
    """Call a function while a step runs. An interrupt leaves no step behind: only this call holds it."""
    token = _RUNNING.set(weakref.ref(step))
    try:
        return function(*args)
    finally:
        _RUNNING.reset(token)


def current_view(inputs: type[V]) -> V:
    """The view of the step that runs now, for code that is not handed it: an attention operator, a break's body.

    Slots over tokens have the bucket's rows, those over requests as many as the batch has.
    ReplayError where no step runs, or one of another declaration; CaptureError where an operator asks inside a graph,
    which would hold for the values of its capture.
    """
    step = running()
    if step is None:
        message = "no step is running: current_view() is for what a runner's step calls"
        raise ReplayError(message)
    if not isinstance(step.view, inputs):
        message = f"the running step's view is of {type(step.view).__name__}, not of {inputs.__name__}"
        raise ReplayError(message)
    if step.inside is not None:
        return step.view
    if step.operator is not None:
        message = (
            f"operator {step.operator} asks for the step's view inside of a graph, which would keep what it finds: run "
            "it between graphs, by splits= or graph_break, or hand it the slots that it reads"
        )
        raise CaptureError(message)
    return step.view if step.shown is None else step.shown  # type: ignore[return-value] # of the same declaration
