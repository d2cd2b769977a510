"""Breaks: functions that run between the graphs of a stack, on each step's own values."""

import enum
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import attrs
import torch
from torch.utils import _pytree as pytree

from ...backends.operators import storage_key
from ...dataflow.errors import CaptureError, ReplayError, SlotGraphError
from ...dataflow.inputs import V
from ..engine.bits import text_of
from ..engine.current import CurrentStep, OwnValue, current_step

VALUES: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, enum.Enum)
"""Types that a graph keeps as values. Any other object is passed to breaks anew in each step."""
EAGER: Final[Sequence[Any]] = []
"""Passed as `places` to a break outside of graphs, where only the caller gets the result."""
_COPIED: Final = object()
"""Marks a result that is a tensor with memory of its own."""
FACTS: Final = operator.attrgetter("shape", "dtype")
P = ParamSpec("P")
R = TypeVar("R")


def current_view(inputs: type[V]) -> V:
    """Return the view of the running step, for code without access to it, such as an attention operator or a break.

    Slots over tokens have the bucket's rows, those over requests as many as the batch has.

    Raises:
        ReplayError: No step is running, or its declaration is another one.
        CaptureError: An operator inside of a graph calls it, and the graph would keep the values of the capture.
    """
    step = current_step()
    if step is None:
        raise ReplayError("no step is running: current_view() is for what a runner's step calls")
    if not isinstance(step.view, inputs):
        raise ReplayError(f"the running step's view is of {type(step.view).__name__}, not of {inputs.__name__}")
    if step.inside is not None:
        return step.view
    if step.operator is not None:
        raise CaptureError(
            f"operator {step.operator} asks for the step's view inside of a graph, which would keep the values of the "
            f"capture: run it between graphs, by splits= or graph_break, or pass it the slots that it reads"
        )
    return step.view if step.shown is None else step.shown  # type: ignore[return-value] # of the same declaration


def graph_break(body: Callable[P, R]) -> Callable[P, R]:
    """Mark a function at which a capture ends one graph and begins the next one.

    Each step calls it as it is, without gradients: it may read values on the host, and take any shape. Its tensor
    arguments have the addresses of the capture and the contents of the step. Arguments of the captured part that it
    gets (the view, a slot over requests, metadata) are those of the running step. Its results must have the shapes and
    dtypes that they had at capture. They are copied to memory that later graphs read, unless a result is an argument or
    a view of one. Outside of a stack it is an ordinary function.

    It is a decorator and no context manager, because a replay calls the body again, and a `with` block has nothing to
    call.
    """
    return functools.wraps(body)(broken(str(getattr(body, "__qualname__", body)), body))


