"""Agreement: chooses one path and one bucket for all ranks, with the reason, from the choice of each."""

import collections
import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, get_args

import torch

from ...backends.base import Backend, Event
from ...dataflow.axes import TOKENS, Axis, Live, Sizes
from ...dataflow.capabilities import dtype_text
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, RankError
from ..engine.config import RunnerConfig, checked
from ..engine.hooks import Coordinator, Loop, RunStep, T
from ..engine.selection import BucketKey, Variant, sizes_of
from ..engine.statistics import Decision, RanksData, Why
from .group import AXES, EAGER, FAILED, FITS, LEFT, REFUSED, STOPPED, CallSite, Exchange, Message, Ranks

_BEGUN, _SENT, _JOINED, _FAILED = range(4)
"""The progress of a step: other ranks do not know of it, they know of it, they run it, or this rank has failed."""
_WHYS: Final[tuple[Why, ...]] = get_args(Why)
"""The reasons, whose indices messages have."""


class Agreement(Coordinator):
    """Makes one runner's steps agree with those of the same runner on other ranks.

    Attributes:
        ranks: The ranks.
        forced: Steps that the ranks agreed on, by the rank that decided them, and the reason.
    """

    alone = False

    def __init__(self, ranks: Ranks, name: str, parts: Mapping[str, str], axes: Sequence[Axis]) -> None:
        """Number the runner. parts: Facts that must be the same on all ranks."""
        if len(axes) > AXES:
            raise ConfigError(f"ranks exchange the sizes of {AXES} axes at most, and batches vary on {len(axes)}")
        ranks.runners += 1
        self.ranks = ranks
        self.rank, self.size, self.quiet, self.timeout = ranks.rank, ranks.size, ranks.quiet, ranks.timeout
        self.axes = tuple(axes)
        self.forced: dict[int, collections.Counter[Why]] = collections.defaultdict(collections.Counter)
        self._ahead: tuple[Decision, Live, Exchange] | None = None  # sent for the next step
        self._progress = _BEGUN
        self._name = f"runner {ranks.runners} ({name})"
        self._parts = parts
        self._call_site = self._loop_site = self._step_site(0)
        self._loop: Loop | None = None  # the loop that is open
        self._within: Loop | None = None  # the loop whose call of the runner is in progress
        self._is_reporting = False

    def begin(self) -> None:
        """Begin a step. This ends an open loop that the step does not belong to."""
        self._progress = _BEGUN
        self._end_loop()

    def _end_loop(self) -> None:
        """Leave the open loop, unless the step that begins belongs to it."""
        if self._loop is not None and self._within is None:
            self._leave(self._loop, ": a call of the runner ended it")

    def agree(self, own: Decision, live: Live, admit: Callable[[], None]) -> Decision:
        """Return the common decision of all ranks, after one exchange, or without one if `quiet`.

        Args:
            own: This rank's own choice.
            live: Its live sizes.
            admit: Raises the errors of the fill. It is not called for a batch that was agreed on ahead.

        Raises:
            RankError: A rank refused its batch, is at another call site, or does not come, or sizes of a shared batch
                differ.
        """
        site = self._site()
        if self.quiet:
            self._progress = _SENT
            self.ranks.quiet_step(site, self.timeout)
            self._progress = _JOINED
            self.ranks.live_sizes = {axis: (rows,) * self.size for axis, rows in zip(self.axes, live, strict=True)}
            return own
        if self._ahead is None:
            admit()
        self._progress = _SENT
        exchange = self._sent_ahead(own, live) or self._send(own, live)
        return self._agreed(own, exchange())

    def agree_ahead(self, own: Decision, live: Live) -> None:
        """Send the arguments of the next `agree` to the other ranks now. `agree` then only waits for their messages."""
        if self.quiet:
            return
        try:
            exchange = self._send(own, live)
        except RankError as error:  # the next step raises the error, as on the other ranks
            exchange = functools.partial(_raise, error)
        self._ahead = own, live, exchange

    def idle(self, own: Decision, live: Live) -> bool:
        """Return whether all ranks are idle, so that none runs a step. If not, `agree` reuses the exchange."""
        if self.quiet:
            return True
        messages = self._send(own, live, idle=True)()
        if all(one.idle for one in messages):
            self.ranks.live_sizes = {}
            return True
        self._ahead = own, live, lambda: messages
        return False

    def _site(self) -> CallSite:
        """Return the call site of this rank: a call, or a step of a loop. Raise RankError if the loop has ended."""
        if self._within is None:
            return self._call_site
        self.ranks.check_loop(self._loop_site, self._within.bit)
        return self._loop_site

    def _step_site(self, loop: int) -> CallSite:
        """Make the call site of the steps of a loop, given the loop's bit, or of calls for bit 0."""
        return CallSite(f"a step of {'steps() of ' * bool(loop)}{self._name}", {**self._parts, "loop": str(loop)})

    def _send(self, own: Decision, live: Live, *, idle: bool = False) -> Exchange:
        """Send this rank's choice to all ranks."""
        site = self._site()
        loop = 0 if self._within is None else self._within.bit
        answer, text = (EAGER, own.reason) if own.bucket is None else (FITS, "")
        bucket = own.bucket if isinstance(own.bucket, int) else 0  # several axes are for equal ranks alone
        message = Message(site.digest, answer, bucket, _WHYS.index(own.why), idle, live, text)
        return self.ranks.begin(message, site, self.timeout, loop)

    def _sent_ahead(self, own: Decision, live: Live) -> Exchange | None:
        """Return the exchange that was begun ahead, if any. Raise RankError if it was for another batch."""
        if self._ahead is None:
            return None
        agreed, sizes, exchange = self._ahead
        self._ahead = None
        if (agreed, sizes) != (own, live):
            exchange()
            present = f"sizes {live} of {', '.join(axis.name for axis in self.axes)}: {own.reason}"
            error = RankError(f"this is not the batch that was agreed on ahead, with sizes {sizes}; it has {present}")
            self._failed(error)
            raise error
        return exchange

    def _agreed(self, own: Decision, messages: Sequence[Message]) -> Decision:
        """Return and store the decision of all ranks, from their messages. Raise RankError if one refused its batch."""
        rank = _decisive(messages)
        if messages[rank].answer == REFUSED:
            raise RankError(f"rank {rank} refused its batch, so that no rank runs the step: {messages[rank].text}")
        self._check_shared(messages)
        self.ranks.live_sizes = {axis: tuple(one.live[i] for one in messages) for i, axis in enumerate(self.axes)}
        self.ranks.messages = tuple(messages)
        self._progress = _JOINED
        self.agreed = agree(own, messages, len(self.axes) - 1)
        self.forced[rank][self.agreed.why] += 1
        return self.agreed

    def _check_shared(self, messages: Sequence[Message]) -> None:
        """Raise RankError, on all ranks alike, if ranks that share a batch have different sizes of it."""
        shards = self.ranks.shards
        if shards == 1 or not self.ranks.batches:
            return
        different = list[str]()
        for first in range(0, self.size, shards):
            if len({one.live for one in messages[first : first + shards]}) > 1:
                for rank in range(first, first + shards):
                    sizes = [f"{n} {axis.name}" for n, axis in zip(messages[rank].live, self.axes, strict=False)]
                    different.append(f"rank {rank} brings {', '.join(dict.fromkeys(sizes))}")
        if different:
            each = f"each {shards} ranks in a row share a batch, so that no rank runs the step"
            raise RankError(f"{each}: {'; '.join(different)}")

    def refuse(self, error: BaseException) -> None:
        """Notify the other ranks, which wait for this rank's step or run it, that this rank failed.

        Raises the errors of `agree`.
        """
        if self._progress == _SENT and isinstance(error, Exception):
            return  # the other ranks raise the same error from the same messages
        if self._progress == _BEGUN and self._ahead is not None:  # the other ranks run this step
            *_, exchange = self._ahead
            self._ahead = None
            self._progress = _SENT
            exchange()
            self._failed(error)
        elif self._progress == _BEGUN and not self.quiet and isinstance(error, Exception):
            self._progress, site = _SENT, self._site()
            message = Message(site.digest, REFUSED, live=(0,) * len(self.axes), text=str(error))
            self.ranks.begin(message, site, self.timeout)()
        else:
            self._failed(error)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Run a block without sending its errors to the other ranks, since the caller does that."""
        self._is_reporting = True
        try:
            yield
        finally:
            self._is_reporting = False

    def _failed(self, error: BaseException) -> None:
        """Notify the other ranks, once, that a step failed. If another rank failed before, add a note to the error."""
        before = self._progress
        self._progress = _FAILED
        if before == _FAILED or (self._is_reporting and isinstance(error, Exception)):
            return
        site = self._call_site if self._within is None else self._loop_site
        answer = STOPPED if before == _BEGUN and not self.quiet else FAILED
        if other := self.ranks.stop(answer, _failure(site.name, error), is_new=before == _BEGUN):
            error.add_note(other)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Run a block that checks a batch before its step, and send its error to the other ranks.

        Raise RankError if a step was agreed on ahead.
        """
        if self._ahead is not None:
            raise RankError("the step that was agreed on ahead has not been run: call the runner with its batch first")
        self.begin()
        try:
            yield
        except BaseException as error:
            self.refuse(error)
            raise

    def run(self, step: Callable[..., T], *args: Any) -> T:
        """Run a step that all ranks run. If it raises, notify the others."""
        try:
            return step(*args)
        except BaseException as error:
            self._failed(error)
            raise

    @contextlib.contextmanager
    def loop(self) -> Iterator[Loop]:
        """Run a block that prepares a loop of steps. Raise RankError, at its end, if one rank refuses them."""
        self.begin()
        loop = Loop(self.ranks.begin_loop() if self.quiet else 0)
        try:
            if self.quiet:
                self.ranks.quiet_step(self._call_site, self.timeout)
            yield loop
        except BaseException as error:
            if self.quiet or not isinstance(error, Exception):
                text = _failure(f"steps() of {self._name}", error)
                self.ranks.stop(LEFT if loop.bit else STOPPED, text, loop.bit)
            else:
                self.gather("steps() begin", str(error))
            raise
        if not self.quiet:
            for rank, (text, begins) in enumerate(self.gather("steps() begin", "", 1)):
                if not begins:
                    raise RankError(f"rank {rank} refused its batch, so that no rank starts the loop: {text}")
            loop.bit = self.ranks.begin_loop()
        self._loop, self._loop_site = loop, self._step_site(loop.bit)

    @contextlib.contextmanager
    def looping(self, loop: Loop) -> Iterator[None]:
        """Run a block that hands out a loop's steps. If it ends early, notify the ranks still in the loop."""
        try:
            yield
        except BaseException as error:
            self._leave(loop, "" if isinstance(error, GeneratorExit) else f": {type(error).__name__}: {error}")
            raise
        self.ranks.open_loops &= ~loop.bit
        self._leave(loop, "")

    def _leave(self, loop: Loop, why: str) -> None:
        """Leave a loop, and notify the other ranks, unless they know."""
        if self._loop is loop:
            self._loop = None
        if loop.bit & self.ranks.open_loops:
            self.ranks.stop(LEFT, f"left its loop of steps() of {self._name}{why}", loop.bit)

    @contextlib.contextmanager
    def within(self, loop: Loop) -> Iterator[None]:
        """Run a block in which a loop calls its runner."""
        self._within = loop
        try:
            yield
        finally:
            self._within = None

    def gather(self, what: str, text: str = "", number: int = 0, *, capturing: bool = False) -> list[tuple[str, int]]:
        """Gather a text and a number from each rank, outside of a step."""
        ranks = self.ranks
        if self.size == 1 or ranks.alone:
            return [(text, number)]
        self._end_loop()
        site = CallSite(f"{self._name}: {what}", self._parts)
        timeout = ranks.capture_timeout if capturing else ranks.timeout
        exchange = ranks.begin(Message(site.digest, bucket=number, text=text), site, timeout)
        return [(one.text, one.bucket) for one in exchange()]

    def warm_up(self, step: RunStep, backend: Backend) -> RunStep:
        """Wrap a step for warm-ups: it waits for the device, and raises RankError if another rank is lost."""

        def run() -> Any:
            outputs = step()
            event = backend.event()
            what = f"{self._name}: a warm-up before a capture"
            self.ranks.wait(event, backend.device, what, self.ranks.capture_timeout, together=False)
            return outputs

        return run

    def wait(self, event: Event, device: torch.device, *, read: bool = False) -> None:
        """Wait until a device has passed an event, for at most the ranks' `timeout`."""
        self.ranks.wait(event, device, "the end of a step on the device", self.timeout, together=not read)

    def as_data(self) -> RanksData:
        """Return the statistics as plain data."""
        forced = {rank: dict[str, int](sorted(one.copy().items())) for rank, one in sorted(self.forced.copy().items())}
        return {**super().as_data(), "over": self.ranks.over, "exchanges": self.ranks.exchanges, "forced": forced}


