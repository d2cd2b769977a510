"""The current step of a thread. A runner runs one step at a time, and torch.compile traces none of them."""

import contextvars
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, Protocol, SupportsIndex, TypeVar

import attrs
import torch

from ...backends.base import Interruption
from ...dataflow.errors import ReplayError
from ...dataflow.inputs import Inputs, V

_FRAMES: Final[Any] = torch._C._dynamo.eval_frame  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
"""What `torch.compiler.disable` uses, which would import the compiler."""
ClassT = TypeVar("ClassT", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Mark a function as `torch.compiler.disable` does, but without its cost in each call."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks such
    skip = _FRAMES._FrameAction.SKIP  # noqa: SLF001 - no public name
    _FRAMES.set_code_exec_strategy(function.__code__, _FRAMES._FrameExecStrategy(skip, skip))  # noqa: SLF001
    return function


def opaque(kind: ClassT) -> ClassT:
    """Mark a class's public methods so that compiled functions call them untraced."""
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
            untraced(method)
    return kind


class Unique:
    """Refuses `copy.copy`, `copy.deepcopy` and pickle: a copy would use the same buffers, graphs and counters."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise ReplayError."""
        del protocol
        name = type(self).__name__
        raise ReplayError(
            f"a {name} cannot be copied or pickled: the copy would share its memory, and each would overwrite what the "
            f"other has filled; make another {name}"
        )


class StepLock:
    """Lets one step or capture in at a time.

    Meanwhile it refuses every other call: from another thread, or from the step itself.

    Attributes:
        lock: The lock that a step takes, after a check that it is free. It is a C lock: no signal leaves it taken.
    """

    __slots__ = ("_runner", "lock")

    def __init__(self, runner: str) -> None:
        self._runner = runner
        self.lock = threading.Lock()

    def open(self) -> threading.Lock:
        """Return the lock, to enter by. Raise ReplayError if it is taken."""
        if self.lock.locked():
            raise self.refusal()
        return self.lock

    def refusal(self) -> ReplayError:
        """Return the error for a call while another step runs."""
        return ReplayError(
            f"this {self._runner} is in the middle of a step or a capture: another thread runs it, or its own step "
            "calls it; give each thread a runner of its own, or take turns by a lock of yours"
        )


T = TypeVar("T")
CURRENT: Final[contextvars.ContextVar["weakref.ref[CurrentStep] | None"]] = contextvars.ContextVar(
    "slotgraph_running", default=None
)
RunPhase = Literal["capture", "replay", "eager"]
OwnValue = Callable[["CurrentStep"], Any]
"""Returns the running step's object in place of an argument object of the capture."""
NO_SOURCES: Final[Mapping[int, OwnValue]] = {}


class Interrupts(Protocol):
    """Calls breaks between two graphs. A backend does it at capture, and a rehearsal before that."""

    def interrupt(self, run: Interruption, /) -> Any:
        """Call a function between two graphs, and return its results in memory that graphs read."""

    def borrow(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Return an alias of a tensor whose memory later graphs may reuse."""
        ...


@attrs.define(eq=False)
class CurrentStep:
    """The state of a running step.

    Attributes:
        view: The view of its eager parts: token slots padded, request slots cut to the live requests, and all fields.
        phase: Whether it runs eagerly, for a rehearsal, for a capture, or as a replay.
        arguments: The arguments of the captured part, flat.
        sources: By identity of an argument object at capture, the function that returns this step's object.
        backend: Calls breaks between graphs, or None if nothing is recorded.
        shown: The view that code inside of graphs gets.
        inside: The running break.
        operator: The running operator of a watched graph.
        calls: The number of calls of the stack so far, in a replay.
    """

    view: Inputs
    phase: RunPhase = "eager"
    arguments: Sequence[Any] = ()
    sources: Mapping[int, OwnValue] = NO_SOURCES
    backend: Interrupts | None = None
    shown: Inputs | None = None
    inside: str | None = None
    operator: str | None = None
    calls: int = 0


@untraced  # a compiled trace would keep the step of its first run
def current_step() -> CurrentStep | None:
    """Return the step that this thread runs, or None."""
    reference = CURRENT.get()
    return None if reference is None else reference()


class _Shown:
    """Refuses assignments to a runner's view, except by the step, because a graph keeps reading the slots' memory."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Skip the checks of declarations: the slots are those of the base."""

    @classmethod
    def _declared(cls) -> type:
        """Return the declaration itself, which copies are instances of."""
        return cls.__bases__[1]

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise ReplayError unless a step runs.

        `view.ids += 1` writes the slot in place and then assigns the same tensor, which is allowed.
        """
        values = vars(self)
        is_view = values.get("_slotgraph_view") is not None
        is_outside = is_view and not torch.compiler.is_compiling() and current_step() is None
        if is_outside and values.get(name) is not value:
            instead = f"write into its memory, view.{name}.copy_(value), before the replay"
            if not isinstance(values.get(name), torch.Tensor):
                instead = "give it in the batch, or declare it as a slot"
            raise ReplayError(f"view.{name} was assigned, which no graph would see: {instead}")
        object.__setattr__(self, name, value)


_SHOWN: Final = "_slotgraph_shown"


def shown_class(inputs: type[V]) -> type[V]:
    """Return the class of a runner's views of a declaration, cached. Only views get its checks of assignments."""
    made: Any = vars(inputs).get(_SHOWN)
    if made is None:
        body = {"__module__": inputs.__module__, "__qualname__": inputs.__qualname__, "__doc__": inputs.__doc__}
        kind: Any = type(inputs)
        made = kind(inputs.__name__, (_Shown, inputs), body)
        setattr(inputs, _SHOWN, made)
    shown: type[V] = made
    return shown


def with_current(step: CurrentStep, function: Callable[..., T], *args: Any) -> T:
    """Call a function while a step is current. The step ends with the call, even if an interrupt comes."""
    token = CURRENT.set(weakref.ref(step))
    try:
        return function(*args)
    finally:
        CURRENT.reset(token)
