"""What every runner stands on: a declaration under its settings, a backend, the step, and its sizes."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import attrs
import torch

from ..backends.base import Backend
from ..backends.registry import choose
from ..dataflow.axes import Axis, Dim, Sizes
from ..dataflow.bucket import absent_from
from ..dataflow.buffers import Buffers, allocate
from ..dataflow.declaration import Declaration
from ..dataflow.errors import ConfigError
from ..dataflow.inputs import Inputs
from ..dataflow.ready import Ready
from ..dataflow.sources import Side
from ..dataflow.views import ViewInfo, carried, make_view

V = TypeVar("V", bound=Inputs)
NO_SIZES: Final[Sizes] = {}
_NO_FIELDS: Final[Mapping[str, Any]] = {}
NO_BINDINGS: Final[Mapping[str, torch.Tensor]] = {}


def name_of(backend: str | Backend) -> str:
    """A backend's name, as it is written in a configuration."""
    return backend if isinstance(backend, str) else backend.name


@attrs.frozen(eq=False)
class Stage(Generic[V]):
    """A declaration class made ready to run: what its settings enable, where it runs, and what runs on its views.

    sizes: sizes of the fixed axes, and capacities of further varying ones. relations: axes that follow from others.
    """

    inputs: type[V]
    declaration: Declaration
    backend: Backend
    step: Callable[[V], Any]
    sizes: Sizes
    relations: Mapping[Axis, Dim]
    optional: bool

    @classmethod
    def of(
        cls,
        inputs: type[V],
        step: Callable[[V], Any],
        backend: str | Backend,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        relations: Mapping[Axis, Dim] | None = None,
        carry: tuple[str, ...] = (),
    ) -> "Stage[V]":
        """Check what a runner is given.

        Raises DeclarationError, ConfigError or BackendUnavailableError, which say what does not fit.
        """
        declaration = inputs.slotgraph.under(settings).carrying(carry)
        unknown = sorted(axis.name for axis in set(sizes) - set(declaration.axes))
        if unknown:
            message = f"sizes names {unknown[0]!r}, an axis that no slot of {declaration.name} has"
            raise ConfigError(message)
        unsized = [axis.name for axis in declaration.axes if axis.fixed and axis not in sizes]
        if unsized:
            message = f"{declaration.name} needs sizes= for its fixed axes {', '.join(unsized)}"
            raise ConfigError(message)
        optional = any(slot.optional for slot in declaration.slots.values())
        return cls(inputs, declaration, choose(backend), step, dict(sizes), dict(relations or {}), optional)

    def allocate(self, capacity: Sizes, bind: Mapping[str, torch.Tensor] = NO_BINDINGS) -> Buffers:
        """Buffers of a given capacity on the backend."""
        return allocate(self.declaration, capacity, self.backend.capabilities, self.backend.empty, bind)

    def absent(self, batch: Any, side: Side) -> frozenset[str]:
        """Optional slots that a batch comes without."""
        return absent_from(self.declaration, batch, side) if self.optional else frozenset()

    def view(self, ready: Ready, batch: Any) -> V:
        """The view of a fill."""
        info = ready.notes.get("info")
        if info is None:
            info = ready.notes["info"] = ViewInfo(ready.step, self.relations)
        fields = carried(self.declaration.fields, batch) if self.declaration.fields else _NO_FIELDS
        return make_view(self.inputs, ready.views, fields, info)

    def capture_view(self, ready: Ready) -> V:
        """The view that a step sees while it is captured: fields only where the declaration gives a default."""
        return self.view(ready, None)
