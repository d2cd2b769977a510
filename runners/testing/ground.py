"""Ground: a declaration on a backend, with the largest size of each axis, to be filled by any lowering."""

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import Axis, Dim, Sizes, Step
from ...dataflow.bucket import Absent
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError
from ...dataflow.inputs import Inputs
from ...dataflow.sampling import sampled_slots
from ..filler import Filler, Filling
from ..stage import NO_SIZES, Stage

VARYING: Final = 8
FIXED: Final = 3
"""Sizes that axes have where nobody says others."""
Relations = Mapping[Axis, Dim]
NO_RELATIONS: Final[Relations] = {}


def no_step(view: Any) -> NoReturn:
    """What runs on the views of a fill that is made for its own sake."""
    message = f"nothing runs on a {type(view).__name__} here"
    raise RuntimeError(message)


@attrs.frozen(eq=False)
class Ground:
    """A declaration ready to be filled.

    most: the largest size of every axis. leads: the varying axes whose sizes are drawn, of which the others follow.
    """

    stage: Stage[Any]
    most: Sizes
    leads: tuple[Axis, ...]

    @classmethod
    def of(
        cls,
        inputs: type[Inputs],
        backend: str | Backend = "auto",
        max_sizes: Sizes = NO_SIZES,
        settings: object = None,
        relations: Relations = NO_RELATIONS,
    ) -> "Ground":
        """Check what is said of a declaration. ConfigError, DeclarationError or BackendUnavailableError say a fault.

        max_sizes: the largest sizes of varying axes, 8 where nothing is said, and the sizes of fixed ones, else 3.
        """
        declaration = inputs.slotgraph.under(settings)
        leads = {_lead(relations.get(axis, Dim.of(axis)), axis) for axis in declaration.varying}
        known = leads | set(declaration.axes)
        for axis in max_sizes:
            if axis not in known or axis in relations:
                why = "which follows from others by relations=" if axis in known else "an axis that no slot has"
                message = f"max_sizes names {axis!r}, {why}: leave it out"
                raise ConfigError(message)
        most = {axis: FIXED if axis.fixed else VARYING for axis in known} | dict(max_sizes)
        fixed = {axis: size for axis, size in most.items() if axis.fixed}
        stage = Stage.of(inputs, no_step, backend, fixed, settings, relations)
        return cls(stage, _followed(most, relations), tuple(sorted(leads)))

    @property
    def declaration(self) -> Declaration:
        """Its slots, under the settings."""
        return self.stage.declaration

    @property
    def backend(self) -> Backend:
        """What it is filled on."""
        return self.stage.backend

    @property
    def device(self) -> torch.device:
        """Where batches have their tensors."""
        return self.backend.device

    @property
    def unread(self) -> frozenset[str]:
        """Copied slots that no computed slot reads, so that any value will do for a fill."""
        computes = [compute for slot in self.declaration.slots.values() if (compute := slot.computes()) is not None]
        read = {need for compute in computes for need in compute.needs}
        return frozenset(name for name, _ in sampled_slots(self.declaration)) - read

    def sizes(self, leads: Sizes) -> Sizes:
        """The sizes of all axes, given those that lead."""
        fixed = {axis: size for axis, size in self.most.items() if axis.fixed}
        return _followed({**fixed, **leads}, self.stage.relations)

    def live(self, sizes: Sizes) -> tuple[int, ...]:
        """Sizes as a fill takes them: one for each varying axis."""
        return tuple(sizes[axis] for axis in self.declaration.varying)

    def step(self, live: Sizes, padded: Sizes) -> Step:
        """A step's sizes, as computed slots are told them."""
        return self.declaration.step(self.live(live), padded)


def make_filling(filler: Filler[Any], sizes: Sizes, absent: Absent) -> Filling:
    """A bucket with all that fills it, its kernel warmed up and captured, which here no capture of a step does."""
    filling = filler.make(sizes, absent)
    if filling.kernel is not None:
        filler.rest()
        filler.capture_alone(filling, warm=True)
    return filling


def _lead(size: Dim, axis: Axis) -> Axis:
    lead = size.reveals()
    if lead is None:
        message = f"relations: {axis!r} follows from one other axis that varies, got {size}"
        raise ConfigError(message)
    return lead


def _followed(sizes: Sizes, relations: Relations) -> Sizes:
    """Sizes with those of the axes that follow from others."""
    return {**sizes, **{axis: size.at(sizes) for axis, size in relations.items()}}
