"""Wires: how a stage of a pipeline sends to the next one, and receives from the one before, by torch.distributed."""

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
import torch.distributed as dist

from ...dataflow.errors import RankError
from .pipeline_letter import Letter, told

if TYPE_CHECKING:
    from torch.distributed import Work

LETTERS, REPLIES, TENSORS = 1, 2, 3
"""Tags of messages between hosts."""
_SOON: Final = 0.99


@attrs.define(eq=False)
class Neighbour:
    """A neighbour in the pipeline.

    host: the group that letters and tensors on the host travel in, `group`: those on devices. host_place, place: the
    neighbour's rank in each. me, other: this rank and that one in words. patience: seconds that one is waited for.
    broken: why there is nothing to say any more.
    """

    host: "dist.ProcessGroup"
    group: "dist.ProcessGroup"
    host_place: int
    place: int
    me: str
    other: str
    patience: float
    broken: RankError | None = None

    def check(self) -> None:
        """RankError where there is nothing to say any more."""
        if self.broken is not None:
            message = str(self.broken)
            raise RankError(message)

    def send(self, tensor: torch.Tensor, tag: int) -> "Work":
        """Begin to send a tensor, which must stay as it is until that is done. RankError where the other is gone."""
        return self._begin(dist.isend, "group_dst", tensor, tag)

    def receive(self, tensor: torch.Tensor, tag: int) -> "Work":
        """Begin to receive into a contiguous tensor. RankError where the other is gone."""
        return self._begin(dist.irecv, "group_src", tensor, tag)

    def _begin(self, call: Callable[..., Any], end: str, tensor: torch.Tensor, tag: int) -> "Work":
        self.check()
        where = (self.host, self.host_place, tag) if tensor.is_cpu else (self.group, self.place, 0)
        try:
            work: Work = call(tensor, group=where[0], tag=where[2], **{end: where[1]})
        except RuntimeError as error:
            lost = self._lose("is gone: its connection was lost")
            raise lost from error
        return work

    def wait(self, work: "Work") -> None:
        """Wait for a message between hosts. RankError, which names the other, where it does not come in time."""
        start = time.monotonic()
        try:
            work.wait(dt.timedelta(seconds=self.patience))
        except RuntimeError as error:
            late = time.monotonic() - start >= self.patience * _SOON
            lost = self._lose(
                f"said nothing for {self.patience:g} s: it is dead, stuck, or does other steps"
                if late
                else "is gone: its connection was lost"
            )
            raise lost from error

    def finish(self, work: "Work", tensor: torch.Tensor) -> None:
        """Wait for a tensor's message: on the host, or in stream order."""
        if tensor.is_cpu:
            self.wait(work)
        else:
            work.wait()

    def _lose(self, how: str) -> RankError:
        self.broken = RankError(f"{self.me}: {self.other} {how}")
        return self.broken

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """A part of the talk that, broken off, leaves messages which nobody reads: nothing more is said then."""
        try:
            yield
        except BaseException as error:
            if self.broken is None:
                self._lose(f"is not talked to any more, since a step was broken off: {error}")
            raise


@attrs.define(eq=False)
class Upstream:
    """The stage before, which proxies come from."""

    neighbour: Neighbour

    def take(self) -> Letter:
        """What it tells of its step. RankError where it does not come."""
        blank = Letter.blank()
        with self.neighbour.unbroken():
            self.neighbour.wait(self.neighbour.receive(blank, LETTERS))
            return Letter.read(blank)

    def accept(self, letter: Letter, targets: Mapping[str, torch.Tensor]) -> None:
        """Receive the tensors that a letter tells of. RankError where they do not come."""
        self._receive(targets, Letter(letter.step))

    def refuse(self, letter: Letter, error: BaseException, device: torch.device) -> None:
        """Tell why its tensors are not wanted, and let them come into memory that is dropped, so that it may go on."""
        dropped = {key: spec.empty(device) for key, spec in letter.specs.items()}
        self._receive(dropped, Letter(letter.step, error=told(error)))

    def _receive(self, targets: Mapping[str, torch.Tensor], reply: Letter) -> None:
        neighbour = self.neighbour
        with neighbour.unbroken():
            answer = reply.tensor()
            answered = neighbour.send(answer, REPLIES)
            works = [(neighbour.receive(one, TENSORS), one) for one in targets.values() if one.numel()]
            for work, tensor in works:
                neighbour.finish(work, tensor)
            neighbour.wait(answered)


@attrs.define(eq=False)
class _Sent:
    """A step's messages under way, and the memory that they are read from."""

    letter: torch.Tensor
    tensors: list[torch.Tensor]
    works: "list[tuple[Work, torch.Tensor]]"
    reply: torch.Tensor
    replied: "Work"


@attrs.define(eq=False)
class Downstream:
    """The stage after, which proxies go to."""

    neighbour: Neighbour
    _sent: _Sent | None = None

    def send(self, letter: Letter, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to send a letter and its tensors; the caller may overwrite these. RankError where the other is gone.

        Tensors on the host are copied. Those on a device are read in stream order: what the present stream does next
        comes after that.
        """
        neighbour, written, reply = self.neighbour, letter.tensor(), Letter.blank()
        kept = [_steady(tensor) for tensor in tensors.values() if tensor.numel()]
        with neighbour.unbroken():
            works = [(neighbour.send(written, LETTERS), written)]
            for tensor in kept:
                work = neighbour.send(tensor, TENSORS)
                if tensor.is_cpu:
                    works.append((work, tensor))
                else:
                    work.wait()
            self._sent = _Sent(written, kept, works, reply, neighbour.receive(reply, REPLIES))

    def settle(self) -> None:
        """Wait until the other has taken the step sent last. RankError where it refused it, is late, or is gone."""
        sent, self._sent = self._sent, None
        neighbour = self.neighbour
        neighbour.check()  # before a step, which other ranks of the stage must not run without this one
        if sent is None:
            return
        with neighbour.unbroken():
            neighbour.wait(sent.replied)
            for work, tensor in sent.works:
                neighbour.finish(work, tensor)
        reply = Letter.read(sent.reply)
        if reply.error:
            message = f"{neighbour.other} refused what {neighbour.me} sent in step {reply.step}: {reply.error}"
            raise RankError(message)


def _steady(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in one piece, which stays as it is until it is sent."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.is_cpu else tensor.contiguous()