def broken(name: str, body: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as `graph_break` does, with a given name for errors."""

    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        step = current_step()
        if step is None:
            return body(*args, **kwargs)
        one = Break(name, body, (args, kwargs), step.sources)
        if step.backend is None or step.inside:
            result: R = one(EAGER)
        else:
            result = one.result(step.backend.interrupt(one))
        return result

    return marked


@attrs.frozen
class Alias:
    """A result in the memory of an argument.

    Attributes:
        argument: The index of the argument.
        part: The part of it, or None for all of it.
    """

    argument: int
    part: Any

    @classmethod
    def of(cls, result: torch.Tensor, arguments: Sequence[Any]) -> "Alias | None":
        """Return the argument whose memory a result shares, or None if it shares none."""
        tensors = {place: one for place, one in enumerate(arguments) if isinstance(one, torch.Tensor)}
        shared = [place for place, one in tensors.items() if share_storage(one, result)]
        if not shared:
            return None
        nearest = max(shared, key=lambda place: tensors[place].data_ptr() == result.data_ptr())
        part, whole = (_part_of(one, tensors[nearest]) for one in (result, tensors[nearest]))
        return cls(nearest, None if part == whole else part)

    def is_kept(self, result: Any, argument: torch.Tensor) -> bool:
        """Return whether the result of a later call is the same part of the argument."""
        part = self.part or _part_of(argument, argument)
        return isinstance(result, torch.Tensor) and _part_of(result, argument) == part


def _part_of(part: torch.Tensor, whole: torch.Tensor) -> tuple[Any, ...]:
    return part.data_ptr() - whole.data_ptr(), part.shape, part.dtype, part.stride()


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are parts of one allocation."""
    is_plain = one.layout is other.layout is torch.strided and not (one.is_nested or other.is_nested)
    return is_plain and storage_key(one) == storage_key(other)


@attrs.define(eq=False, slots=False)
class Break:
    """One call of a function between two graphs, which each replay repeats.

    Attributes:
        name: Its name in errors.
        leaves: Its arguments at capture, flat.
        sources: By index, functions that return the current step's argument, for arguments that differ by step.
        aliases: Results that share memory with arguments, until `result` has returned them.
    """

    name: str
    _body: Callable[..., Any]
    _fixed: Any  # the arguments of the capture
    _given: Mapping[int, OwnValue]
    aliases: list[torch.Tensor] = attrs.field(factory=list)
    _results: list[Any] = attrs.field(factory=list)  # for each leaf of the result, a constant, an `Alias`, or `_COPIED`
    _structure: Any = None
    _is_one_tensor: bool = False

    def __attrs_post_init__(self) -> None:
        """Find the arguments that differ by step."""
        self.leaves, self._arguments = pytree.tree_flatten(self._fixed)
        own = {place: self._given.get(id(leaf)) for place, leaf in enumerate(self.leaves)}
        self.sources = {place: source for place, source in own.items() if source is not None}

    def replace(self, leaves: list[Any]) -> None:
        """Replace the arguments of the capture by other tensors in the same memory."""
        self.leaves = leaves
        self._fixed = pytree.tree_unflatten(leaves, self._arguments)

    def __call__(self, places: Sequence[torch.Tensor] | None) -> Any:
        """Call the function in the running step, and write its results to the tensors that later graphs read.

        Args:
            places: These tensors. None at capture, before they are allocated, and `EAGER` outside of graphs.

        Returns:
            At capture, the results for which tensors must be allocated. Otherwise all results.
        """
        step = current_step()
        if step is None:
            raise ReplayError(f"break {self.name!r} needs a step: replay through the runner, not the graph")
        if step.inside is not None:
            raise CaptureError(
                f"break {self.name!r} is called inside break {step.inside!r}, all of which runs eagerly: remove the "
                f"inner mark"
            )
        leaves = self.leaves
        args, kwargs = self._fixed
        if self.sources:
            leaves = list(leaves)
            for place, source in self.sources.items():
                leaves[place] = source(step)
            args, kwargs = pytree.tree_unflatten(leaves, self._arguments)
        step.inside = self.name
        try:
            answer = self._body(*args, **kwargs)
            if places is None:
                return self._keep(answer, leaves, step)
        except Exception as error:
            if step.phase == "eager" or isinstance(error, SlotGraphError):
                raise
            raise (CaptureError if step.phase == "capture" else ReplayError)(
                f"break {self.name!r} raised {type(error).__name__}: {error}"
            ) from error
        finally:
            step.inside = None
        if self._is_one_tensor and type(answer) is torch.Tensor and FACTS(answer) == FACTS(places[0]):
            places[0].copy_(answer)
        elif places is not EAGER:
            self._move(answer, leaves, places)
        return answer

    def _keep(self, answer: Any, leaves: Sequence[Any], step: CurrentStep) -> list[torch.Tensor]:
        """Record the structure of the results, and return the tensors for which memory must be allocated.

        From now on arguments are kept only by address, so that later graphs may reuse their memory.
        """
        found, self._structure = pytree.tree_flatten(answer)
        copied = list[torch.Tensor]()
        for leaf in found:
            if isinstance(leaf, VALUES):
                self._results.append(leaf)
            elif not isinstance(leaf, torch.Tensor):
                raise CaptureError(
                    f"break {self.name!r} returned {type(leaf).__name__}, which graphs cannot receive anew in each "
                    f"step: return tensors, or tuples, lists and dicts of them"
                )
            elif (alias := Alias.of(leaf, leaves)) is not None:
                self._results.append(alias)
                self.aliases.append(leaf)
            else:
                self._results.append(_COPIED)
                copied.append(leaf)
        self._is_one_tensor = len(copied) == 1 and copied[0] is answer
        if step.backend is not None:
            borrow = step.backend.borrow
            self.replace([borrow(one) if isinstance(one, torch.Tensor) else one for one in self.leaves])
        return copied

    def result(self, places: Sequence[torch.Tensor]) -> Any:
        """Return the results for the captured code: arguments unchanged, other tensors in memory that graphs read."""
        copied = iter(places)
        aliases = iter(self.aliases)
        self.aliases = []
        found = list[Any]()
        for expected in self._results:
            if isinstance(expected, Alias):
                found.append(next(aliases))
            else:
                found.append(next(copied) if expected is _COPIED else expected)
        return pytree.tree_unflatten(found, self._structure)

    def _move(self, answer: Any, leaves: Sequence[Any], places: Sequence[torch.Tensor]) -> None:
        """Copy results to the tensors that later graphs read. Raise ReplayError if anything else has changed."""
        found, structure = pytree.tree_flatten(answer)
        if structure != self._structure:
            raise ReplayError(f"break {self.name!r} returned another structure than at capture")
        remaining = iter(places)
        for number, (leaf, expected) in enumerate(zip(found, self._results, strict=True)):
            if isinstance(expected, Alias):
                if not expected.is_kept(leaf, leaves[expected.argument]):
                    raise ReplayError(
                        f"break {self.name!r}: result {number} was its argument {expected.argument} at capture, or a "
                        f"view of it, and is other memory now, {text_of(leaf)}: return the same one in each step, or "
                        "always a tensor of its own"
                    )
                continue
            place = next(remaining) if expected is _COPIED else expected
            if isinstance(place, torch.Tensor) and isinstance(leaf, torch.Tensor) and FACTS(leaf) == FACTS(place):
                place.copy_(leaf)
            elif isinstance(place, torch.Tensor) or type(leaf) is not type(place) or leaf != place:
                raise ReplayError(
                    f"break {self.name!r}: result {number} is {text_of(leaf)}, and was {text_of(place)} at capture: "
                    "return what changes as a tensor of one shape"
                )
