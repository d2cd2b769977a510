"""A call of the stack as it was captured, and how a later step's arguments take the place of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...dataflow.buffers import Buffers
from ...dataflow.errors import CaptureError, ReplayError
from ...dataflow.inputs import Inputs
from .breaks import VALUES
from .watch import Use, tensors_within


class StackCall:
    """What is captured of one bucket: a function and its arguments.

    own: the view that the step was called with. view: what the captured part sees in its place. Tensors that are no
    slots are kept in memory of their own; `use` has the places of the arguments that graphs read, and write.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        own: Inputs,
        view: Inputs,
        buffers: Buffers,
    ) -> None:
        self.run = run
        self.use = Use()
        self.view = view
        self._buffers = buffers
        leaves, self._structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        given = (*args, *kwargs.values())
        is_flat = len(leaves) == len(given) and all(one is other for one, other in zip(leaves, given, strict=True))
        self._types = (tuple(map(type, given)), tuple(kwargs)) if is_flat else None
        self.leaves: list[Any] = [view if leaf is own else self._kept(leaf) for leaf in leaves]
        self._slots = _slots_of(view)
        self._in_slots = [isinstance(one, torch.Tensor) and buffers.holds(one) for one in self.leaves]

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or self._buffers.holds(leaf):
            return leaf
        with torch.inference_mode(mode=False):  # a step outside of it will write there
            return leaf.detach().clone()

    def arguments_in(self, view: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the capture, with another view and its slots in the place of those that they are of."""
        stands = stand_ins(self.view, view)
        args, kwargs = pytree.tree_unflatten([stands.get(id(leaf), leaf) for leaf in self.leaves], self._structure)
        return args, kwargs

    def __call__(self) -> Any:
        """Run what is captured."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self._structure)
        return self.run(*args, **kwargs)

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Tensors that came with an argument, and its place; those inside of an object that are the view's are not."""
        slots = {key for key, _ in self._slots}  # of those a fill takes care
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                yield place, leaf
            elif leaf is not self.view and not isinstance(leaf, VALUES):
                yield from ((place, one) for one in tensors_within(leaf) if id(one) not in slots)

    def objects(self) -> list[int]:
        """Places of objects inside of which graphs read tensors."""
        return [place for place in sorted(self.use.read) if not isinstance(self.leaves[place], torch.Tensor)]

    def at_capture(self, view: Inputs) -> Mapping[int, Any]:
        """What stands for what in the step of the capture; every key that `take` may give is in it."""
        own = [leaf for place, leaf in enumerate(self.leaves) if self._is_handed_on(place, leaf)]
        return {**{id(leaf): leaf for leaf in own}, **stand_ins(self.view, view)}

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any], view: Inputs) -> Mapping[int, Any]:
        """Move a step's arguments to where the graphs read them; returns what stands for what, by identity.

        view: the step's own. Raises ReplayError where a graph would read something else than at capture.
        """
        leaves = self._leaves_of(args, kwargs)
        values = view.__dict__
        now: dict[int, Any] = {id(self.view): view}
        for key, name in self._slots:
            now[key] = values[name]
        for place, (leaf, kept) in enumerate(zip(leaves, self.leaves, strict=True)):
            if kept is self.view:
                if leaf is not view:
                    message = (
                        f"argument {place} of the stack was the step's own view at capture, and is another one now"
                    )
                    raise ReplayError(message)
            elif place in self.use.read:
                self._move(place, leaf, kept)
            elif self._is_handed_on(place, kept):
                now[id(kept)] = leaf
            elif type(leaf) is not type(kept) or leaf != kept:
                got = list(leaf.shape) if isinstance(leaf, torch.Tensor) else repr(leaf)
                message = (
                    f"argument {place} of the stack is {got}, and its graphs were captured with {kept!r}: hand over "
                    "what changes as a tensor, or in the view"
                )
                raise ReplayError(message)
        return now

    def give_back(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Move what graphs wrote into arguments to where the step has them."""
        if self.use.written:
            leaves = self._leaves_of(args, kwargs)
            for place in self.use.written:
                leaf, kept = leaves[place], self.leaves[place]
                if isinstance(kept, torch.Tensor) and leaf.data_ptr() != kept.data_ptr():
                    leaf.copy_(kept)

    def _leaves_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        given = [*args, *kwargs.values()]
        if (
            tuple(map(type, given)),
            tuple(kwargs),
        ) == self._types:  # what the flattening below takes ten times as long for
            return given
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if structure != self._structure:
            message = "the stack was called with other arguments than at capture"
            raise ReplayError(message)
        return leaves

    def _is_handed_on(self, place: int, kept: Any) -> bool:
        """Whether breaks alone get an argument, each step's own."""
        return kept is not self.view and place not in self.use.read and not isinstance(kept, VALUES)

    def _move(self, place: int, leaf: Any, kept: Any) -> None:
        if not isinstance(kept, torch.Tensor):
            if leaf is not kept:
                raise ReplayError(other_object(place, kept))
            return
        if not isinstance(leaf, torch.Tensor) or (leaf.shape, leaf.dtype) != (kept.shape, kept.dtype):
            got = list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            message = f"argument {place} of the stack is {got}, and its graphs read one of {list(kept.shape)}"
            raise ReplayError(message)
        if leaf.data_ptr() == kept.data_ptr() and leaf.stride() == kept.stride():
            return
        if self._in_slots[place]:
            message = f"argument {place} of the stack was a slot at capture, which graphs read, and is other memory now"
            raise ReplayError(message)
        kept.copy_(leaf)


def other_object(place: int, kept: Any) -> str:
    """Why a graph does not go with an argument that is made anew in each step."""
    return (
        f"argument {place} of the stack, of type {type(kept).__name__}, is another object in each step, and graphs "
        "read a tensor inside of it: hand that over as an argument of its own, or read it in a break"
    )


def stand_ins(seen: Inputs, view: Inputs) -> Mapping[int, Any]:
    """A view and its slots, by the identity of another one and of that one's slots."""
    values = view.__dict__
    return {id(seen): view, **{key: values[name] for key, name in _slots_of(seen)}}


def _slots_of(view: Inputs) -> list[tuple[int, str]]:
    return [(id(value), name) for name, value in view.__dict__.items() if isinstance(value, torch.Tensor)]


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
