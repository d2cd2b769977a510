"""A call of the stack as it was captured, and how a later step's arguments take the place of its own."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from ..dataflow.buffers import Buffers
from ..dataflow.errors import CaptureError, ReplayError
from ..dataflow.inputs import Inputs

VALUES: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, enum.Enum)
"""What a graph takes in as a value; any other object is handed on to breaks, each step's own."""


class StackCall:
    """What is captured of one bucket: a function and its arguments.

    view: what the captured part sees in the place of the step's own view. Tensors that are no slots are kept in memory
    of their own; `read` are the places of the arguments that graphs read.
    """

    def __init__(
        self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], view: Inputs, buffers: Buffers
    ) -> None:
        self.run = run
        self.read: frozenset[int] = frozenset()
        self.view = view
        self._buffers = buffers
        leaves, self._structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.leaves = [self._kept(leaf) for leaf in leaves]
        self._slots = [(id(value), name) for name, value in view.__dict__.items() if isinstance(value, torch.Tensor)]

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, Inputs):
            return self.view
        if isinstance(leaf, torch.Tensor) and not self._buffers.holds(leaf):
            return leaf.detach().clone()
        return leaf

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the capture."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self._structure)
        return args, kwargs

    def __call__(self) -> Any:
        """Run what is captured."""
        args, kwargs = self.arguments
        return self.run(*args, **kwargs)

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[int, Any]:
        """Move a step's arguments to where the graphs read them; returns what stands for what, by identity.

        Raises ReplayError where a graph would read something else than at capture.
        """
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if structure != self._structure:
            message = "the stack was called with other arguments than at capture"
            raise ReplayError(message)
        now: dict[int, Any] = {}
        for place, (leaf, kept) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(kept, Inputs):
                now.update(self.stand_ins(leaf))
            elif place in self.read:
                self._move(place, leaf, kept)
            elif not isinstance(kept, VALUES):
                now[id(kept)] = leaf
            elif type(leaf) is not type(kept) or leaf != kept:
                message = (
                    f"argument {place} of the stack is {leaf!r}, and its graphs were captured with {kept!r}: hand over "
                    "what changes as a tensor, or in the view"
                )
                raise ReplayError(message)
        return now

    def stand_ins(self, view: Inputs) -> Mapping[int, Any]:
        """A step's view and its slots, by the identity of those that the captured part was given."""
        values = view.__dict__
        return {id(self.view): view, **{key: values[name] for key, name in self._slots}}

    def _move(self, place: int, leaf: Any, kept: torch.Tensor) -> None:
        if not isinstance(leaf, torch.Tensor) or (leaf.shape, leaf.dtype) != (kept.shape, kept.dtype):
            got = list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            message = f"argument {place} of the stack is {got}, and its graphs read one of {list(kept.shape)}"
            raise ReplayError(message)
        if leaf.data_ptr() == kept.data_ptr() and leaf.stride() == kept.stride():
            return
        if self._buffers.holds(kept):
            message = f"argument {place} of the stack was a slot at capture, which graphs read, and is other memory now"
            raise ReplayError(message)
        kept.copy_(leaf)


class Noted:
    """A stack's forward while a step is looked at: it runs, and its arguments are kept."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        self.calls.append((args, kwargs))
        return self._forward(*args, **kwargs)

    def only(self, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of its one call. CaptureError where there were none, or several."""
        if len(self.calls) != 1:
            message = f"the step called the stack, {name}, {len(self.calls)} times: it is captured for one call a step"
            raise CaptureError(message)
        return self.calls[0]
