"""Proxies: the tensors that one stage of a pipeline hands to the next, and the slots of a runner that they are for."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from ...dataflow.admission import Wanted
from ...dataflow.axes import Axis, extent
from ...dataflow.capabilities import DEVICE, dtype_from_text, dtype_text, resolve_dtype
from ...dataflow.errors import ConfigError, DeclarationError, RankError, ReplayError
from ...dataflow.sizing import Sizer
from ...dataflow.sources import Side, SideArgument
from ..runner import Runner
from ..stage import Stage

_NBYTES: Final = 2048
"""Bytes of a stage's message, which its reader must know."""
_TEXT: Final = 1000
"""Characters of an error that are told, at most."""
_CPU: Final = torch.device("cpu")


@attrs.frozen
class TensorSpec:
    """A tensor without its values: its dtype, the type of its device, its shape."""

    dtype: torch.dtype
    device: str
    shape: tuple[int, ...]

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory for such a tensor, on the host or on a device."""
        with torch.inference_mode(mode=False):
            return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.device == "cpu" else device)

    def __str__(self) -> str:
        """In words."""
        return f"{dtype_text(self.dtype)} {list(self.shape)} on {self.device}"


@attrs.frozen
class StageMessage:
    """What one stage tells the next, or the one before, of a step.

    step: its number, from 1. specs: the tensors that follow, by key, in their order. error: why there are none; to the
    stage before, why it was wrong to send them. Empty if all is well.
    """

    step: int
    specs: Mapping[str, TensorSpec] = attrs.field(factory=dict)
    error: str = ""

    def packed(self) -> torch.Tensor:
        """The message as bytes, always as many. ConfigError if they do not hold it."""
        specs = [[key, dtype_text(one.dtype), one.device, one.shape] for key, one in self.specs.items()]
        raw = json.dumps([self.step, specs, self.error[:_TEXT]], ensure_ascii=False).encode(errors="replace")
        if len(raw) > _NBYTES and self.error:
            return attrs.evolve(self, error=self.error[: _TEXT // 8]).packed()
        if len(raw) > _NBYTES:
            message = f"{len(self.specs)} proxies have too many or too long keys: they are told in {_NBYTES} bytes"
            raise ConfigError(message)
        with torch.inference_mode(mode=False):
            return torch.frombuffer(bytearray(raw.ljust(_NBYTES)), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, raw: torch.Tensor) -> "StageMessage":
        """The message that was packed."""
        step, specs, error = json.loads(raw.numpy().tobytes())
        found = {key: TensorSpec(dtype_from_text(dtype), device, tuple(shape)) for key, dtype, device, shape in specs}
        return cls(step, found, error)

    @staticmethod
    def blank() -> torch.Tensor:
        """Memory that a message is received into."""
        with torch.inference_mode(mode=False):
            return torch.empty(_NBYTES, dtype=torch.uint8, device="cpu")


class Proxies:
    """The slots of one runner that read a side argument, each by its key there: `hidden_states`, or a dotted path.

    Raises ConfigError if a slot reads all of the argument, or has an axis whose live size no slot of the batch tells.
    """

    def __init__(self, runner: Runner[Any], argument: str) -> None:
        self.argument = argument
        self._runner = runner
        self._stage = stage = runner.parts.stage
        self.wanted = sorted(_wanted(stage, argument), key=lambda pair: (pair[0], pair[1].name))
        self.required = sorted(key for key, want in self.wanted if not want.slot.optional)
        self._live = _sizing(stage, [want for _, want in self.wanted])

    def targets(self, message: StageMessage, batch: Any, side: Side, me: str, other: str) -> dict[str, torch.Tensor]:
        """Where the tensors of a message are to be received, by key: in the slots, if a graph reads them there.

        me, other: what this rank and the sender are called. Raises RankError if the tensors are not what the slots
        declare, and what `decide` raises for the batch.
        """
        sizes, specs = self._live(batch, side), message.specs
        expected = [
            (key, want, TensorSpec(want.dtype, want.device.type, extent(want.slot.shape, sizes)))
            for key, want in self.wanted
        ]
        faults = [*self._unwanted(specs), *(fault for one in expected for fault in _faults(*one, specs.get(one[0])))]
        if faults:
            sent = ", ".join(f"{key} {spec}" for key, spec in sorted(specs.items())) or "nothing"
            slots = ", ".join(f"{key} {spec}" + " (optional)" * want.slot.optional for key, want, spec in expected)
            error = f"step {message.step}: {other} sends {sent}; {me} expects {slots}: {'; '.join(faults)}"
            raise RankError(error)
        found, device = self._slots(specs, batch, side), self._stage.backend.device
        return {key: found[key] if key in found else spec.empty(device) for key, spec in specs.items()}

    def _slots(self, specs: Mapping[str, TensorSpec], batch: Any, side: Side) -> dict[str, torch.Tensor]:
        """The live rows of the slots in the graph that takes the batch, of those that are contiguous."""
        graphs, found = self._runner.parts.graphs, dict[str, torch.Tensor]()
        if graphs is None:
            return found
        stand_ins = {key: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for key, spec in specs.items()}
        given = {**side, self.argument: nested(stand_ins)}
        absent = self._stage.absent(batch, given)
        captured = graphs.get(self._runner.decide(batch, **given).bucket, absent)
        if captured is None:
            return found
        graphs.filler.order()  # behind the last step, which read them, on whatever stream that was
        view = vars(graphs.view(captured, absent))
        for key, want in self.wanted:
            spec = specs.get(key)
            if spec is not None and (want.dtype, want.slot.placement) == (spec.dtype, DEVICE):
                with torch.inference_mode(mode=False):
                    rows = view[want.name][tuple(map(slice, spec.shape))]
                if rows.is_contiguous() and rows.device.type == spec.device:
                    found.setdefault(key, rows)
        return found

    def _unwanted(self, specs: Mapping[str, TensorSpec]) -> Iterator[str]:
        """Keys that no slot reads, and those that are missing."""
        known = {key for key, _ in self.wanted}
        yield from (f"{key!r} is read by no slot" for key in specs if key not in known)
        yield from (f"{key!r} is missing" for key in self.required if key not in specs)


def _faults(key: str, want: Wanted, expected: TensorSpec, spec: TensorSpec | None) -> Iterator[str]:
    """What is wrong with a tensor that is to come for a slot."""
    if spec is not None and not want.takes(spec.dtype):
        yield f"{key!r} is not of the dtype of slot {want.name!r}"
    if spec is not None and spec.shape != expected.shape:
        yield f"{key!r} is not of the shape of slot {want.name!r}"
    if spec is not None and spec.device not in ("cpu", expected.device):
        yield f"{key!r} is not where slot {want.name!r} is"


def _wanted(stage: Stage[Any], argument: str) -> Iterator[tuple[str, Wanted]]:
    """Keys of the argument, and the slots that read them. ConfigError if one reads all of it."""
    backend = stage.backend
    for name, slot in stage.declaration.slots.items():
        source = slot.reads(name)
        if isinstance(source, SideArgument) and source.parts[0] == argument:
            if len(source.parts) == 1:
                message = (
                    f"slot {name!r} reads {source} as a whole: proxies have keys, side('{argument}.hidden_states')"
                )
                raise ConfigError(message)
            device = backend.device if slot.placement == DEVICE else _CPU
            dtype = resolve_dtype(slot.dtype, backend.capabilities)
            yield ".".join(source.parts[1:]), Wanted(name, slot, dtype, device)


def _sizing(stage: Stage[Any], proxies: list[Wanted]) -> Callable[[Any, Side], dict[Axis, int]]:
    """How to tell a batch's sizes by axis from the slots that read no proxies. ConfigError if these do not tell."""
    declared, names = stage.declaration, {want.name for want in proxies}
    rest = {name: slot for name, slot in declared.slots.items() if name not in names}
    told = {dim.reveals() for name, slot in rest.items() if slot.reads(name) is not None for dim in slot.shape}
    needed = {axis for want in proxies for axis in want.slot.axes if not axis.fixed}
    relations = {axis: size for axis, size in stage.relations.items() if axis not in told}
    others = attrs.evolve(declared, slots=rest, following=())
    others = attrs.evolve(others, following=tuple(sorted(needed.difference(others.axes))))
    try:
        sizer = Sizer(others, relations, stage.sizes) if proxies else None
    except DeclarationError as error:
        message = f"{error}, beside those of proxies, since sizes must be known before these come"
        raise ConfigError(message) from error

    def live(batch: Any, side: Side) -> dict[Axis, int]:
        found = () if sizer is None else zip(others.varying, sizer(batch, side), strict=True)
        return {**stage.sizes, **dict(found)}

    return live


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


def nested(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Mappings in which each tensor stands at its dotted path."""
    whole: dict[str, Any] = {}
    for path, tensor in tensors.items():
        *outer, last = path.split(".")
        inner = whole
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = tensor
    return whole
