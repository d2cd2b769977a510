"""The step under way: which view its eager parts see, and what stands for what in them."""

import contextvars
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

import attrs

from ..backends.base import Backend
from ..dataflow.inputs import Inputs

T = TypeVar("T")
RUNNING: Final[contextvars.ContextVar["weakref.ref[Running] | None"]] = contextvars.ContextVar(
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
    reference = RUNNING.get()
    return None if reference is None else reference()


def under_way(step: Running, function: Callable[..., T], *args: Any) -> T:
    """Call a function while a step runs. An interrupt leaves no step behind: only this call holds it."""
    token = RUNNING.set(weakref.ref(step))
    try:
        return function(*args)
    finally:
        RUNNING.reset(token)
