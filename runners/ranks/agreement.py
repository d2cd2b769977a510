"""Agreement: one path and one bucket for all ranks, and why, from what each of them would have done alone."""

import collections
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from ...backends.base import Backend, Event
from ...dataflow.axes import TOKENS, Axis, Sizes
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, RankError
from ..arguments import checked
from ..config import RunnerConfig
from ..coordination import Coordinator, Live, RanksData, Run, Step, T
from ..decision import Decision, Why
from .exchange import Exchange
from .group import Ranks
from .message import AXES, EAGER, FAILED, FITS, REFUSED, Message
from .verdict import WHYS, check, first, verdict
from .watchdog import Watchdog


@attrs.frozen
class Place:
    """Where in its program a rank is, which must be the same for all. told: in words."""

    told: str
    digest: int

    @classmethod
    def of(cls, told: str) -> "Place":
        """A place, by its words."""
        raw = hashlib.blake2b(told.encode(), digest_size=8).digest()
        return cls(told, int.from_bytes(raw, "little", signed=True))


class Agreement(Coordinator):
    """Has one runner's steps agree with those of the same runner on other ranks.

    axes: of the live sizes that a batch tells, the one that buckets are chosen by last. forced: steps by the rank that
    forced them and why.
    """

    def __init__(self, ranks: Ranks, runner: str, buckets: Sequence[int], axes: Sequence[Axis]) -> None:
        if len(axes) > AXES:
            message = f"ranks tell each other the sizes of {AXES} axes at most, and batches vary on {len(axes)}"
            raise ConfigError(message)
        self.ranks = ranks
        self.patience = ranks.timeout
        self.axes = tuple(axes)
        self.forced: collections.Counter[tuple[int, Why]] = collections.Counter()
        self._ahead: tuple[Decision, tuple[int, ...], Exchange] | None = None
        self._settled = self._joined = False
        self._runner = runner
        self._step = Place.of(f"a step of {runner} with buckets {', '.join(map(str, sorted(buckets))) or 'none'}")

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.size

    @property
    def quiet(self) -> bool:
        """Whether nothing is exchanged before a step."""
        return self.ranks.quiet

    @property
    def timeout(self) -> float:
        """Seconds that this rank waits for the others before a step."""
        return self.ranks.timeout

    def be_patient(self, seconds: float) -> None:
        """Wait for the others before a step for at least so long."""
        self.patience = max(self.ranks.timeout, seconds)

    def begin(self) -> None:
        """A fill begins."""
        self._settled = self._joined = False

    def settle(self, own: Decision, live: Live, admit: Callable[[], None]) -> Decision:
        """What all ranks do, where this one would do `own`, with live sizes by axis; one exchange, or none if quiet.

        admit: raises what the fill to come would raise of the batch, while the others can be told; not called for one
        that was agreed on ahead.
        Raises RankError where a rank refused its batch, is elsewhere in its program, or does not come, and where ranks
        that share a batch bring different sizes of it.
        """
        ranks = self.ranks
        if ranks.quiet:
            self.bring(live)
            return own
        if self._ahead is None:
            admit()
        self._settled = True
        messages = self._exchange(self._said(own, live), self._step, self.patience, self._taken(own, live))
        check(messages, self.axes, ranks)
        ranks.brought({axis: tuple(one.live[i] for one in messages) for i, axis in enumerate(self.axes)})
        self._joined = True
        self.agreed, rank = verdict(own, messages)
        self.forced[rank, self.agreed.why] += 1
        return self.agreed

    def ahead(self, own: Decision, live: Live) -> None:
        """Tell the others now what `settle` will be asked for next; it then only waits for what they told."""
        if not self.ranks.quiet:
            self._ahead = own, live, self.ranks.begin(self._said(own, live), self._step.told)

    def idle(self, own: Decision, live: Live) -> bool:
        """Whether all ranks are idle, as this one is, so that none runs a step; else `settle` is asked for it next."""
        ranks = self.ranks
        if ranks.quiet:
            return True
        exchange = ranks.begin(self._said(own, live, idle=True), self._step.told)
        messages = ranks.end(exchange, self.patience)
        if all(one.idle and one.place == self._step.digest for one in messages):
            ranks.brought({})
            return True
        self._ahead = own, live, exchange
        return False

    def _said(self, own: Decision, live: Live, *, idle: bool = False) -> Message:
        verdict, text = (EAGER, own.reason) if own.bucket is None else (FITS, "")
        return Message(self._step.digest, verdict, own.bucket or 0, WHYS.index(own.why), live, idle, text)

    def _taken(self, own: Decision, live: Live) -> Exchange | None:
        """The exchange that was begun ahead, if one was. RankError where it was of another batch."""
        if self._ahead is None:
            return None
        (told, sizes, exchange), self._ahead = self._ahead, None
        if (told, sizes) != (own, live):
            self.ranks.end(exchange, self.patience)
            here = f"sizes {live} of {', '.join(axis.name for axis in self.axes)}: {own.reason}"
            error = RankError(f"this is not the batch that was agreed on ahead, with sizes {sizes}; it has {here}")
            self.ranks.broke_off(error)
            raise error
        return exchange

    def bring(self, live: Live) -> None:
        """A step of quiet ranks begins: all of them bring these sizes."""
        self._joined = True
        self.ranks.brought(self._same(live))

    def repeated(self, run: Run, live: Live) -> Run:
        """Make a step of quiet ranks that goes as one before it. One that is broken off is told to the others."""
        begin, broke_off, brought = self.ranks.brought, self.ranks.broke_off, self._same(live)

        def told(*args: Any) -> Any:
            begin(brought)
            try:
                return run(*args)
            except BaseException as error:
                broke_off(error)
                raise

        return told

    def _same(self, live: Live) -> dict[Axis, tuple[int, ...]]:
        """What ranks bring that all bring the same."""
        size = self.ranks.size
        return {axis: (rows,) * size for axis, rows in zip(self.axes, live, strict=True)}

    def refuse(self, error: BaseException) -> None:
        """This rank's fill ends in an error: tell the others, who wait, unless they know. RankError as of `settle`.

        Where they run the step all the same, and of an interrupt, which waits for no one, those who wait for this rank
        later are told.
        """
        ranks = self.ranks
        if self._joined or ranks.quiet or not isinstance(error, Exception):
            ranks.broke_off(error)
            return
        if self._settled:
            return
        self._settled = True
        if self._ahead is not None:  # the others run the step: this rank has vouched for its batch
            (_, _, exchange), self._ahead = self._ahead, None
            ranks.end(exchange, self.patience)
            ranks.broke_off(error)
        else:
            said = Message(self._step.digest, REFUSED, live=(0,) * len(self.axes), text=str(error))
            self._exchange(said, self._step, self.patience)

    @contextlib.contextmanager
    def before(self) -> Iterator[None]:
        """While a batch is looked at before its fill: the others, who may wait, are told where it is refused.

        RankError where the step that was agreed on ahead is still to be run.
        """
        if self._ahead is not None:
            message = "the step that was agreed on ahead has not been run: one at a time"
            raise RankError(message)
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

    def meet(self, what: str, error: Exception | None = None) -> tuple[int, str] | None:
        """Have all ranks be done with the same thing; the first that failed in it, and what it says, if any did."""
        ranks = self.ranks
        if ranks.size == 1:
            return None if error is None else (ranks.rank, str(error))
        place = Place.of(f"{self._runner}: {what}")
        said = Message(place.digest, FITS if error is None else FAILED, text="" if error is None else str(error))
        messages = self._exchange(said, place, ranks.capture_timeout)
        failed = first(messages, FAILED)
        return None if failed is None else (failed, messages[failed].text)

    def tell(self, what: str, text: str = "", number: int = 0) -> list[tuple[str, int]]:
        """What each rank has to say at one place beside the steps, this one a text and a number."""
        if self.ranks.size == 1:
            return super().tell(what, text, number)
        place = Place.of(f"{self._runner}: {what}")
        said = Message(place.digest, bucket=number, text=text)
        return [(one.text, one.bucket) for one in self._exchange(said, place, self.ranks.timeout)]

    def over_warm_ups(self, backend: Backend) -> contextlib.AbstractContextManager[Callable[[Step], Step]]:
        """A block that warms up a bucket, under a `Watchdog`."""
        ranks = self.ranks
        if ranks.size == 1:
            return super().over_warm_ups(backend)
        return Watchdog(ranks, backend, ranks.capture_timeout, f"{self._runner}: a warm-up before a capture").kept()

    def wait(self, event: Event, device: torch.device) -> None:
        """Wait until a device is past an event, for no longer than the ranks' `timeout`."""
        self.ranks.wait(event, device)

    def as_data(self) -> RanksData:
        """The books, as plain data."""
        forced: dict[int, dict[str, int]] = {}
        for (rank, why), steps in sorted(self.forced.copy().items()):
            forced.setdefault(rank, {})[why] = steps
        ranks = self.ranks
        rank, size, quiet = ranks.rank, ranks.size, ranks.quiet
        return {"rank": rank, "size": size, "quiet": quiet, "exchanges": ranks.exchanges, "forced": forced}

    def _exchange(self, said: Message, place: Place, timeout: float, begun: Exchange | None = None) -> list[Message]:
        """What all say at one place. RankError where some are at another: each then tells where it is."""
        ranks = self.ranks
        messages = ranks.end(ranks.begin(said, place.told) if begun is None else begun, timeout)
        if all(one.place == place.digest for one in messages):
            return messages
        named = ranks.end(ranks.begin(Message(0, text=place.told), place.told), timeout)
        where = "; ".join(f"rank {rank} is at {one.text}" for rank, one in enumerate(named))
        message = f"ranks do not run the same steps: {where}"
        raise RankError(message)


def coordinator_of(
    declaration: Declaration, runner: str, config: RunnerConfig, sizes: Mapping[int, Sizes], *leading: Axis
) -> Coordinator:
    """What coordinates a runner's steps with those of its declaration's other ranks, if it has any.

    sizes: each bucket's padded sizes. leading: the axis that buckets are chosen by, where there are any.
    ConfigError where a bucket's tokens do not divide among the shards, or where captures are put off.
    """
    if declaration.ranks is None:
        return Coordinator()
    ranks: Ranks = checked("ranks", "Ranks(...), or None", declaration.ranks, Ranks)
    for bucket, padded in sizes.items():
        tokens = padded.get(TOKENS, bucket)
        if tokens % ranks.shards:
            message = (
                f"bucket {bucket} has {tokens} tokens, which do not divide among {ranks.shards} shards: choose buckets "
                f"whose tokens are multiples of {ranks.shards}"
            )
            raise ConfigError(message)
    if config.lazy and ranks.size > 1:
        message = "lazy=True puts captures off to each rank's own first batch: ranks capture together, so leave it out"
        raise ConfigError(message)
    return Agreement(ranks, runner, tuple(sizes), (*declaration.varying, *leading))
