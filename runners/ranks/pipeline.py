"""Pipelines: each stage runs a part of the model's layers on a rank of its own, and hands on what it computed."""

import contextlib
import datetime as dt
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import attrs
import torch
import torch.distributed as dist

from ...dataflow.admission import Wanted, fits
from ...dataflow.axes import extent
from ...dataflow.capabilities import DEVICE, dtype_text, resolve_dtype
from ...dataflow.errors import ConfigError, RankError, ReplayError
from ...dataflow.sources import Path, Side
from ..config import check_seconds, checked, refuse
from ..runner import Runner
from ..running import Unique, opaque
from ..stage import Stage
from .group import GRACE, checked_group

if TYPE_CHECKING:
    from torch.distributed import Work

_MESSAGES, _TENSORS = 1, 2
"""Tags of what hosts send each other."""
_NBYTES: Final = 6144
"""Bytes of a stage's message, which its reader must know."""
_TEXT: Final = 1000
"""Characters of an error that are told, at most."""
_SOON: Final = 0.99
_HEADSTART: Final = 1.0
"""Seconds that a rank which learns of a loss from others waits longer than they: their errors name who is lost."""


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
    """What one stage tells the next of a step.

    step: its number, from 1. specs: the tensors that follow, by key, in their order. error: why there are none.
    """

    step: int
    specs: dict[str, TensorSpec] = attrs.field(factory=dict)
    error: str = ""

    def packed(self) -> torch.Tensor:
        """The message as bytes, always as many. ConfigError if they do not hold it."""
        raw = pickle.dumps(self)
        if len(raw) > _NBYTES:
            raise ConfigError(
                f"{len(self.specs)} proxies have too many or too long keys: they are told in {_NBYTES} bytes"
            )
        with torch.inference_mode(mode=False):
            return torch.frombuffer(bytearray(raw.ljust(_NBYTES)), dtype=torch.uint8)


