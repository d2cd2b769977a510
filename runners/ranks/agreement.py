"""Agreement: one path and one bucket for all ranks, and why, from what each of them would have done alone."""

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
from ..config import RunnerConfig, checked
from ..hooks import Coordinator, Loop, Step, T
from ..statistics import Decision, RanksData, Why
from .group import AXES, EAGER, FAILED, FITS, LEFT, REFUSED, STOPPED, Exchange, Message, Place, Ranks

_BEGUN, _SENT, _JOINED, _FAILED = range(4)
"""How far a fill is: the others know nothing of it, they know of it, they run its step, or this rank has failed."""
_WHYS: Final[tuple[Why, ...]] = get_args(Why)
"""Reasons, by the numbers that messages have for them."""


class Agreement(Coordinator):
    """Has one runner's steps agree with those of the same runner on other ranks.

    Attributes:
        ranks: The ranks.
        forced: Steps that the ranks agreed on, by the rank that decided them, and why.
    """

    alone = False

    def __init__(self, ranks: Ranks, name: str, parts: Mapping[str, str], axes: Sequence[Axis]) -> None:
        """Number the runner. parts: what must be the same on all ranks."""
        if len(axes) > AXES:
            raise ConfigError(
                f"ranks tell each other the sizes of {AXES} axes at most, and batches vary on {len(axes)}"
            )
        ranks.runners += 1
        self.ranks = ranks
        self.rank, self.size, self.quiet, self.timeout = ranks.rank, ranks.size, ranks.quiet, ranks.timeout
        self.axes = tuple(axes)
        self.forced: dict[int, collections.Counter[Why]] = collections.defaultdict(collections.Counter)
        self._ahead: tuple[Decision, Live, Exchange] | None = None
        self._fill = _BEGUN
        self._name, self._parts = f"runner {ranks.runners} ({name})", parts
        self._place = self._place_of_loop = self._place_of(0)
        self._loop: Loop | None = None  # the one that is open
        self._within: Loop | None = None  # the one that calls the runner now
        self._is_reporting = False

    def begin(self) -> None:
        """A fill begins. It ends a loop of steps that it is no part of."""
        self._fill = _BEGUN
        self._end_loop()

    def _end_loop(self) -> None:
        """Leave the open loop, if what begins is no part of it."""
        if self._loop is not None and self._within is None:
            self._leave(self._loop, ": a call of the runner ended it")

    def settle(self, own: Decision, live: Live, admit: Callable[[], None]) -> Decision:
        """What all ranks do, by one exchange, or none if quiet. admit: not called for a batch that was agreed on ahead.

        RankError if a rank refused its batch, is elsewhere, or does not come, or ranks bring different sizes of one.
        """
        place = self._place_in(self._within)
        if self.quiet:
            self._fill = _SENT
            self.ranks.attend(place.at, self.timeout)
            self._fill, self.ranks.brought = _JOINED, self._same(live)
            return own
        if self._ahead is None:
            admit()
        self._fill = _SENT
        messages = self._messages(self._begun_ahead(own, live) or self._begin(own, live), place, self.timeout)
        return self._settled(own, messages)

    @contextlib.contextmanager
    def loop(self, every: int) -> Iterator[Loop]:
        """A block that prepares steps which follow one another. RankError, at its end, if one rank refuses them.

        every: ranks agree on each step whose number divides by it, so all must have the same.
        """
        self.begin()
        loop = Loop(every, self.ranks.begin_loop() if self.quiet else 0)
        try:
            if self.quiet:
                self.ranks.attend(self._place.at, self.timeout)
            yield loop
        except BaseException as error:
            if self.quiet or not isinstance(error, Exception):
                text = _text(f"steps() of {self._name}", error)
                self.ranks.stop(LEFT if loop.bit else STOPPED, text, loop.bit)
            else:
                self.tell("steps() begin", str(error))
            raise
        if not self.quiet:
            self._check_loops(self.tell("steps() begin", "", every))
            loop.bit = self.ranks.begin_loop()
        self._loop, self._place_of_loop = loop, self._place_of(loop.bit)

    def _check_loops(self, told: Sequence[tuple[str, int]]) -> None:
        """RankError, on all ranks alike, if one refused its first batch or agrees after another number of steps."""
        for rank, (text, number) in enumerate(told):
            if not number:
                raise RankError(f"rank {rank} refused its batch, so that no rank begins: {text}")
        if len({number for _, number in told}) > 1:
            each = ", ".join(f"rank {rank} after {number}" for rank, (_, number) in enumerate(told))
            raise RankError(
                f"ranks agree after different numbers of steps: {each}; give all the same agree_every=, and where one "
                "is watched (a recording, a debug mode) or has another lowering, leave it out"
            )

    @contextlib.contextmanager
    def looping(self, loop: Loop) -> Iterator[None]:
        """A block that hands out a loop's steps. Ranks that go on with the loop are told if it ends early."""
        try:
            yield
        except BaseException as error:
            self._leave(loop, "" if isinstance(error, GeneratorExit) else f": {type(error).__name__}: {error}")
            raise
        self.ranks.open &= ~loop.bit
        self._loop = None if self._loop is loop else self._loop

    @contextlib.contextmanager
    def within(self, loop: Loop) -> Iterator[None]:
        """A block in which a loop calls its runner."""
        self._within = loop
        try:
            yield
        finally:
            self._within = None

    def _place_in(self, loop: Loop | None) -> Place:
        """Where ranks are in a call, or in a step of a loop. RankError if the loop has ended."""
        if loop is None:
            return self._place
        if loop.bit & ~self.ranks.open:
            raise RankError(f"{self._place_of_loop.at}: {self.ranks.ended}: begin again with all live requests")
        return self._place_of_loop

    def _place_of(self, loop: int) -> Place:
        """Where ranks are in a step of the loop with this bit, or in a call for 0."""
        return Place(f"a step of {'steps() of ' * bool(loop)}{self._name}", {**self._parts, "loop": str(loop)})

    def _leave(self, loop: Loop, why: str) -> None:
        """Tell the other ranks, unless they know, that this one has left a loop."""
        self._loop = None if self._loop is loop else self._loop
        if loop.bit & self.ranks.open:
            self.ranks.stop(LEFT, f"left its loop of steps() of {self._name}{why}", loop.bit)

    def follow(self, own: Decision, live: Live, loop: Loop, *, idle: bool) -> Decision | None:
        """What all ranks do in a step of a loop, as `settle`; None where all are idle."""
        place = self._place_in(loop)
        if self.quiet:
            return self.settle(own, live, lambda: None)
        self._fill = _SENT
        messages = self._messages(self._begin(own, live, loop, idle=idle), place, self.timeout)
        return None if all(one.idle for one in messages) else self._settled(own, messages)

    def _settled(self, own: Decision, messages: Sequence[Message]) -> Decision:
        """What all ranks do, from what each of them says."""
        if (refused := _first(messages, REFUSED)) is not None:
            raise RankError(
                f"rank {refused} refused its batch, so that no rank runs the step: {messages[refused].text}"
            )
        self._check_shared(messages)
        self.ranks.brought = {axis: tuple(one.live[i] for one in messages) for i, axis in enumerate(self.axes)}
        self.ranks.said = tuple(messages)
        self._fill = _JOINED
        self.agreed, rank = agree(own, messages, len(self.axes) - 1)
        self.forced[rank][self.agreed.why] += 1
        return self.agreed

    def ahead(self, own: Decision, live: Live) -> None:
        """Tell the others now what `settle` will be asked for next; it then only waits for what they told."""
        if self.quiet:
            return
        try:
            exchange = self._begin(own, live)
        except RankError as error:  # which is the step's, as on the other ranks
            exchange = functools.partial(_raise, error)
        self._ahead = own, live, exchange

    def idle(self, own: Decision, live: Live) -> bool:
        """Whether all ranks are idle, so that none runs a step; else `settle` is asked for it next."""
        if self.quiet:
            return True
        messages = self._begin(own, live, idle=True)(self.timeout)
        if all(one.idle and one.place == self._place_in(self._within).digest for one in messages):
            self.ranks.brought = {}
            return True
        self._ahead = own, live, lambda _: messages
        return False

    def _begin(self, own: Decision, live: Live, loop: Loop | None = None, *, idle: bool = False) -> Exchange:
        """Tell all ranks what this one would do. loop: that of the step, if it is not the one that calls the runner."""
        answer, text = (EAGER, own.reason) if own.bucket is None else (FITS, "")
        loop = loop or self._within
        place = self._place_in(loop)
        told = Message(place.digest, answer, own.bucket or 0, _WHYS.index(own.why), idle, live, text)
        return self.ranks.begin(told, place.at, self.timeout, 0 if loop is None else loop.bit)

    def _begun_ahead(self, own: Decision, live: Live) -> Exchange | None:
        """The exchange that was begun ahead, if one was. RankError if it was of another batch."""
        if self._ahead is None:
            return None
        (told, sizes, exchange), self._ahead = self._ahead, None
        if (told, sizes) != (own, live):
            exchange(self.timeout)
            here = f"sizes {live} of {', '.join(axis.name for axis in self.axes)}: {own.reason}"
            error = RankError(f"this is not the batch that was agreed on ahead, with sizes {sizes}; it has {here}")
            self._failed(error)
            raise error
        return exchange

    def _messages(self, begun: Exchange, place: Place, timeout: float) -> list[Message]:
        """What all ranks say at one place. RankError if some are at another: each then says where it is."""
        messages = begun(timeout)
        if any(one.place != place.digest for one in messages):
            raise self.ranks.apart(place, messages)
        return messages

    def _check_shared(self, messages: Sequence[Message]) -> None:
        """RankError, on all ranks alike, if ranks that share a batch bring different sizes of it."""
        shards = self.ranks.shards
        if shards == 1 or not self.ranks.batches:
            return
        told = list[str]()
        for first in range(0, self.size, shards):
            if len({one.live for one in messages[first : first + shards]}) > 1:
                for rank in range(first, first + shards):
                    sizes = [f"{n} {axis.name}" for n, axis in zip(messages[rank].live, self.axes, strict=False)]
                    told.append(f"rank {rank} brings {', '.join(dict.fromkeys(sizes))}")
        if told:
            each = f"each {shards} ranks in a row share a batch, so that no rank runs the step"
            raise RankError(f"{each}: {'; '.join(told)}")

    def _same(self, live: Live) -> dict[Axis, tuple[int, ...]]:
        """What ranks bring that all bring the same."""
        return {axis: (rows,) * self.size for axis, rows in zip(self.axes, live, strict=True)}

    def refuse(self, error: BaseException) -> None:
        """Tell the others, who wait for this rank's fill, or will if they know already. Raises as `settle`."""
        if self._fill == _SENT and isinstance(error, Exception):
            return  # it is what the ranks said to each other
        if self._fill == _BEGUN and self._ahead is not None:  # the others run the step: this rank vouched for its batch
            (*_, exchange), self._ahead, self._fill = self._ahead, None, _SENT
            exchange(self.timeout)
            self._failed(error)
        elif self._fill == _BEGUN and not self.quiet and isinstance(error, Exception):
            self._fill, place = _SENT, self._place_in(self._within)
            refusal = Message(place.digest, REFUSED, live=(0,) * len(self.axes), text=str(error))
            self._messages(self.ranks.begin(refusal, place.at, self.timeout), place, self.timeout)
        else:
            self._failed(error)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """A block whose errors the caller reports to the other ranks itself."""
        self._is_reporting = True
        try:
            yield
        finally:
            self._is_reporting = False

    def _failed(self, error: BaseException) -> None:
        """Tell the others, once, that a step failed, and note in the error if another rank failed before."""
        before, self._fill = self._fill, _FAILED
        if before == _FAILED or (self._is_reporting and isinstance(error, Exception)):
            return
        place = self._place if self._within is None else self._place_of_loop
        answer = STOPPED if before == _BEGUN and not self.quiet else FAILED
        if other := self.ranks.stop(answer, _text(place.at, error), is_new=before == _BEGUN):
            error.add_note(other)

    @contextlib.contextmanager
    def before(self) -> Iterator[None]:
        """A block that looks at a batch before its fill: others are told of a refusal. RankError if a step is ahead."""
        if self._ahead is not None:
            raise RankError("the step that was agreed on ahead has not been run: one at a time")
        self.begin()
        try:
            yield
        except BaseException as error:
            self.refuse(error)
            raise

    def run(self, step: Callable[..., T], *args: Any) -> T:
        """Run a step that all ranks run. Ranks that wait for this one are told if it raises."""
        try:
            return step(*args)
        except BaseException as error:
            self._failed(error)
            raise

    def tell(self, what: str, text: str = "", number: int = 0, *, capturing: bool = False) -> list[tuple[str, int]]:
        """What each rank says at one place beside the steps, this one a text and a number."""
        ranks = self.ranks
        if self.size == 1 or ranks.alone:
            return [(text, number)]
        self._end_loop()
        place = Place(f"{self._name}: {what}", self._parts)
        timeout = ranks.capture_timeout if capturing else ranks.timeout
        begun = ranks.begin(Message(place.digest, bucket=number, text=text), place.at, timeout)
        return [(one.text, one.bucket) for one in self._messages(begun, place, timeout)]

    def warm_up(self, step: Step, backend: Backend) -> Step:
        """A step as warm-ups run it: it waits for the device, and raises RankError once a rank is lost."""

        def run() -> Any:
            outputs = step()
            event, told = backend.event(), f"{self._name}: a warm-up before a capture"
            self.ranks.wait(event, backend.device, told, self.ranks.capture_timeout, together=False)
            return outputs

        return run

    def wait(self, event: Event, device: torch.device, *, read: bool = False) -> None:
        """Wait until a device is past an event, for no longer than the ranks' `timeout`."""
        self.ranks.wait(event, device, "the end of a step on the device", self.timeout, together=not read)

    def as_data(self) -> RanksData:
        """The books, as plain data."""
        forced = {rank: dict[str, int](sorted(one.copy().items())) for rank, one in sorted(self.forced.copy().items())}
        return {**super().as_data(), "over": self.ranks.over, "exchanges": self.ranks.exchanges, "forced": forced}


