"""Proxies: what one stage of a pipeline hands to the next, by key, and the slots of a runner that they are for."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from ...dataflow.admission import Wanted
from ...dataflow.axes import Axis, extent
from ...dataflow.capabilities import DEVICE, dtype_text, resolve_dtype
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, DeclarationError, RankError, ReplayError
from ...dataflow.sizing import Sizer
from ...dataflow.slots import Slot
from ...dataflow.sources import Side, SideArgument
from ..runner import Runner
from ..stage import Stage
from .pipeline_letter import Letter, Spec

Tensors = Mapping[str, torch.Tensor]
_CPU: Final = torch.device("cpu")
_TOO_LATE: Final = ", and sizes must be known before these come: declare a slot of the batch with a dim"


class Proxies:
    """The slots of one runner that read a side argument, each by its key there: `hidden_states`, or a dotted path.

    Raises ConfigError where such a slot has an axis whose live size no other slot tells.
    """

    def __init__(self, runner: Runner[Any], argument: str) -> None:
        self.argument = argument
        self._runner = runner
        self._stage = stage = runner.parts.stage
        slots = sorted(_reading(stage.declaration, argument))
        self.wanted = [(key, _wanted(name, stage)) for key, name in slots]
        self.required = sorted(key for key, want in self.wanted if not want.slot.optional)
        self._rows = _Rows(stage, {want.name: want.slot for _, want in self.wanted}) if self.wanted else None

    def places(self, letter: Letter, batch: Any, side: Side, told: tuple[str, str]) -> dict[str, torch.Tensor]:
        """Where the tensors that a letter tells of are to be received, by key: in the slots, where a graph reads them.

        told: what this rank and the sender are called. Raises RankError where they are not what the slots declare, and
        what `decide` raises for the batch.
        """
        sizes = self._rows.live(batch, side) if self._rows is not None else {}
        shapes = {want.name: extent(want.slot.shape, sizes) for _, want in self.wanted}
        faults = list(self._faults(letter.specs, shapes))
        if faults:
            message = (
                f"step {letter.step}: {told[1]} sends {_listed(letter.specs)}; {told[0]} expects "
                f"{self._expected(shapes)}: {'; '.join(faults)}"
            )
            raise RankError(message)
        slots = self._slots(letter.specs, batch, side)
        targets = {
            key: spec.empty(self._stage.backend.device) for key, spec in letter.specs.items() if key not in slots
        }
        return {key: targets[key] if key in targets else slots[key] for key in letter.specs}

    def _slots(self, specs: Mapping[str, Spec], batch: Any, side: Side) -> dict[str, torch.Tensor]:
        """The live rows of the slots in the graph that takes the batch, as far as they lie in one piece."""
        graphs = self._runner.parts.graphs
        if graphs is None:
            return {}
        stand_ins = nested({key: spec.stand_in() for key, spec in specs.items()})
        decision = self._runner.decide(batch, **side, **{self.argument: stand_ins})
        absent = self._stage.absent(batch, {**side, self.argument: stand_ins})
        captured = graphs.get(decision.bucket, absent)
        if captured is None:
            return {}
        graphs.filler.order()  # behind the last step, which read them, on whatever stream that was
        view, found = graphs.view(captured, absent).__dict__, dict[str, torch.Tensor]()
        for key, want in self.wanted:
            spec = specs.get(key)
            if spec is not None and key not in found and want.slot.placement == DEVICE and _is_like(want, spec):
                found[key] = _first(view[want.name], spec.shape)
        return {key: tensor for key, tensor in found.items() if tensor.is_contiguous()}

    def _faults(self, specs: Mapping[str, Spec], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        known = {key for key, _ in self.wanted}
        yield from (f"{key!r} is read by no slot" for key in specs if key not in known)
        yield from (f"{key!r} is missing" for key in self.required if key not in specs)
        for key, want in self.wanted:
            spec = specs.get(key)
            if spec is None:
                continue
            if not want.takes(spec.dtype):
                yield f"{key!r} is not of the dtype of slot {want.name!r}"
            if spec.shape != shapes[want.name]:
                yield f"{key!r} is not of the shape of slot {want.name!r}"
            if spec.place not in ("cpu", want.device.type):
                yield f"{key!r} is not where slot {want.name!r} is"

    def _expected(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        told = (
            f"{key} {dtype_text(want.dtype)} {list(shapes[want.name])} on {want.device.type}"
            + " (optional)" * want.slot.optional
            for key, want in self.wanted
        )
        return ", ".join(told)


class _Rows:
    """Live sizes of a batch, as the slots tell them that read no proxies. ConfigError where these do not."""

    def __init__(self, stage: Stage[Any], proxies: Mapping[str, Slot]) -> None:
        declared = stage.declaration
        rest = {name: slot for name, slot in declared.slots.items() if name not in proxies}
        told = {dim.reveals() for name, slot in rest.items() if slot.reads(name) is not None for dim in slot.shape}
        others = attrs.evolve(declared, slots=rest, following=())
        relations = {axis: size for axis, size in stage.relations.items() if axis not in told}
        needed = {axis for slot in proxies.values() for axis in slot.axes if not axis.fixed}
        missing = sorted(axis.name for axis in needed - {*others.varying, *relations})
        if missing:
            message = f"{declared.name}: {missing[0]} is told by proxies alone{_TOO_LATE} of it"
            raise ConfigError(message)
        try:
            self._size = Sizer(others, relations, stage.sizes)
        except DeclarationError as error:
            message = f"{error}, beside proxies{_TOO_LATE} of that axis"
            raise ConfigError(message) from error
        self._varying, self._fixed = others.varying, stage.sizes
        self._follow = {axis: relations[axis] for axis in needed - {*others.varying}}

    def live(self, batch: Any, side: Side) -> dict[Axis, int]:
        """By axis, the sizes of fixed ones, too. BatchError where a source does not tell."""
        found = {**self._fixed, **dict(zip(self._varying, self._size(batch, side), strict=True))}
        return found | {axis: size.at(found) for axis, size in self._follow.items()}


def flattened(outputs: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested mappings by dotted path; what is None is left out. ReplayError for anything else."""
    if isinstance(outputs, torch.Tensor) and path:
        return {path: outputs}
    if not isinstance(outputs, Mapping):
        where = f"of type {type(outputs).__name__}" + f" under {path!r}" * bool(path)
        message = (
            f"the step of a stage that is not the last returns a mapping of tensors by key, got something {where}: "
            'such as {"hidden_states": ...}'
        )
        raise ReplayError(message)
    below = (flattened(one, f"{path}.{key}" if path else str(key)) for key, one in outputs.items() if one is not None)
    return {key: tensor for part in below for key, tensor in part.items()}


