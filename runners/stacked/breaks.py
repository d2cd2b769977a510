"""Breaks: functions that a captured step calls between its graphs, on what is live then."""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch.utils import _pytree as pytree

from ...dataflow.errors import CaptureError, ReplayError, SlotGraphError
from ..running import Running, running

VALUES: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, enum.Enum)
"""What a graph takes in as a value; any other object is handed on to breaks, each step's own."""
P = ParamSpec("P")
R = TypeVar("R")


def graph_break(body: Callable[P, R]) -> Callable[P, R]:
    """Mark a function at which a capture ends one graph, to begin the next one after it.

    In each step it is called as it is, without gradients: it may read the host, and take any shape. Its tensor
    arguments have the addresses of the capture and the contents of the step. What the captured part was given (the
    view, a slot over requests, metadata) is replaced by this step's. Its results must have the shapes and dtypes that
    they had at capture; they are copied to where later graphs read them. Elsewhere it is an ordinary function.

    A decorator and no context manager, because a replay calls the body again, and of a `with` block there is nothing
    to call.
    """
    return functools.wraps(body)(broken(str(getattr(body, "__qualname__", body)), body))


def broken(name: str, body: Callable[P, R]) -> Callable[P, R]:
    """The same under a name of its own."""

    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        step = running()
        if step is None:
            return body(*args, **kwargs)
        one = Break(name, body, args, kwargs)
        result: R = one.call(step) if step.backend is None or step.inside else step.backend.interrupt(one)
        return result

    return marked


class Break:
    """One call of a function between two graphs, with the arguments of its capture."""

    def __init__(self, name: str, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._body = body
        self._leaves, self._arguments = pytree.tree_flatten((args, dict(kwargs)))
        self._fixed: tuple[Any, Any] = (args, kwargs)
        self._changing: list[tuple[int, int]] | None = None
        self._answered: Any = None

    def __call__(self, places: Sequence[Any] | None) -> Any:
        """Call it in the step that runs: for its answer, or to write that into the places which later graphs read.

        Raises ReplayError where no step runs, and where the answer is not of the kind that it was.
        """
        step = running()
        if step is None:
            message = f"break {self._name!r} needs a step: replay through the runner, not the graph"
            raise ReplayError(message)
        answer = self.call(step)
        if places is None:
            self._answered = self._structure_of(answer)
            self._borrow(step)
        elif len(places) == 1 and type(answer) is torch.Tensor:
            _move(self._name, 0, answer, places[0])
        else:
            self._move_all(answer, places)
        return answer

    def _structure_of(self, answer: Any) -> Any:
        """The structure of an answer. CaptureError where it holds what no graph can be handed."""
        leaves, structure = pytree.tree_flatten(answer)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *VALUES)):
                message = (
                    f"break {self._name!r} returned {type(leaf).__name__}, of which graphs cannot be handed each "
                    "step's own: return tensors, or tuples, lists and dicts of them"
                )
                raise CaptureError(message)
        return structure

    def _borrow(self, step: Running) -> None:
        """Hold what later graphs may use again only as memory."""
        if step.backend is not None:
            leaves, borrow = self._leaves, step.backend.borrow
            self._leaves = [borrow(one) if isinstance(one, torch.Tensor) else one for one in leaves]
            self._fixed = pytree.tree_unflatten(self._leaves, self._arguments)

    def call(self, step: Running) -> Any:
        """Call the function on what is live in a step. What it raises in a capture or a replay is named after it."""
        args, kwargs = self._live(step.now)
        if step.inside is not None:
            message = (
                f"break {self._name!r} is called inside break {step.inside!r}, which runs eagerly as a whole already: "
                "leave out the inner mark"
            )
            raise CaptureError(message)
        step.inside = self._name
        try:
            if not torch.is_grad_enabled():
                return self._body(*args, **kwargs)
            with torch.no_grad():
                return self._body(*args, **kwargs)
        except SlotGraphError:
            raise
        except Exception as error:
            if step.phase == "eager":
                raise
            message = f"break {self._name!r} raised {type(error).__name__}: {error}"
            raise (CaptureError if step.phase == "capture" else ReplayError)(message) from error
        finally:
            step.inside = None

    def _live(self, now: Mapping[int, Any]) -> Any:
        """The arguments, with what a step has in the place of what the capture was given."""
        if self._changing is None:  # in each step the same ones
            self._changing = [(place, id(leaf)) for place, leaf in enumerate(self._leaves) if id(leaf) in now]
        if not self._changing:
            return self._fixed
        leaves = list(self._leaves)
        for place, key in self._changing:
            leaves[place] = now[key]
        return pytree.tree_unflatten(leaves, self._arguments)

    def _move_all(self, answer: Any, places: Sequence[Any]) -> None:
        leaves, structure = pytree.tree_flatten(answer)
        if structure != self._answered:
            message = f"break {self._name!r} returned another structure than at capture"
            raise ReplayError(message)
        for number, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
            _move(self._name, number, leaf, place)


def _move(name: str, number: int, leaf: Any, place: Any) -> None:
    """Copy a tensor to where later graphs read it; anything else must be what it was."""
    if isinstance(place, torch.Tensor):
        if not isinstance(leaf, torch.Tensor) or leaf.shape != place.shape or leaf.dtype != place.dtype:
            message = f"break {name!r}: result {number} is {_text(leaf)}, and was {_text(place)} at capture"
            raise ReplayError(message)
        place.copy_(leaf)
    elif isinstance(leaf, torch.Tensor) or (leaf is not place and bool(leaf != place)):
        message = (
            f"break {name!r}: result {number} is {_text(leaf)}, and the graphs after it were captured with {place!r}: "
            "return what changes as a tensor"
        )
        raise ReplayError(message)


def _text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)} on {value.device}"
