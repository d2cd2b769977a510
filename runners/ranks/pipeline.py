"""Pipelines: each stage runs a part of the model's layers on a rank of its own, and hands on what it computed."""

import datetime as dt
from collections.abc import Callable
from typing import Any, Final, NoReturn, final

import torch.distributed as dist

from ...dataflow.errors import ConfigError, RankError
from ...dataflow.sources import Side
from ..arguments import check_seconds, checked, refuse
from ..exclusive import Unique, opaque
from ..runner import Runner
from .group import checked_group
from .pipeline_letter import Letter, Spec, told
from .pipeline_proxies import Proxies, flattened, nested
from .pipeline_wire import Downstream, Neighbour, Upstream
from .rollcall import GRACE

_HEADSTART: Final = 1.0
"""Seconds that whoever learns of a loss from others is more patient than they: their errors so name who is lost."""


@final
@opaque
class PipelineStage(Unique):
    """Runs a runner's steps as one stage of a pipeline, whose stages are the ranks of a process group, in order.

        stage = PipelineStage(runner, group)
        logits = stage(batch)            # on every rank, with the same batch; None but on the last

    The step of a stage that is not the last returns proxies: a mapping of tensors by key, such as hidden_states and
    residual, of the batch's live rows (`output_rows=TOKENS`). The next stage's runner reads them from the side argument
    that `proxies` names: `copied(..., source=side("pp_proxy_tensors.hidden_states"))`, as in
    `standard.PipelineProxies`. They are received in the slots themselves where a graph takes the batch, so that its
    fill finds them in place and resets their tails alone; else they are copied.

    group: of torch.distributed; the default one where none is given, and a pipeline of one stage where there is none.
    It moves tensors of the runner's device, by NCCL for instance. What is in host memory goes through groups of gloo
    that are made here, one for each two neighbours, by all ranks at once and in the same order as other stages of
    theirs. timeout: seconds that a stage waits for the one before or after, and one second more for each stage that
    stands before it; with `lazy`, captures take their part of that.

    A runner with `ranks=`, those that share the layers of its stage, each of them with a pipeline of its own: a rank
    whose step ends before its runner agrees with the others refuses it there, so that all of the stage raise. Stages
    wait as long as `Ranks` do, if that is longer, and four seconds more a stage, and their ranks for each other a
    second longer than for another stage: so the first to raise is who waits for the one that is lost.

    Which proxies come is told by the stage that sends them, in a letter before each step, so that optional ones may
    come or not, and nobody waits for what is not sent. Raises ConfigError where the group cannot move the runner's
    tensors, where the first stage's slots require proxies, or where those of another read none.
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
        self.rank, self.size = _place(group)
        self._proxies = Proxies(runner, proxies)
        self._coordinator = runner.parts.coordinator
        self._steps = 0
        self._before: Upstream | None = None
        self._after: Downstream | None = None
        self._check(group)
        if self.size > 1:
            self._connect(group, timeout)

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
        Raises what the runner raises, and RankError, which names the rank: where another stage failed in this step,
        sent other proxies than the slots declare, refused those of the step before, is lost, or does not come.
        All later stages raise then, too. The next step is run as if nothing had been, unless a rank is lost.
        """
        self._steps += 1
        self._coordinator.begin()
        try:
            received = self._given(side) if self._before is None else self._received(self._before, batch, side)
            self.flush()
            outputs = self.runner(batch, **received)
            if self._after is not None:
                tensors = flattened(outputs)
                specs = {key: Spec.of(one) for key, one in tensors.items()}
                self._after.send(Letter(self._steps, specs), tensors)
        except BaseException as error:
            self._fail(error)
            raise
        return outputs if self.last else None

    def flush(self) -> None:
        """Wait until the next stage has received the last step's proxies: before this process ends, for one.

        Each step does so with those of the step before. Raises RankError where it refused them, or does not come; on
        this rank alone, since other ranks of its stage may not ask.
        """
        if self._after is not None:
            self._after.settle()

    def _received(self, before: Upstream, batch: Any, side: Side) -> dict[str, Any]:
        """All side arguments. Whatever is wrong with the step, its tensors are received: the next ones come after."""
        letter, near = before.take(), before.neighbour
        if letter.error:
            before.accept(letter, {})
            _raise(f"step {letter.step}: {near.other} has nothing for {near.me}: {letter.error}")
        try:
            if letter.step != self._steps:
                _raise(f"{near.other} is at step {letter.step} of the pipeline, {near.me} at step {self._steps}")
            targets = self._proxies.places(letter, batch, self._given(side), (near.me, near.other))
        except BaseException as error:
            before.refuse(letter, error, self.runner.parts.stage.backend.device)
            raise
        before.accept(letter, targets)
        return {**side, self._proxies.argument: nested(targets)}

    def _given(self, side: Side) -> Side:
        """The caller's side arguments. ConfigError where the proxies are among them."""
        if self._proxies.argument in side:
            message = f"{self._proxies.argument} is received from the stage before: do not give it"
            raise ConfigError(message)
        return side

    def _fail(self, error: BaseException) -> None:
        """Tell the ranks of this stage, unless the runner has, and the next stage, that this rank has no step.

        What they have to say to that is noted in the error. An interrupt waits for no one's answer.
        """
        after = self._after
        _noting(error, lambda: self._coordinator.refuse(error))
        if after is not None and isinstance(error, Exception):
            letter = Letter(self._steps, error=told(error))
            for say in (after.settle, lambda: after.send(letter, {}), after.settle):
                if after.neighbour.broken is None:
                    _noting(error, say)

    def _check(self, group: "dist.ProcessGroup | None") -> None:
        if self.first and self._proxies.required:
            keys = ", ".join(map(repr, self._proxies.required))
            message = f"the first stage receives nothing, but its slots require {keys} of {self._proxies.argument}"
            raise ConfigError(message)
        if not self.first and not self._proxies.wanted:
            message = (
                f"stage {self.rank} of {self.size} has no slot that reads {self._proxies.argument}: declare one with "
                f"source=side('{self._proxies.argument}.hidden_states'), or name another argument by proxies="
            )
            raise ConfigError(message)
        kind = self.runner.parts.stage.backend.device.type
        if self.size == 1 or kind == "cpu":
            return
        ways = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
        if ways.get(kind, "gloo") == "gloo":  # which sends from host memory alone
            message = f"the group moves tensors by {ways}, not those on {kind} between two ranks: make one that does"
            raise ConfigError(message)

    def _connect(self, group: "dist.ProcessGroup | None", timeout: float) -> None:
        """Make a group for each neighbour, since gloo gives up all of a group where one message is late.

        Those of stages 0 and 1, 2 and 3, ... come first, then those of 1 and 2, ...; a stage without a partner makes
        one for itself, because torch.distributed names groups by how many a rank has: all must have as many.
        """
        found: Any = dist.group.WORLD if group is None else group
        members, patience = dist.get_process_group_ranks(found), self._patience(timeout, self.rank)
        me, limit = members[self.rank], dt.timedelta(seconds=2 * self._patience(timeout, self.size))
        self._coordinator.be_patient(patience + _HEADSTART)
        for turn in range(2):
            place = self.rank + (1 if self.rank % 2 == turn else -1)
            other = members[place] if 0 <= place < self.size else me
            try:
                host: Any = dist.new_group(
                    sorted({me, other}), limit, "gloo", use_local_synchronization=True, group_desc="slotgraph pipeline"
                )
            except RuntimeError as error:
                message = f"rank {me}: rank {other} did not come to make its stage of the pipeline"
                raise RankError(message) from error
            if other == me:
                continue
            places = dist.get_group_rank(host, other), place
            neighbour = Neighbour(host, found, *places, f"rank {me}", f"rank {other}", patience)
            if place < self.rank:
                self._before = Upstream(neighbour)
            else:
                self._after = Downstream(neighbour)

    def _patience(self, timeout: float, stage: int) -> float:
        """Seconds that a stage waits for another: longer than the one before takes to find out which rank is lost."""
        if self._coordinator.quiet:
            return timeout + stage * _HEADSTART
        return max(timeout, self._coordinator.timeout) + stage * (GRACE + 2 * _HEADSTART)


def _noting(error: BaseException, say: Callable[[], None]) -> None:
    """Say it; what others have to say to that is noted in the error."""
    try:
        say()
    except RankError as other:
        error.add_note(str(other))


def _raise(message: str) -> NoReturn:
    raise RankError(message)


def _place(group: "dist.ProcessGroup | None") -> tuple[int, int]:
    """This process' rank and the size of the group; ConfigError where it is not in it."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    found = checked_group(group)
    return dist.get_rank(found), dist.get_world_size(found)
