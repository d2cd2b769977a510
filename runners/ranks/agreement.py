"""Agreement: one path and one bucket for all ranks, and why, from what each of them would have done alone."""

import collections
import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import torch

from ...backends.base import Backend, Event
from ...dataflow.axes import TOKENS, Axis, Live, Sizes
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, RankError
from ..config import RunnerConfig, checked
from ..hooks import Coordinator, Run, Step, T
from ..statistics import Decision, RanksData, Why
from .group import AXES, EAGER, FITS, REFUSED, Exchange, Message, Ranks

_WHYS: Final[tuple[Why, ...]] = get_args(Why)
"""Reasons, by the numbers that messages have for them."""


class Agreement(Coordinator):
    """Has one runner's steps agree with those of the same runner on other ranks; forced: steps, by rank and why."""

    def __init__(self, ranks: Ranks, runner: str, buckets: Sequence[int], axes: Sequence[Axis]) -> None:
        if len(axes) > AXES:
            raise ConfigError(
                f"ranks tell each other the sizes of {AXES} axes at most, and batches vary on {len(axes)}"
            )
        self.ranks = ranks
        self.rank, self.size, self.quiet, self.timeout = ranks.rank, ranks.size, ranks.quiet, ranks.timeout
        self.axes = tuple(axes)
        self.forced: dict[int, collections.Counter[Why]] = collections.defaultdict(collections.Counter)
        self._ahead: tuple[Decision, Live, Exchange] | None = None
        self._told = self._joined = False  # of the present fill: the others know of it, and they run its step
        self._runner = runner
        self._step = f"a step of {runner} with buckets {', '.join(map(str, sorted(buckets))) or 'none'}"

    def begin(self) -> None:
        """A fill begins."""
        self._told = self._joined = False

    def settle(self, own: Decision, live: Live, admit: Callable[[], None]) -> Decision:
        """What all ranks do, by one exchange, or none if quiet. admit: not called for a batch that was agreed on ahead.

        RankError if a rank refused its batch, is elsewhere, or does not come, or ranks bring different sizes of one.
        """
        if self.quiet:
            self._joined, self.ranks.brought = True, self._same(live)
            return own
        if self._ahead is None:
            admit()
        self._told = True
        messages = self._messages(self._begun_ahead(own, live) or self._begin(own, live), self._step, self.timeout)
        return self._settled(own, messages)

    @contextlib.contextmanager
    def loop(self, every: int) -> Iterator[None]:
        """A block that prepares steps which follow one another. RankError, at its end, if one rank refuses them.

        every: ranks agree on each step whose number divides by it, so all must have the same.
        """
        error = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - it is raised below, when all ranks know of it
            error = raised
        told = [] if self.quiet else self.tell("steps() begin", str(error or ""), 0 if error else every)
        if error is not None:
            raise error
        for rank, (text, number) in enumerate(told):
            if not number:
                raise RankError(f"rank {rank} refused its batch, so that no rank begins: {text}")
        if len({number for _, number in told}) > 1:
            each = ", ".join(f"rank {rank} after {number}" for rank, (_, number) in enumerate(told))
            raise RankError(
                f"ranks agree after different numbers of steps: {each}; give all the same agree_every=, and where one "
                "is watched (a recording, a debug mode) or has another lowering, leave it out"
            )

    def follow(self, own: Decision, live: Live, *, idle: bool) -> Decision | None:
        """What all ranks do in a step that follows another, as `settle`; None where all are idle."""
        self.begin()
        if self.quiet:
            return self.settle(own, live, lambda: None)
        self._told = True
        messages = self._messages(self._begin(own, live, idle=idle), self._step, self.timeout)
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
        self._joined = True
        self.agreed, rank = agree(own, messages, len(self.axes) - 1)
        self.forced[rank][self.agreed.why] += 1
        return self.agreed

    def ahead(self, own: Decision, live: Live) -> None:
        """Tell the others now what `settle` will be asked for next; it then only waits for what they told."""
        if not self.quiet:
            self._ahead = own, live, self._begin(own, live)

    def idle(self, own: Decision, live: Live) -> bool:
        """Whether all ranks are idle, so that none runs a step; else `settle` is asked for it next."""
        if self.quiet:
            return True
        messages = self._begin(own, live, idle=True)(self.timeout)
        if all(one.idle and one.place == _digest(self._step) for one in messages):
            self.ranks.brought = {}
            return True
        self._ahead = own, live, lambda _: messages
        return False

    def _begin(self, own: Decision, live: Live, *, idle: bool = False) -> Exchange:
        """Tell all ranks what this one would do."""
        answer, text = (EAGER, own.reason) if own.bucket is None else (FITS, "")
        told = Message(_digest(self._step), answer, own.bucket or 0, _WHYS.index(own.why), idle, live, text)
        return self.ranks.begin(told, self._step)

    def _begun_ahead(self, own: Decision, live: Live) -> Exchange | None:
        """The exchange that was begun ahead, if one was. RankError if it was of another batch."""
        if self._ahead is None:
            return None
        (told, sizes, exchange), self._ahead = self._ahead, None
        if (told, sizes) != (own, live):
            exchange(self.timeout)
            here = f"sizes {live} of {', '.join(axis.name for axis in self.axes)}: {own.reason}"
            error = RankError(f"this is not the batch that was agreed on ahead, with sizes {sizes}; it has {here}")
            self.ranks.broke_off(error)
            raise error
        return exchange

    def _messages(self, begun: Exchange, place: str, timeout: float) -> list[Message]:
        """What all ranks say at one place. RankError if some are at another: each then tells where it is."""
        messages, here = begun(timeout), _digest(place)
        if all(one.place == here for one in messages):
            return messages
        named = self.ranks.begin(Message(0, text=place), place)(timeout)
        where = "; ".join(f"rank {rank} is at {one.text}" for rank, one in enumerate(named))
        raise RankError(f"ranks do not run the same steps: {where}")

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

    def repeated(self, run: Run, live: Live) -> Run:
        """Make a step of quiet ranks that goes as one before it. One that is broken off is told to the others."""
        ranks, brought, told = self.ranks, self._same(live), self.run

        def repeat(*args: Any) -> Any:
            ranks.brought = brought
            return told(run, *args)

        return repeat

    def _same(self, live: Live) -> dict[Axis, tuple[int, ...]]:
        """What ranks bring that all bring the same."""
        return {axis: (rows,) * self.size for axis, rows in zip(self.axes, live, strict=True)}

    def refuse(self, error: BaseException) -> None:
        """Tell the others, who wait for this rank's fill, or will if they know already. Raises as `settle`."""
        if self._joined or self.quiet or not isinstance(error, Exception):
            self.ranks.broke_off(error)
        elif not self._told:
            self._told = True
            if self._ahead is None:
                refusal = Message(_digest(self._step), REFUSED, live=(0,) * len(self.axes), text=str(error))
                self._messages(self.ranks.begin(refusal, self._step), self._step, self.timeout)
            else:  # the others run the step: this rank has vouched for its batch
                (*_, exchange), self._ahead = self._ahead, None
                exchange(self.timeout)
                self.ranks.broke_off(error)

    @contextlib.contextmanager
    def before(self) -> Iterator[None]:
        """A block that looks at a batch before its fill: others are told of a refusal. RankError if a step is ahead."""
        if self._ahead is not None:
            raise RankError("the step that was agreed on ahead has not been run: one at a time")
        self.begin()
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise

    def run(self, step: Callable[..., T], *args: Any) -> T:
        """Run a step that all ranks run. Ranks that wait for this one are told if it raises."""
        try:
            return step(*args)
        except BaseException as error:
            self.ranks.broke_off(error)
            raise

    def tell(self, what: str, text: str = "", number: int = 0, *, capturing: bool = False) -> list[tuple[str, int]]:
        """What each rank says at one place beside the steps, this one a text and a number."""
        ranks = self.ranks
        if self.size == 1 or ranks.alone:
            return [(text, number)]
        place = f"{self._runner}: {what}"
        begun = ranks.begin(Message(_digest(place), bucket=number, text=text), place)
        messages = self._messages(begun, place, ranks.capture_timeout if capturing else ranks.timeout)
        return [(one.text, one.bucket) for one in messages]

    def warm_up(self, step: Step, backend: Backend) -> Step:
        """A step as warm-ups run it: it waits for the device, and raises RankError once a rank is lost."""

        def run() -> Any:
            outputs = step()
            event, told = backend.event(), f"{self._runner}: a warm-up before a capture"
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


@functools.lru_cache(64)
def _digest(place: str) -> int:
    """A number for a place in the program, which are the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little", signed=True)


def coordinator_of(
    declaration: Declaration, runner: str, config: RunnerConfig, sizes: Mapping[int, Sizes], *leading: Axis
) -> Coordinator:
    """What coordinates a runner's steps with those of its declaration's other ranks, if it has any: ConfigError.

    sizes: each bucket's padded sizes. leading: the axis that buckets are chosen by, where there are any.
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
    return Agreement(ranks, runner, tuple(sizes), (*declaration.varying, *leading))