def nested(tensors: Tensors) -> dict[str, Any]:
    """Mappings in which each tensor stands at its dotted path."""
    whole: dict[str, Any] = {}
    for path, tensor in tensors.items():
        *outer, last = path.split(".")
        inner = whole
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = tensor
    return whole


def _reading(declaration: Declaration, argument: str) -> Iterator[tuple[str, str]]:
    """Keys of the argument, and the slots that read them. ConfigError where one reads all of it."""
    for name, slot in declaration.slots.items():
        source = slot.reads(name)
        if isinstance(source, SideArgument) and source.parts[0] == argument:
            if len(source.parts) == 1:
                message = (
                    f"slot {name!r} reads {source} as a whole: proxies have keys, side('{argument}.hidden_states')"
                )
                raise ConfigError(message)
            yield ".".join(source.parts[1:]), name


def _wanted(name: str, stage: Stage[Any]) -> Wanted:
    backend, slot = stage.backend, stage.declaration.slots[name]
    device = backend.device if slot.placement == DEVICE else _CPU
    return Wanted(name, slot, resolve_dtype(slot.dtype, backend.capabilities), device)


def _is_like(want: Wanted, spec: Spec) -> bool:
    """Whether a tensor can be received in the slot as it is."""
    return want.dtype == spec.dtype and want.device.type == spec.place


def _first(slot: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The first part of a slot along each dim."""
    with torch.inference_mode(mode=False):
        for dim, size in enumerate(shape):
            slot = slot.narrow(dim, 0, size)
        return slot


def _listed(specs: Mapping[str, Spec]) -> str:
    return ", ".join(f"{key} {spec}" for key, spec in sorted(specs.items())) or "nothing"
