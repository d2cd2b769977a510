"""Views: what a step sees of a fill, made of aliases whose shapes it may change without harm to the next fill."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
import torch

from .axes import Axis, Dim, Step
from .computation import field_of
from .declaration import Declaration
from .errors import ReplayError
from .guard import POINTER, Guard, own_guard

T = TypeVar("T")
Views = Mapping[str, torch.Tensor | None]


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory; no inference tensor, whatever mode is on."""
    with torch.inference_mode(mode=False):
        return tensor.detach()


class Aliases:
    """Aliases of some tensors, by name, for code that is not ours.

    They are the same ones at each call, until somebody has changed one in place (`unsqueeze_`, `resize_`, `set_`,
    `.data =`): then all are made anew.
    """

    def __init__(self, tensors: Views) -> None:
        self._tensors = tensors
        self._made: Views = {}
        self._addresses: Mapping[str, int] = {}
        self._own: tuple[torch.Tensor, ...] = ()
        self._pointers: list[int] = []
        self._guard: Guard | None = None

    def __call__(self) -> Views:
        """The aliases; None where there is no tensor. ReplayError where somebody resized their memory itself."""
        guard = self._guard
        if guard is None or not guard(*self._own) or [*map(POINTER, self._own)] != self._pointers:
            self._make()
        return self._made

    def _make(self) -> None:
        present = {name: one for name, one in self._tensors.items() if one is not None}
        now = {name: one.data_ptr() for name, one in present.items()}
        moved = [name for name, address in self._addresses.items() if now[name] != address]
        if moved:
            message = (
                f"the memory of {', '.join(map(repr, moved))} was resized in place, and graphs go on reading what it "
                "was: do not resize tensors of a view, and make a new runner"
            )
            raise ReplayError(message)
        self._made = {**self._tensors, **{name: alias(one) for name, one in present.items()}}
        self._addresses = now
        self._own = tuple(one for one in self._made.values() if one is not None)
        self._pointers = [*map(POINTER, self._own)]
        self._guard = own_guard(self._own)


@attrs.frozen(eq=False)
class ViewInfo:
    """What a view remembers of its fill: the step's sizes, which axes follow from others, the runner's declaration.

    whole: slots that must not be cut, since a replay hands all of each to every operator of its graph. captured:
    whether the view is for a capture, in which no function on the host can be called for a micro-batch: each replay
    would see what it returned then. exact: whether it has live rows only, as steps without a graph do.
    """

    step: Step
    relations: Mapping[Axis, Dim]
    declaration: Declaration
    whole: frozenset[str] = frozenset()
    captured: bool = False
    exact: bool = False


def viewer(cls: type[T], shown: Callable[[], Views], fields: Mapping[str, Any], info: ViewInfo) -> Callable[[Any], T]:
    """Make a call that makes the view of one batch.

    Args:
        cls: The declaration class.
        shown: Gives the slots' tensors.
        fields: The declaration's fields that are no slots, with their defaults.
        info: What each view remembers.

    """

    def view(batch: Any) -> T:
        made = new(cls)
        values = made.__dict__
        values.update(shown())
        if fields:
            values.update(carried(fields, batch))
        values["_slotgraph_view"] = info
        return made

    new: Callable[[type[T]], T] = cls.__new__
    return view


def make_view(cls: type[T], tensors: Views, fields: Mapping[str, Any], info: ViewInfo) -> T:
    """An instance of the declaration over given tensors, without running its constructor."""
    view = cls.__new__(cls)
    values = view.__dict__
    values.update(tensors)
    values.update(fields)
    values["_slotgraph_view"] = info
    return view


def carried(fields: Mapping[str, Any], batch: Any) -> dict[str, Any]:
    """The fields that are no slots: the batch's own, else the defaults; those with neither are left out."""
    found, plain = {}, type(batch) is dict
    for name, default in fields.items():
        value = batch.get(name) if plain else None
        if value is None:
            value = field_of(batch, name, default)
        if value is not None or default is not attrs.NOTHING:
            found[name] = value
    return found