def agree(own: Decision, messages: Sequence[Message], leading: int) -> tuple[Decision, int]:
    """The path of all ranks, and who forced it: the first that must run eagerly, else that needs the largest bucket."""
    if (rank := _first(messages, EAGER)) is not None:
        one = messages[rank]
        return Decision("eager", None, _WHYS[one.why], f"rank {rank}: {one.text}", rank), rank
    bucket = max(one.bucket for one in messages)
    rank = next(rank for rank, one in enumerate(messages) if one.bucket == bucket)
    reason = f"bucket {bucket} fits the {messages[rank].live[leading]} rows of rank {rank}, the most of all"
    return Decision(own.path, bucket, "fits", reason, rank), rank


def _first(messages: Sequence[Message], answer: int) -> int | None:
    """The first rank that said so."""
    return next((rank for rank, one in enumerate(messages) if one.answer == answer), None)


def _text(what: str, error: BaseException) -> str:
    """In what a rank failed, and why."""
    return f"failed in {what}: {type(error).__name__}: {error}"


def _raise(error: RankError, _: float) -> NoReturn:
    """An exchange that failed when it was begun."""
    raise error


def coordinator_of(
    declaration: Declaration,
    runner: str,
    config: RunnerConfig,
    sizes: Mapping[int, Sizes],
    patterns: Iterable[Collection[str]],
    *leading: Axis,
) -> Coordinator:
    """What coordinates a runner's steps with those of its declaration's other ranks, if it has any: ConfigError.

    sizes: each bucket's padded sizes. patterns: those of absent slots that it captures. leading: the axis that buckets
    are chosen by, where there are any.
    """
    if declaration.ranks is None:
        return Coordinator()
    ranks: Ranks = checked("ranks", "Ranks(...), or None", declaration.ranks, Ranks)
    for bucket, padded in sizes.items():
        tokens = padded.get(TOKENS, bucket)
        if tokens % ranks.shards:
            raise ConfigError(
                f"bucket {bucket} has {tokens} tokens, which do not divide among {ranks.shards} shards: choose buckets "
                f"whose tokens are multiples of {ranks.shards}"
            )
    if config.lazy and ranks.size > 1:
        raise ConfigError(
            "lazy=True puts captures off to each rank's own first batch: ranks capture together, so leave it out"
        )
    absent = sorted(" and ".join(map(repr, sorted(pattern))) for pattern in patterns if pattern)
    parts = {
        "axes": ", ".join(map(str, declaration.varying)),
        "buckets": ", ".join(map(str, sorted(sizes))) or "none",
        "width": str(config.width),
        "absent=": ", ".join(absent) or "none",
        "fields": ", ".join(declaration.fields) or "none",
    }
    for name, slot in declaration.slots.items():
        shape = ", ".join(map(str, slot.shape))
        parts[f"slot {name!r}"] = f"{type(slot).__name__} {dtype_text(slot.dtype)} [{shape}] on {slot.placement}"
    name = f"{runner} of {declaration.name}"
    return Agreement(ranks, name, parts, (*declaration.varying, *leading))
