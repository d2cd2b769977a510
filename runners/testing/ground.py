"""Ground: a declaration on a backend, with the largest size of each axis, and its fills by any lowering."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NoReturn

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import Axis, Dim, Live, Sizes, extent
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import LoweringName
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError
from ...dataflow.inputs import Inputs
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.sizing import Relations
from ...dataflow.slots import BY_STEP, Slot
from ...dataflow.sources import Side
from ...dataflow.tails import Keep, Once
from ...dataflow.views import Views
from ..engine.bits import first_unequal, garbage, text_of
from ..engine.config import declaration_of
from ..engine.sampling import Sample, Values, sample_batch
from ..engine.stage import NO_SIZES, Stage
from ..input_buffers import Layer

NO_RELATIONS: Final[Relations] = {}
LIVE: Final = 0.75  # by default, the share of an axis' rows that is live
Slots = Mapping[str, torch.Tensor | None]


def no_step(view: Any) -> NoReturn:
    """Raise RuntimeError: the declaration is only filled."""
    raise RuntimeError(f"a {type(view).__name__} is only filled, and no step runs on it")


@attrs.frozen(eq=False)
class Ground:
    """A declaration ready to be filled.

    Attributes:
        stage: The declaration under its settings, and its backend.
        most: The largest size of every axis.
    """

    stage: Stage[Any]
    most: Sizes

    @classmethod
    def of(
        cls,
        inputs: type[Inputs],
        backend: str | Backend = "auto",
        max_sizes: Sizes = NO_SIZES,
        settings: object = None,
        relations: Relations = NO_RELATIONS,
    ) -> "Ground":
        """Check the arguments of `batches`. Raise ConfigError if a size or relation does not fit."""
        declaration = declaration_of(inputs).under(settings)
        known = _leads(declaration, relations) | set(declaration.axes)
        for axis in max_sizes:
            if axis not in known or axis in relations:
                raise ConfigError(f"max_sizes names {axis!r}, which no slot has, or relations= gives: leave it out")
        most = {axis: 3 if axis.fixed else 8 for axis in known} | dict(max_sizes)
        fixed = {axis: size for axis, size in most.items() if axis.fixed}
        stage = Stage.of(inputs, no_step, backend, fixed, settings, relations)
        return cls(stage, _followed(most, relations))

    @property
    def declaration(self) -> Declaration:
        """The declaration, under the settings."""
        return self.stage.declaration

    @property
    def backend(self) -> Backend:
        """The backend that it is filled on."""
        return self.stage.backend

    @property
    def leads(self) -> list[Axis]:
        """The varying axes whose sizes are drawn. The others follow from them."""
        return sorted(_leads(self.declaration, self.stage.relations))

    def sizes(self, leads: Sizes) -> Sizes:
        """Return the sizes of all axes, given those of the leading ones."""
        return _followed({**self.stage.sizes, **leads}, self.stage.relations)

    def part(self, live: Sizes) -> Sizes:
        """Return the sizes of all axes, given some leading ones. The others have three quarters of their largest."""
        sizes = {axis: live.get(axis, max(1, int(self.most[axis] * LIVE))) for axis in self.leads}
        if not sizes.keys() >= live.keys() or any(size > self.most[axis] for axis, size in sizes.items()):
            raise ConfigError(f"live: sizes of the axes {self.leads}, at most the padded ones, got {dict(live)}")
        return self.sizes(sizes)

    def live(self, sizes: Sizes) -> Live:
        """Return sizes in the form that a fill takes: one for each varying axis."""
        return tuple(sizes[axis] for axis in self.declaration.varying)

    def sample(self, live: Sizes, seed: int, absent: Collection[str], values: Values) -> Sample:
        """Draw a batch of given sizes, without some optional slots."""
        given = self.declaration, self.backend.capabilities, live, torch.Generator().manual_seed(seed)
        return sample_batch(*given, absent=absent, values=values, device=self.backend.device)

    def oracle(self, buffers: Buffers, batch: Any, side: Side, live: Sizes, padded: Sizes) -> Views:
        """Fill slot by slot, in the plainest code."""
        step = self.declaration.step(self.live(live), padded)
        return fill_slot_by_slot(self.declaration, buffers, self.backend.capabilities, step, batch, side)


def lowered(ground: Ground, lowering: LoweringName, seed: int = 0) -> Layer[Any]:
    """Make fills by one lowering, over buffers of their own that begin with random bytes."""
    return Layer(ground.stage, spoilt(ground, seed), ground.most, lowering, waits=False)


def spoilt(ground: Ground, seed: int) -> Buffers:
    """Allocate buffers with random bytes wherever no rule prescribes the contents."""
    buffers = ground.stage.allocate(ground.most)
    spoil(buffers, ground.most, seed)
    buffers.distrust()
    return buffers


def spoil(buffers: Buffers, padded: Sizes, seed: int, *, flipped: bool = False) -> None:
    """Write random bytes everywhere except in constants, in state and in kept tails.

    flipped: Whether to invert each bit.
    """
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        slot = buffer.slot
        if slot.writers and not (slot.is_state or isinstance(slot.rule(), Keep | Once)):
            view = buffer.view(padded)
            view.copy_(garbage(view, generator, flipped=flipped))


def scribble(buffers: Buffers, padded: Sizes, generator: torch.Generator) -> None:
    """Put random bytes in every padded row that a step may write."""
    for buffer in buffers:
        slot = buffer.slot
        if (slot.rewritten and not slot.is_state) or slot.writers == BY_STEP:
            view = buffer.view(padded)
            view.copy_(garbage(view, generator))


def fill_faults(mine: Slots, right: Slots, slots: Mapping[str, Slot], live: Sizes) -> Iterator[str]:
    """Yield what is wrong with a fill, one sentence a slot."""
    for name, expected in right.items():
        got = mine[name]
        if got is None or expected is None:
            if got is not expected:
                yield f"slot {name!r} is {'absent' if got is None else 'there'}, and the oracle's is not"
        elif text_of(got) != text_of(expected):
            yield f"slot {name!r} is {text_of(got)}, and the oracle's {text_of(expected)}"
        elif (where := first_unequal(got, expected)) is not None:
            rows = extent(slots[name].shape, live)
            part = "a live row" if all(i < size for i, size in zip(where, rows, strict=True)) else "its tail"
            held = f"it holds {got[where].item()}, and the oracle's {expected[where].item()}"
            yield f"slot {name!r}, row {_row(where)} ({part}): {held}"


def untouched(mine: Buffers, right: Buffers) -> Iterator[str]:
    """Yield a sentence for each slot in which a fill has written rows that it must not write.

    These are rows of kept tails and constants, and rows beyond the bucket.
    """
    for buffer in mine:
        if isinstance(rule := buffer.slot.rule(), Keep | Once) or rule is None:
            where = first_unequal(buffer.tensor, right[buffer.name].tensor)
            if where is not None:
                yield f"slot {buffer.name!r}, row {_row(where)}: written, though no rule has a fill write it"


def _row(where: tuple[int, ...]) -> str:
    return str(where[0] if len(where) == 1 else list(where))


def _leads(declaration: Declaration, relations: Relations) -> set[Axis]:
    """Return the varying axes that others follow. Raise ConfigError if one follows from none, or from several."""
    leads = set[Axis]()
    for axis in declaration.varying:
        lead = (size := relations.get(axis, Dim.of(axis))).reveals()
        if lead is None:
            raise ConfigError(f"relations: {axis!r} follows from one other axis that varies, got {size}")
        leads.add(lead)
    return leads


def _followed(sizes: Sizes, relations: Relations) -> Sizes:
    """Add the sizes of axes that follow from others."""
    return {**sizes, **{axis: size.at(sizes) for axis, size in relations.items()}}