def _decisive(messages: Sequence[Message]) -> int:
    """Return the rank that decides: the first that refuses, else runs eagerly, else needs the largest bucket."""
    return max(range(len(messages)), key=lambda rank: (messages[rank].answer, messages[rank].bucket))


def agree(own: Decision, messages: Sequence[Message], leading: int) -> Decision:
    """Return the common decision and the rank that forced it. leading: The index of the buckets' axis in live sizes."""
    rank = _decisive(messages)
    one = messages[rank]
    if one.answer == EAGER:
        return Decision("eager", None, _WHYS[one.why], f"rank {rank}: {one.text}", rank)
    reason = f"bucket {one.bucket} fits the {one.live[leading]} rows of rank {rank}, the most of all"
    return Decision(own.path, one.bucket, "fits", reason, rank)


def _failure(what: str, error: BaseException) -> str:
    """Describe where and why a rank failed."""
    return f"failed in {what}: {type(error).__name__}: {error}"


def _raise(error: RankError) -> NoReturn:
    """Raise the error of an exchange that failed at its begin."""
    raise error


def coordinator_of(
    declaration: Declaration,
    runner: str,
    config: RunnerConfig,
    sizes: Mapping[BucketKey, Sizes],
    patterns: Iterable[Collection[str]],
    *leading: Axis,
    variants: Sequence[Variant] = (),
) -> Coordinator:
    """Return the coordinator of a runner: an `Agreement` if its declaration has ranks, else one for a single rank.

    Args:
        declaration: The slots, and the ranks.
        runner: The runner's name.
        config: Its options.
        sizes: Each bucket's padded sizes.
        patterns: Patterns of absent slots that it captures.
        leading: The axis that buckets are chosen by, if there are any.
        variants: The values of fields that its graphs have frozen.

    Raises:
        ConfigError: The ranks do not fit the buckets or options.
    """
    if declaration.ranks is None:
        return Coordinator()
    ranks: Ranks = checked("ranks", "Ranks(...), or None", declaration.ranks, Ranks)
    for bucket, padded in sizes.items():
        tokens = padded.get(TOKENS, sizes_of(bucket)[0])
        if tokens % ranks.shards:
            raise ConfigError(
                f"bucket {bucket} has {tokens} tokens, which do not divide among {ranks.shards} shards: choose buckets "
                f"whose tokens are multiples of {ranks.shards}"
            )
    if config.lazy and ranks.size > 1:
        raise ConfigError(
            "lazy=True captures at the first batch, which each rank gets at another time: ranks capture together, so "
            "leave it out"
        )
    absent = sorted(" and ".join(map(repr, sorted(pattern))) for pattern in patterns if pattern)
    parts = {
        "axes": ", ".join(map(str, declaration.varying)),
        "buckets": ", ".join(map(str, sizes)) or "none",
        "variants": "; ".join(map(str, variants)) or "none",
        "width": str(config.width),
        "absent=": ", ".join(absent) or "none",
        "fields": ", ".join(declaration.fields) or "none",
    }
    for name, slot in declaration.slots.items():
        shape = ", ".join(map(str, slot.shape))
        parts[f"slot {name!r}"] = f"{type(slot).__name__} {dtype_text(slot.dtype)} [{shape}] on {slot.placement}"
    name = f"{runner} of {declaration.name}"
    return Agreement(ranks, name, parts, (*declaration.varying, *leading))