@attrs.define(eq=False)
class Neighbour:
    """The stage before or after.

    host: the group that messages and tensors on the host travel in, `group`: those on devices. rank: the neighbour's,
    among all processes. me, other: this rank and that one in words. patience: seconds to wait for it. broken: why there
    is nothing to say any more.
    """

    host: "dist.ProcessGroup"
    group: "dist.ProcessGroup"
    rank: int
    me: str
    other: str
    patience: float
    broken: str | None = None
    _sent: "list[tuple[Work, torch.Tensor]]" = attrs.field(factory=list)

    def take(self) -> StageMessage:
        """What the stage before tells of its step. RankError if it does not come."""
        with torch.inference_mode(mode=False):
            raw = torch.empty(_NBYTES, dtype=torch.uint8, device="cpu")
        with self._talk():
            self._wait(*self._post(dist.irecv, raw, _MESSAGES))
            message: StageMessage = pickle.loads(raw.numpy().tobytes())  # noqa: S301 - of another rank, as all of torch's
        return message

    def receive(self, targets: Iterable[torch.Tensor]) -> None:
        """Receive the tensors that the stage before sends. RankError if they do not come."""
        with self._talk():
            for post in [self._post(dist.irecv, one, _TENSORS) for one in targets if one.numel()]:
                self._wait(*post)

    def send(self, message: StageMessage, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to send the stage after a message and its tensors, which the caller may overwrite.

        Tensors on the host are copied. Those on a device are read in stream order: what the present stream does next
        comes after that. RankError if the other is gone.
        """
        packed = message.packed()
        steady = [_steady(tensor) for tensor in tensors.values() if tensor.numel()]
        with self._talk():
            self._sent = [self._post(dist.isend, packed, _MESSAGES)]
            self._sent += [self._post(dist.isend, tensor, _TENSORS) for tensor in steady]
            for work, tensor in self._sent:
                if not tensor.is_cpu:
                    work.wait()

    def settle(self) -> None:
        """Wait until the stage after has taken what was sent last. RankError if it is late or gone."""
        sent, self._sent = self._sent, []
        self._check_unbroken()  # before a step, which other ranks of the stage must not run without this one
        with self._talk():
            for post in sent:
                self._wait(*post)

    def _check_unbroken(self) -> None:
        """RankError if there is nothing to say any more."""
        if self.broken is not None:
            raise RankError(self.broken)

    def _post(self, call: Callable[..., Any], tensor: torch.Tensor, tag: int) -> "tuple[Work, torch.Tensor]":
        """Begin to send or receive a tensor. RankError if the other is gone."""
        self._check_unbroken()
        way = (self.host, tag) if tensor.is_cpu else (self.group, 0)
        try:
            return call(tensor, self.rank, *way), tensor
        except RuntimeError as error:
            raise self._lost() from error

    def _wait(self, work: "Work", tensor: torch.Tensor) -> None:
        """Wait for a tensor: in stream order, or on the host; RankError, with the other's name, if it is late there."""
        if not tensor.is_cpu:
            work.wait()
            return
        start = time.monotonic()
        try:
            work.wait(dt.timedelta(seconds=self.patience))
        except RuntimeError as error:
            if time.monotonic() - start < self.patience * _SOON:
                raise self._lost() from error
            raise self._lost(f"said nothing for {self.patience:g} s: it is dead, stuck, or does other steps") from error

    def _lost(self, how: str = "is gone: its connection was lost") -> RankError:
        self.broken = f"{self.me}: {self.other} {how}"
        return RankError(self.broken)

    @contextlib.contextmanager
    def _talk(self) -> Iterator[None]:
        """A part of the talk that, broken off, leaves messages which nobody reads: nothing more is said then."""
        try:
            yield
        except BaseException as error:
            if self.broken is None:
                self._lost(f"is not talked to any more, since a step was broken off: {error}")
            raise


def _steady(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, which stays as it is until it is sent."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.is_cpu else tensor.contiguous()


@final
@opaque
class PipelineStage(Unique):
    """Runs a runner's steps as one stage of a pipeline, whose stages are the ranks of a process group, in order.

        stage = PipelineStage(runner, group)
        logits = stage(batch)            # on every rank, with the same batch; None but on the last

    The step of a stage that is not the last returns proxies: a mapping of tensors by key, such as hidden_states and
    residual, of the batch's live rows (`output_rows=TOKENS`). The next stage's runner reads them from the side argument
    that `proxies` names: `copied(..., source=side("pp_proxy_tensors.hidden_states"))`, as in
    `standard.PipelineProxies`. If a graph takes the batch, they are received in its slots, and the fill only resets
    their tails. Otherwise they are copied.

    Before each step a stage tells the next one which proxies come, so that optional ones may come or not.

    A runner with `ranks=` has the ranks that share the layers of its stage. Each of them has a pipeline of its own. If
    a step of one ends before its runner agrees with the others, all of the stage raise. Stages then wait as long as
    `Ranks` do, if that is longer, and four seconds more a stage, and their ranks for each other a second longer than
    for another stage: the first to raise is the one that waits for the lost rank.

    Args:
        runner: What runs the stage's step.
        group: The stages' group. The default group if None, or a pipeline of one stage if there is none. It moves
            tensors of the runner's device, by NCCL for instance. Tensors in host memory go through groups of gloo, one
            for each two neighbours, which all ranks make here at once, in the same order as other stages of theirs.
        proxies: The side argument that slots read proxies from.
        timeout: Seconds that a stage waits for its neighbours, and one second more for each stage before it. With
            `lazy`, captures take their part of that.

    Raises:
        ConfigError: The group cannot move the runner's tensors, slots of the first stage require proxies, or those of
            another read none.
        RankError: A neighbour did not come to make its stage.
    """

    def __init__(
        self,
        runner: Runner[Any],
        group: "dist.ProcessGroup | None" = None,
        *,
        proxies: str = "pp_proxy_tensors",
        timeout: float = 60.0,
    ) -> None:
        checked("runner", "a runner", runner, Runner)
        if not checked("proxies", "the name of a side argument", proxies, str).isidentifier():
            refuse("proxies", "the name of a side argument", proxies)
        check_seconds("timeout", timeout)
        self.runner = runner
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        found: Any = None if alone else checked_group(group)
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(found), dist.get_world_size(found))
        self._argument = proxies
        self.wanted = sorted(proxies_of(runner.stage, proxies), key=lambda pair: (pair[0], pair[1].name))
        self._coordinator = runner.coordinator
        self._steps = 0
        self._before: Neighbour | None = None
        self._after: Neighbour | None = None
        self._check_slots()
        if self.size > 1:
            self._check_group(found)
            self._connect(found, timeout)

    @property
    def first(self) -> bool:
        """Whether it begins with tokens."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether its outputs are the model's."""
        return self.rank == self.size - 1

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step: receive proxies, run the runner, and hand its outputs on; the last stage returns them.

        It returns as soon as they are under way. The runner may then replay again: what is sent stays as it is.
        Raises what the runner raises, and RankError, which names the rank: if another stage failed in this step, sent
        other proxies than the slots declare, is lost, or does not come. All later stages raise then, too. The next step
        is run as if nothing had been, unless a rank is lost.
        """
        self._steps += 1
        self._coordinator.begin()
        try:
            received = self._given(side) if self._before is None else self._received(self._before, batch, side)
            self.flush()
            outputs = self.runner(batch, **received)
            if self._after is not None:
                tensors = proxies_in(outputs)
                specs = {key: TensorSpec(one.dtype, one.device.type, tuple(one.shape)) for key, one in tensors.items()}
                self._after.send(StageMessage(self._steps, specs), tensors)
        except BaseException as error:
            self._fail(error)
            raise
        return outputs if self.last else None

    def flush(self) -> None:
        """Wait until the next stage has received the last step's proxies: before this process ends, for one.

        Each step does so with those of the step before. Raises RankError if it does not come, on this rank alone.
        """
        if self._after is not None:
            self._after.settle()

    def _received(self, before: Neighbour, batch: Any, side: Side) -> dict[str, Any]:
        """All side arguments. Whatever is wrong with the step, its tensors are received: the next ones come after."""
        message = before.take()
        if message.error:
            raise RankError(f"step {message.step}: {before.other} has nothing for {before.me}: {message.error}")
        try:
            targets = self._targets(before, message, batch, self._given(side))
        except BaseException:
            device = self.runner.stage.backend.device
            before.receive([spec.empty(device) for spec in message.specs.values()])
            raise
        before.receive(targets.values())
        return {**side, self._argument: targets}

    def _targets(self, before: Neighbour, message: StageMessage, batch: Any, side: Side) -> dict[str, torch.Tensor]:
        """Where the tensors of a message are to be received, by key: in the slots, if a graph reads them there.

        Raises RankError if they are not what the slots declare, and what `decide` raises for the batch.
        """
        if message.step != self._steps:
            raise RankError(
                f"{before.other} is at step {message.step} of the pipeline, {before.me} at step {self._steps}"
            )
        runner, specs = self.runner, message.specs
        stage, graphs = runner.stage, runner.graphs
        found = {key: spec.empty(stage.backend.device) for key, spec in specs.items()}
        given = {**side, self._argument: found}
        keys, required = {key for key, _ in self.wanted}, {key for key, want in self.wanted if not want.slot.optional}
        faults = [f"{key!r} is missing" for key in sorted(required - specs.keys())]
        faults += [f"{key!r} is read by no slot" for key in specs if key not in keys]
        bucket = None
        if not faults:
            bucket, live = runner.decide(batch, **given).bucket, runner.size(batch, given)
            sizes = {**stage.sizes, **dict(zip(stage.declaration.varying, live, strict=False))}
            expected = [(key, want, extent(want.slot.shape, sizes)) for key, want in self.wanted if key in found]
            faults = [
                f"{key!r} is not what slot {want.name!r} expects, {TensorSpec(want.dtype, want.device.type, shape)}"
                for key, want, shape in expected
                if not fits(want, found[key], shape)
            ]
        if faults:
            sent = ", ".join(f"{key} {spec}" for key, spec in sorted(specs.items())) or "nothing"
            raise RankError(
                f"step {message.step}: {before.other} sends {sent}; {before.me} refuses it: {'; '.join(faults)}"
            )
        absent = stage.absent(batch, given)
        captured = None if graphs is None else graphs.get(bucket, absent)
        if graphs is None or captured is None:
            return found
        graphs.filler.order()  # behind the last step, which read them, on whatever stream that was
        view, placed = vars(graphs.view(captured, absent)), dict[str, torch.Tensor]()
        for key, want in self.wanted:
            one = found.get(key)
            if one is not None and (want.dtype, want.slot.placement) == (one.dtype, DEVICE):
                with torch.inference_mode(mode=False):
                    rows = view[want.name][tuple(map(slice, one.shape))]
                if rows.is_contiguous() and rows.device == one.device:
                    placed.setdefault(key, rows)
        return {**found, **placed}

    def _given(self, side: Side) -> Side:
        """The caller's side arguments. ConfigError if the proxies are among them."""
        if self._argument in side:
            raise ConfigError(f"{self._argument} is received from the stage before: do not give it")
        return side

    def _fail(self, error: BaseException) -> None:
        """Tell the ranks of this stage, unless the runner has, and the next stage, that this rank has no step.

        What they say to that is noted in the error. An interrupt waits for no one's answer.
        """
        after = self._after
        _noting(error, lambda: self._coordinator.refuse(error))
        if after is not None and isinstance(error, Exception):
            message = StageMessage(self._steps, error=_in_words(error)[:_TEXT])
            for say in (after.settle, lambda: after.send(message, {}), after.settle):
                if after.broken is None:
                    _noting(error, say)

    def _check_slots(self) -> None:
        """ConfigError if the slots are not those of a stage at this place."""
        argument = self._argument
        required = [key for key, want in self.wanted if not want.slot.optional]
        if self.first and required:
            keys = ", ".join(map(repr, required))
            raise ConfigError(f"the first stage receives nothing, but its slots require {keys} of {argument}")
        if not self.first and not self.wanted:
            raise ConfigError(
                f"stage {self.rank} of {self.size} has no slot that reads {argument}: declare one with "
                f"source=side('{argument}.hidden_states'), or name another argument by proxies="
            )

    def _check_group(self, group: "dist.ProcessGroup") -> None:
        """ConfigError if the group cannot move tensors of the runner's device."""
        kind = self.runner.stage.backend.device.type
        ways = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
        if kind != "cpu" and ways.get(kind, "gloo") == "gloo":  # which sends from host memory alone
            raise ConfigError(
                f"the group moves tensors by {ways}, not those on {kind} between two ranks: make one that does"
            )

    def _connect(self, group: "dist.ProcessGroup", timeout: float) -> None:
        """Make a group for each neighbour, since gloo gives up all of a group where one message is late.

        Those of stages 0 and 1, 2 and 3, ... come first, then those of 1 and 2, ...; a stage without a partner makes
        one for itself, because torch.distributed names groups by how many a rank has: all must have as many.
        """
        members, patience = dist.get_process_group_ranks(group), self._patience(timeout, self.rank)
        me, limit = members[self.rank], dt.timedelta(seconds=2 * self._patience(timeout, self.size))
        self._coordinator.timeout = max(self._coordinator.timeout, patience + _HEADSTART)
        for turn in range(2):
            place = self.rank + (1 if self.rank % 2 == turn else -1)
            other = members[place] if 0 <= place < self.size else me
            try:
                host: Any = dist.new_group(
                    sorted({me, other}), limit, "gloo", use_local_synchronization=True, group_desc="slotgraph pipeline"
                )
            except RuntimeError as error:
                raise RankError(f"rank {me}: rank {other} did not come to make its stage of the pipeline") from error
            if other == me:
                continue
            neighbour = Neighbour(host, group, other, f"rank {me}", f"rank {other}", patience)
            if place < self.rank:
                self._before = neighbour
            else:
                self._after = neighbour

    def _patience(self, timeout: float, stage: int) -> float:
        """Seconds that a stage waits for another: longer than the one before takes to find out which rank is lost."""
        if self._coordinator.quiet:
            return timeout + stage * _HEADSTART
        return max(timeout, self._coordinator.timeout) + stage * (GRACE + 2 * _HEADSTART)


def _noting(error: BaseException, say: Callable[[], None]) -> None:
    """Say it; what others say to that is noted in the error."""
    try:
        say()
    except RankError as other:
        error.add_note(str(other))


def _in_words(error: BaseException) -> str:
    """An error for another rank: with its kind, unless it is of ranks anyway."""
    return str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"


def proxies_of(stage: Stage[Any], argument: str) -> Iterator[tuple[str, Wanted]]:
    """Keys of the side argument, and the slots that read them. ConfigError if one reads all of it."""
    backend = stage.backend
    for name, slot in stage.declaration.slots.items():
        source = slot.reads(name)
        if isinstance(source, Path) and source.beside and source.parts[0] == argument:
            if len(source.parts) != 2:  # noqa: PLR2004 - the argument and a key
                raise ConfigError(
                    f"slot {name!r} reads {source}: proxies are tensors by key, side('{argument}.hidden_states')"
                )
            device = backend.device if slot.placement == DEVICE else torch.device("cpu")
            dtype = resolve_dtype(slot.dtype, backend.capabilities)
            yield source.parts[1], Wanted(name, slot, dtype, device)


def proxies_in(outputs: Any) -> dict[str, torch.Tensor]:
    """The tensors that a step returns by key, without what is None. ReplayError for anything else."""
    odd = f"of type {type(outputs).__name__}"
    if isinstance(outputs, Mapping):
        found = {key: one for key, one in outputs.items() if one is not None}
        odd = next(
            (f"of type {type(one).__name__} under {k!r}" for k, one in found.items() if not torch.is_tensor(one)), ""
        )
        if not odd:
            return found
    raise ReplayError(
        f"the step of a stage that is not the last returns a mapping of tensors by key, got something {odd}: "
        'such as {"hidden_states": ...}'
    )
