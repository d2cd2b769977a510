"""Pipelines: each stage runs a part of the model's layers on its own rank, and sends its results to the next."""

import contextlib
import datetime as dt
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import attrs
import torch
import torch.distributed as dist

from ...dataflow.errors import ConfigError, RankError, ReplayError
from ...dataflow.guard import outside_inference
from ...dataflow.sources import Path, Side
from ..engine.config import check_seconds, checked, refuse
from ..engine.current import Unique, opaque
from ..engine.runner import Runner
from .group import GRACE, checked_group

if TYPE_CHECKING:
    from torch.distributed import Work

Proxies = Mapping[str, torch.Tensor]
_NBYTES: Final = 6144
"""Bytes of a stage's message. Its reader must know them."""
_TEXT: Final = 1000
"""The most characters of an error that are sent."""
_HEADSTART: Final = 1.0
"""Extra seconds that a rank waits which learns of a loss from others: their errors name the lost rank."""


@attrs.define(eq=False)
class Neighbour:
    """The stage before or after.

    Attributes:
        host: The group of messages and of tensors in host memory.
        group: The group of tensors on the device.
        device: The device that tensors are received on.
        rank: The rank of the neighbour.
        me: This rank, in words.
        other: The neighbour, in words.
        timeout: Seconds to wait.
        broken: Why nothing can be sent or received any more, or None.
    """

    host: "dist.ProcessGroup"
    group: "dist.ProcessGroup"
    device: torch.device
    rank: int
    me: str
    other: str
    timeout: float
    broken: str | None = None
    _sent: "list[tuple[Work, torch.Tensor]]" = attrs.field(factory=list)

    def receive(self) -> tuple[int, str, Proxies]:
        """Return a step's number, the error of the stage before or an empty text, and its tensors.

        Raise RankError if the stage is lost.
        """
        with self._exchange(), outside_inference():
            raw = torch.empty(_NBYTES, dtype=torch.uint8, device="cpu")
            self._wait(*self._post(dist.irecv, raw))
            step, error, specs = pickle.loads(raw.numpy().tobytes())  # noqa: S301 - from another rank, as torch does
            found = {
                key: torch.empty(shape, dtype=dtype, device="cpu" if on_host else self.device)
                for key, (shape, dtype, on_host) in specs.items()
            }
            for post in [self._post(dist.irecv, one) for one in found.values() if one.numel()]:
                self._wait(*post)
        return step, error, found

    def send(self, step: int, tensors: Proxies, error: str = "") -> None:
        """Begin to send tensors to the next stage. The caller may overwrite them afterwards, in stream order.

        Raise RankError if the other is gone, or ConfigError if the keys do not fit in the message.
        """
        specs = {key: (tuple(one.shape), one.dtype, one.is_cpu) for key, one in tensors.items()}
        raw = pickle.dumps((step, error[:_TEXT], specs))
        if len(raw) > _NBYTES:
            raise ConfigError(f"{len(specs)} proxies have too many or too long keys: a message has {_NBYTES} bytes")
        with outside_inference():
            message = torch.frombuffer(bytearray(raw.ljust(_NBYTES)), dtype=torch.uint8)
        sent = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors.values() if tensor.numel()]
        sent = [one.clone(memory_format=torch.contiguous_format) if one.is_cpu else one.contiguous() for one in sent]
        with self._exchange():
            self._sent = [self._post(dist.isend, tensor) for tensor in (message, *sent)]
            for work, tensor in self._sent:
                if not tensor.is_cpu:
                    work.wait()

    def flush(self) -> None:
        """Wait until the next stage has received the last tensors. Raise RankError if it is late or gone."""
        with self._exchange():
            sent = self._sent
            self._sent = []
            for post in sent:
                self._wait(*post)

    def _post(self, call: Callable[..., Any], tensor: torch.Tensor) -> "tuple[Work, torch.Tensor]":
        """Begin to send or receive a tensor."""
        return call(tensor, self.rank, self.host if tensor.is_cpu else self.group), tensor

    def _wait(self, work: "Work", tensor: torch.Tensor) -> None:
        """Wait for a tensor: in stream order, or on the host. Raise TimeoutError if it is late on the host."""
        if not tensor.is_cpu:
            work.wait()
            return
        start = time.monotonic()
        try:
            work.wait(dt.timedelta(seconds=self.timeout))
        except RuntimeError as error:
            if time.monotonic() - start < 0.99 * self.timeout:
                raise
            raise TimeoutError(
                f"sent nothing for {self.timeout:g} s: it is dead, stuck, or does other steps"
            ) from error

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Run a block that sends or receives.

        If it ends early, messages remain unread: raise RankError from then on.
        """
        if self.broken is not None:
            raise RankError(self.broken)
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            how = "is gone: its connection was lost" if isinstance(error, RuntimeError) else error
            self.broken = f"{self.me}: {self.other} {how}"
            raise RankError(self.broken) from error
        except BaseException as error:
            self.broken = f"{self.me}: {self.other} is not talked to any more, since a step was broken off: {error}"
            raise


@final
@opaque
class PipelineStage(Unique):
    """Runs a runner's steps as one stage of a pipeline, whose stages are the ranks of a process group, in order.

        stage = PipelineStage(runner, group)
        logits = stage(batch)            # on every rank, with the same batch; None but on the last

    The step of a stage that is not the last returns proxies: a mapping of tensors by key, such as hidden_states and
    residual, of the batch's live rows (`output_rows=TOKENS`). The next stage's runner reads them from the side argument
    that `proxies` names: `copied(..., source=side("pp_proxy_tensors.hidden_states"))`, as in
    `standard.PipelineProxies`. Optional proxies may be absent: a message before each step lists those that come.

    A runner with `ranks=` has the ranks that share the layers of its stage. Each of them has a pipeline of its own. If
    a step of one ends before its runner agrees with the others, all ranks of the stage raise. Stages then wait as long
    as `Ranks` do, if that is longer, and four more seconds a stage, and their ranks wait for each other a second longer
    than for another stage. So the rank that waits for the lost rank raises first.

    Args:
        runner: What runs the stage's step.
        group: The stages' group. None is the default group, or a pipeline of one stage if there is no such group. It
            must move tensors of the runner's device, by NCCL for instance. Tensors in host memory go through groups of
            gloo, one for each two neighbours. All ranks make these now, at once, in the same order as other stages of
            theirs.
        proxies: The side argument that slots read proxies from.
        timeout: Seconds that a stage waits for its neighbours, and one more second for each stage before it. With
            `lazy`, captures take their part of that.

    Raises:
        ConfigError: The group cannot move the runner's tensors.
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
        paths = [slot.reads(name) for name, slot in runner.stage.declaration.slots.items()]
        read = [path.parts for path in paths if isinstance(path, Path) and path.from_side]
        self._keys = {parts[1] for parts in read if parts[0] == proxies and parts[1:]}
        self._argument = proxies
        self._coordinator = runner.coordinator
        self._steps = 0
        self._before: Neighbour | None = None
        self._after: Neighbour | None = None
        if self.size > 1:
            self._connect(found, timeout)

    @property
    def first(self) -> bool:
        """Whether this is the first stage, which gets tokens."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage, whose outputs are the model's."""
        return self.rank == self.size - 1

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step: receive proxies, run the runner, and send its outputs on. The last stage returns them.

        It returns as soon as the sends have begun. The runner may then replay again: what is sent stays as it is. It
        raises what the runner raises, also for proxies that its slots refuse. It raises RankError, which names the
        rank, if another stage failed in this step, sent what no slot reads, is lost, or does not come. All later stages
        raise then, too. The next step runs normally, unless a rank is lost, or only one of those that share a stage
        failed in its step: then all of that stage raise in the next one.
        """
        self._steps += 1
        self._coordinator.begin()
        try:
            given = self._received(side)
            self.flush()
            outputs = self.runner(batch, **given)
            if self._after is not None:
                self._after.send(self._steps, proxies_in(outputs))
        except BaseException as error:
            self._fail(error)
            raise
        return outputs if self.last else None

    def flush(self) -> None:
        """Wait until the next stage has received the last step's proxies, for instance before this process ends.

        Each step does so with the proxies of the step before. Raise RankError, on this rank alone, if the stage does
        not come.
        """
        if self._after is not None:
            self._after.flush()

    def _received(self, side: Side) -> dict[str, Any]:
        """Return all side arguments.

        Proxies are received even if the step is wrong, since the next ones come after them.
        """
        given = dict(side)
        before = self._before
        if before is not None:
            step, error, proxies = before.receive()
            if error:
                raise RankError(f"step {step}: {before.other} has nothing for {before.me}: {error}")
            if step != self._steps:
                raise RankError(f"{before.other} is at step {step} of the pipeline, {before.me} at step {self._steps}")
            for key in proxies.keys() - self._keys:
                raise RankError(f"step {step}: {before.other} sends {key!r}, and no slot of {before.me} reads it")
            given[self._argument] = proxies
        if self._argument in side:
            raise ConfigError(f"{self._argument} is received from the stage before: do not give it")
        return given

    def _fail(self, error: BaseException) -> None:
        """Send the error to the ranks of this stage, unless the runner has, and to the next stage."""
        after = self._after
        with _noting(error):
            self._coordinator.refuse(error)
        if after is not None and after.broken is None and isinstance(error, Exception):
            text = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
            with _noting(error):
                after.flush()
                after.send(self._steps, {}, text)
                after.flush()

    def _connect(self, group: "dist.ProcessGroup", timeout: float) -> None:
        """Make a group for each neighbour, since gloo gives up a whole group if one message is late.

        Stages 0 and 1, 2 and 3, ... make one first, then 1 and 2, ... A stage without a partner makes one for itself,
        because torch.distributed names groups by how many a rank has.
        """
        device = self.runner.stage.backend.device
        ranks = self._coordinator
        backends = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
        if device.type != "cpu" and backends.get(device.type, "gloo") == "gloo":  # gloo only sends from host memory
            raise ConfigError(
                f"the group moves tensors by {backends}, not those on {device.type} between two ranks: make one that "
                "does"
            )
        each = _HEADSTART if ranks.quiet else GRACE + 2 * _HEADSTART
        timeout = timeout if ranks.quiet else max(timeout, ranks.timeout)
        own_timeout = timeout + self.rank * each
        limit = dt.timedelta(seconds=2 * (timeout + self.size * each))
        ranks.timeout = max(ranks.timeout, own_timeout + _HEADSTART)
        members = dist.get_process_group_ranks(group)
        me = members[self.rank]
        for parity in range(2):
            place = self.rank + (1 if self.rank % 2 == parity else -1)
            other = members[place] if 0 <= place < self.size else me
            try:
                host: Any = dist.new_group(
                    sorted({me, other}), limit, "gloo", use_local_synchronization=True, group_desc="slotgraph pipeline"
                )
            except RuntimeError as error:
                raise RankError(f"rank {me}: rank {other} did not come to make its stage of the pipeline") from error
            if other != me:
                neighbour = Neighbour(host, group, device, other, f"rank {me}", f"rank {other}", own_timeout)
                setattr(self, "_before" if place < self.rank else "_after", neighbour)


@contextlib.contextmanager
def _noting(error: BaseException) -> Iterator[None]:
    """Run a block, and turn its RankError into a note of an earlier error."""
    try:
        yield
    except RankError as other:
        error.add_note(str(other))


def proxies_in(outputs: Any) -> Proxies:
    """Return the tensors that a step returned by key, without those that are None.

    Raise ReplayError for anything else.
    """
    odd = [type(outputs).__name__]
    if isinstance(outputs, Mapping):
        found = {key: one for key, one in outputs.items() if one is not None}
        odd = [f"{type(one).__name__} under {key!r}" for key, one in found.items() if not torch.is_tensor(one)]
        if not odd:
            return found
    raise ReplayError(
        "the step of a stage that is not the last returns a mapping of tensors by key, got something of type "
        f'{odd[0]}: such as {{"hidden_states": ...}}'
    )
