"""Ranks: the processes that run each step together, their messages, and the exchange over gloo or shared memory."""

import contextlib
import datetime as dt
import functools
import hashlib
import json
import math
import os
import struct
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist

from ...backends.base import Event
from ...dataflow.axes import Axis
from ...dataflow.errors import ConfigError, RankError
from ...dataflow.guard import outside_inference
from ..engine.config import check_seconds, checked
from ..engine.current import Unique
from .shared import RankMemory

Exchange = Callable[[], "list[Message]"]
"""An exchange that has begun: when called, it waits for every rank's message and returns them."""
_EXCHANGE: Final = "exchange"
_WAIT: Final = "wait"
_LOST: Final = "lost others: "
"""The first words of a rank that gave up waiting. They do not say which rank is missing."""
_STOPPED: Final = "stopped before exchange"
_PATIENCE: Final = 0.2
"""Seconds after which a waiting rank writes that to the store, and looks there for an aborted rank."""
GRACE: Final = 2.0
"""Seconds that other ranks have to write to the store, once one rank knows that something is wrong."""
_POLL: Final = 0.02
CHECK_INTERVAL: Final = 0.5
"""Seconds between two looks into the store by ranks that exchange nothing."""
_ABORT_SECONDS: Final = 20.0
"""Seconds that aborted collectives have to end."""
FITS, EAGER, REFUSED, FAILED, STOPPED, LEFT = range(6)
"""The kinds of answers. The highest of the ranks' answers decides.

FITS: a bucket takes the rank's batch. EAGER: none does. REFUSED: the rank refuses its batch. FAILED: the rank failed in
the step before, which the others ran. STOPPED: it was interrupted before it could send a message of this step. LEFT: it
left a loop of steps.
"""
AXES: Final = 8
"""The most varying axes whose live sizes fit in one message."""
_TEXT: Final = 256
_LAYOUT: Final = struct.Struct(f"<{5 + AXES}q{_TEXT}s")
_SPIN: Final = 0.001
"""Seconds that a rank polls without a pause.

After that each pause is 1 % of its wait so far. An idle rank waits often.
"""
_LOOPS: Final = 62
"""The most loops of steps that may be open at once: each has a bit of a number in messages."""


@attrs.frozen
class CallSite:
    """A point of the program that all ranks reach together.

    Attributes:
        name: The point in words.
        parts: By name, facts that must be the same on all ranks at this point.
    """

    name: str
    parts: Mapping[str, str] = types.MappingProxyType({})

    @functools.cached_property
    def text(self) -> str:
        """The call site as JSON."""
        return json.dumps([self.name, dict(self.parts)])

    @functools.cached_property
    def digest(self) -> int:
        """A number for the call site, the same on all ranks."""
        return int.from_bytes(hashlib.blake2b(self.text.encode(), digest_size=8).digest(), "little", signed=True)


@attrs.frozen
class Message:
    """The message of one rank in an exchange.

    Attributes:
        place: The digest of the rank's call site.
        answer: One of `FITS` to `LEFT`.
        bucket: The bucket of its batch, 0 for none. `gather` sends other numbers in it; a rank that stops, loops as
            bits.
        why: The index of the reason in the list of reasons.
        idle: Whether the rank has no request.
        live: Live sizes by axis. In a message that was received, zeros follow them.
        text: The reason, of which the first 256 bytes are sent.
    """

    place: int
    answer: int = FITS
    bucket: int = 0
    why: int = 0
    idle: bool = False
    live: tuple[int, ...] = ()
    text: str = ""

    def pack_into(self, memory: Any) -> None:
        """Write the message into a buffer of bytes."""
        raw = self.text.encode()
        live = self.live + (0,) * (AXES - len(self.live))
        if len(raw) > _TEXT:
            raw = raw[: _TEXT - 3].decode(errors="ignore").encode() + b"..."
        _LAYOUT.pack_into(memory, 0, self.place, self.answer, self.bucket, self.why, self.idle, *live, raw)


def _unpacked(memory: Any) -> list[Message]:
    """Read the messages in a buffer of bytes."""
    return [
        Message(place, answer, bucket, why, bool(idle), tuple(live), text.rstrip(b"\0").decode())
        for place, answer, bucket, why, idle, *live, text in _LAYOUT.iter_unpack(memory)
    ]


class GlooWire:
    """Carries one exchange at a time over gloo."""

    def __init__(self, group: "dist.ProcessGroup", size: int) -> None:
        with outside_inference():
            self._own, self._all = (
                torch.zeros(count * _LAYOUT.size, dtype=torch.uint8, device="cpu") for count in (1, size)
            )
        self._group = group
        self._work: Any = None

    def send(self, message: Message) -> None:
        """Begin an exchange with this rank's message."""
        message.pack_into(self._own.numpy())
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch renamed it
        self._work = gather(self._all, self._own, group=self._group, async_op=True)

    def arrives(self, seconds: float) -> bool:
        """Wait for the messages, at most so many seconds. Raise RuntimeError if a connection is lost."""
        with contextlib.suppress(RuntimeError):  # the time is over, but the work may have ended since
            self._work.wait(dt.timedelta(seconds=max(seconds, 0.001)))
        if not self._work.is_completed():
            return False
        self._work.wait()  # returns at once, or raises the error that ended the work
        return True

    def messages(self) -> list[Message]:
        """Return every rank's message. They must have arrived."""
        return _unpacked(self._all.numpy())


class SharedWire:
    """Carries one exchange at a time through memory that all ranks of one host share."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        self._number = 0

    def send(self, message: Message) -> None:
        """Begin an exchange with this rank's message."""
        data = bytearray(_LAYOUT.size)
        message.pack_into(data)
        self._number = self._memory.send(data)

    def arrives(self, seconds: float) -> bool:
        """Wait for the messages, at most so many seconds. Raise RuntimeError if a process has ended."""
        return _poll(functools.partial(self._memory.has_arrived, self._number), seconds)

    def messages(self) -> list[Message]:
        """Return every rank's message. They must have arrived."""
        return _unpacked(self._memory.take(self._number))


Wire = GlooWire | SharedWire


def _poll(query: Callable[[], bool], seconds: float) -> bool:
    """Wait until a query is true, at most so many seconds. Return whether it is."""
    begin = time.monotonic()
    while not query():
        waited = time.monotonic() - begin
        if waited > seconds:
            return False
        if waited < _SPIN:
            os.sched_yield()
        else:
            time.sleep(min(waited / 100, _POLL))
    return True


class Ranks(Unique):
    """The ranks that run each step together, over a process group of torch.distributed.

    All ranks make it at once, with the same arguments. Runners on the same ranks share one.

    Args:
        group: The process group that the ranks form, or None for the default group.
        equal: Whether all ranks get the same batches, as those of tensor parallelism do. Nothing is exchanged then.
        shards: Over how many ranks a bucket's tokens are spread. Every bucket must divide by it. If the group divides,
            too, each `shards` ranks in a row share a batch, and its sizes must be the same on all of them.
        timeout: Seconds that a rank waits for the others before a step.
        capture_timeout: The same for each bucket of a capture. Stay below the ten minutes after which NCCL, by default,
            ends a process without saying who was missing.

    Attributes:
        rank: Which of the ranks this process is, from 0.
        size: How many ranks there are.

    Raises:
        ConfigError: There is no such group, or an argument makes no sense.
        RankError: A rank did not come within `capture_timeout`.
    """

    over: str | None = None
    """What carries exchanges: "shared memory" if all ranks are on one host, else "gloo", or None for one rank."""
    alone = False
    """Whether this is the only process, and the messages of other ranks come from a recording."""
    messages: tuple[Message, ...] = ()
    """Every rank's message about the last step that they agreed on."""
    live_sizes: Mapping[Axis, tuple[int, ...]] = types.MappingProxyType({})
    """Live rows of each rank in the present step, by axis."""
    runners = 0
    """How many runners were made with these ranks."""
    open_loops = 0
    """The loops of steps that no rank has left, as bits."""
    last_stop = "it has ended"
    """The ranks that aborted last, and why."""
    quiet_steps = 0
    """Steps of equal ranks since the last abort."""
    _loops = 0
    _next_check = math.inf

    def __init__(
        self,
        group: "dist.ProcessGroup | None" = None,
        *,
        equal: bool = False,
        shards: int = 1,
        timeout: float = 60.0,
        capture_timeout: float = 480.0,
    ) -> None:
        checked("equal", "True or False", equal, bool)
        checked("shards", "a whole number, at least 1", shards, int, 1)
        check_seconds("timeout", timeout)
        check_seconds("capture_timeout", capture_timeout)
        self.group = checked_group(group)
        self.rank: int = dist.get_rank(self.group)
        self.size: int = dist.get_world_size(self.group)
        self.equal = equal
        self.shards = shards
        self.timeout = timeout
        self.capture_timeout = capture_timeout
        self.exchanges = self._waits = 0
        self.broken: str | None = None
        self._stops: list[Message] = []  # steps that this rank aborted and has not reported yet
        self._under_way: dict[int, Wire] = {}
        self._late = set[int]()  # numbers of exchanges that this rank stopped waiting for
        self._knows_stop = False  # whether some rank has aborted an exchange that is still open
        self._free: list[Wire] = []
        if self.size > 1:
            self._next_check = 0.0
            self._connect()

    def _connect(self) -> None:
        """Make the group that exchanges sizes, and a store that all ranks reach and nothing else uses."""
        from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store  # noqa: PLC0415 - some builds of torch lack it

        whole = _get_process_group_store(self.group)
        count = functools.partial(whole.add, f"slotgraph ranks of {self.rank}")
        self._store = PrefixStore(f"slotgraph {count(1)}", whole)
        own = CallSite("Ranks", {"equal=": repr(self.equal), "shards=": repr(self.shards)})
        try:
            sites = self._share_sites("made by", self.rank, own, [*range(self.size)], self.capture_timeout)
        except RuntimeError as error:
            lost = [str(rank) for rank in range(self.size) if not self._store.check([f"made by {rank}"])]
            self._store.delete_key(f"made by {self.rank}")
            count(-1)
            who = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(lost)}"
            raise RankError(
                f"Ranks: {who} did not come within {self.capture_timeout:g} s: make Ranks on all ranks at once, in the "
                "same order"
            ) from error
        if different := _differences(sites):
            raise RankError(f"Ranks were made with different arguments: {different}; give all ranks the same")
        members = dist.get_process_group_ranks(self.group)
        limit = dt.timedelta(seconds=2 * max(self.timeout, self.capture_timeout))  # shorter, so that both end before it
        self.over = "gloo"
        try:
            connection: Any = dist.new_group(
                members, timeout=limit, backend=self.over, use_local_synchronization=True, group_desc="slotgraph"
            )
        except RuntimeError as error:
            raise RankError(f"Ranks: the ranks could not connect over {self.over}: {error}") from error
        self._new_wire: Callable[[], Wire] = functools.partial(GlooWire, connection, self.size)
        self._share(connection)

    def _share(self, connection: "dist.ProcessGroup") -> None:
        """Exchange through shared memory from now on, if all ranks can open the memory of rank 0."""
        memory = RankMemory(self.rank, self.size, _LAYOUT.size)
        site = CallSite("the choice of what carries exchanges")
        path = "" if self.rank else memory.open(connection)
        first, *_ = self.begin(Message(0, text=path), site, self.capture_timeout)()
        path = path or (first.text and memory.open(connection, first.text))
        if all(one.text for one in self.begin(Message(0, text=path), site, self.capture_timeout)()):
            self._new_wire = functools.partial(SharedWire, memory)
            self._free = []
            self.over = "shared memory"

    @property
    def batches(self) -> int:
        """The number of batches, if each `shards` ranks in a row share one, or 0 if the ranks do not divide so."""
        return 0 if self.size % self.shards else self.size // self.shards

    @property
    def quiet(self) -> bool:
        """Whether nothing is exchanged before a step, because there is one rank, or all get the same batches."""
        return self.size == 1 or self.equal

    def live(self, axis: Axis) -> tuple[int, ...]:
        """Return the live rows of each rank on an axis, in the order of ranks. They are zeros before the first step.

        Raise ConfigError for an axis that batches do not vary on, whose rows are not exchanged.
        """
        if self.live_sizes and axis not in self.live_sizes:
            raise ConfigError(
                f"ranks do not exchange their live rows on {axis}: declare a copied slot that has this axis"
            )
        return self.live_sizes.get(axis, (0,) * self.size)

    def stop(self, answer: int, text: str, loop: int = 0, *, is_new: bool = False) -> str:
        """Report that this rank aborted: in the next exchange, and in the store for ranks that already wait.

        Args:
            answer: FAILED, STOPPED or LEFT.
            text: The aborted step, and why.
            loop: The bit of the loop of steps that it left, including steps that were aborted in it.
            is_new: Whether it is a step that `quiet_step` has not counted.

        Returns:
            The rank that aborted before this one, and why, or "".
        """
        if self.size == 1:
            return ""
        self._next_check = 0.0
        self.quiet_steps += is_new
        if loop and self._stops:
            last = self._stops.pop()
            self._stops.append(Message(0, LEFT, last.bucket | loop, text=f"{last.text}, and {text}"))
            return ""
        self._stops.append(Message(0, answer, loop, text=text))
        number = self.exchanges + len(self._stops)
        _, other = self._stop_at(number)
        if not self._knows_stop:  # otherwise the others already know that the loop ended
            self._announce_stop(number, text)
        return other

    def quiet_step(self, site: CallSite, timeout: float) -> None:
        """Count one more step of ranks that exchange nothing.

        Raise RankError if a rank aborted an earlier step. It may be noticed some steps later.
        """
        self.quiet_steps += 1
        if self._next_check < time.monotonic():
            self._next_check = time.monotonic() + CHECK_INTERVAL
            self._end_stopped(site.name, timeout)
            step, why = self._stop_at(self.exchanges + 1)
            if why and step < self.quiet_steps:
                self.begin(Message(0), site, timeout)()  # raises RankError

    def begin_loop(self) -> int:
        """Open a loop of steps, as all ranks do now, and return its bit."""
        self._loops += 1
        bit = 1 << self._loops % _LOOPS
        self.open_loops |= bit
        return bit

    def wait(self, event: Event, device: torch.device, what: str, seconds: float, *, together: bool) -> None:
        """Wait until a device has passed an event.

        Args:
            event: The event.
            device: The device.
            what: The work before the event, in words.
            seconds: How long to wait.
            together: Whether all ranks wait for it.

        Raises:
            RankError: The time is over. The group's collectives are aborted then.
        """
        if self.size == 1:
            event.synchronize()
            return
        self._waits += together
        # this rank waits alone, so compare with the next exchange, which other ranks may have begun
        at = (_WAIT, self._waits) if together else (_EXCHANGE, self.exchanges + 1)
        if not self._arrives(functools.partial(_poll, event.query), at, seconds, self.exchanges + 1, GRACE):
            lost = self._lose(at, what, f"within {seconds:g} s")
            self._abort(event, device)
            raise lost

    def _arrives(
        self, arrives: Callable[[float], bool], at: tuple[str, int], timeout: float, stops: int, grace: float = 0.0
    ) -> bool:
        """Wait for messages or the device. Return whether they arrived in time.

        Args:
            arrives: Waits for a number of seconds, and returns whether the messages arrived.
            at: The kind and number of the wait, as a key in the store.
            timeout: Seconds to wait.
            stops: The number of an exchange, or 0. If a rank aborted before it, wait only `grace` more seconds.
            grace: Those seconds.
        """
        deadline = time.monotonic() + timeout
        is_noted = False
        is_stopped = not stops
        while not arrives(min(_PATIENCE, max(deadline - time.monotonic(), 0.0))):
            if time.monotonic() >= deadline:
                return False
            if not is_noted:
                self._set(f"{at[0]} {self.rank}", at[1])
                is_noted = True
            if not is_stopped and self._stop_before(stops):
                deadline = min(deadline, time.monotonic() + grace)
                is_stopped = True
        return True

    def _abort(self, event: Event, device: torch.device) -> None:
        """Abort the group's collectives on a device, which would wait for ever.

        On a CPU the group's time-out ends them.
        """
        if device.type == "cpu":
            return
        with contextlib.suppress(RuntimeError):  # raised by a group without a backend for the device
            abort = self.group._get_backend(device).abort  # noqa: SLF001 - torch has no public name for it
            threading.Thread(target=abort, name="slotgraph abort", daemon=True).start()  # may take long
            _poll(event.query, _ABORT_SECONDS)

    def begin(self, message: Message, site: CallSite, timeout: float, loop: int = 0) -> Exchange:
        """Send all ranks a message, after ending earlier exchanges that are still open.

        Args:
            message: This rank's message.
            site: The call site, for errors.
            timeout: Seconds to wait for the messages, and for the end of earlier exchanges.
            loop: The bit of the loop of steps that the message belongs to.

        Raises:
            RankError: An earlier exchange failed, this rank aborted an earlier step, or another rank left the loop. The
                returned exchange raises it if ranks are lost, have aborted, or are at other call sites.
        """
        self._end_stopped(site.name, timeout)
        self.check_loop(site, loop)
        number = self._send(message)

        def exchange() -> list[Message]:
            messages = self._receive(number, site.name, timeout)
            if any(one.place != message.place for one in messages):
                raise self._mismatch(site, messages)
            return messages

        return exchange

    def check_loop(self, site: CallSite, loop: int) -> None:
        """Raise RankError if a rank has left the loop with this bit."""
        if loop & ~self.open_loops:
            raise RankError(f"{site.name}: {self.last_stop}: begin again with all live requests")

    def _end_stopped(self, site: str, timeout: float) -> None:
        """End aborted exchanges, so that all ranks begin the next one together. site: That of the next exchange.

        Raise RankError if an earlier exchange failed, or if the step before failed on this rank only.
        """
        if self.broken:
            raise RankError(f"{site}: these ranks are lost to each other: {self.broken}")
        while self._late:
            self._receive(min(self._late), site, timeout, is_late=True)
        self._knows_stop = False
        while self._stops:
            stop = self._stops.pop(0)
            loops = stop.bucket & self.open_loops
            if stop.bucket and not loops:  # all ranks know that the loops ended
                continue
            messages = self._receive(self._send(attrs.evolve(stop, bucket=loops)), site, timeout, is_late=True)
            if stop.answer == FAILED and any(one.answer not in (FAILED, LEFT) for one in messages):
                raise RankError(self.last_stop)

    def _send(self, message: Message) -> int:
        """Send a message, and return the number of its exchange."""
        wire = self._free.pop() if self._free else self._new_wire()
        wire.send(message)
        self.exchanges += 1
        self._under_way[self.exchanges] = wire
        return self.exchanges

    def _receive(self, number: int, site: str, timeout: float, *, is_late: bool = False) -> list[Message]:
        """Return every rank's message.

        Args:
            number: The number of the exchange.
            site: The call site in words.
            timeout: Seconds to wait.
            is_late: Whether the exchange was aborted, and must only be ended.

        Raises:
            RankError: Some ranks did not come. The error names them, and there are no more exchanges. Or a rank aborted
                before: then the error is raised at once unless `is_late`, and the exchange is ended later.
        """
        at = (_EXCHANGE, number)
        wire = self._under_way[number]
        stops = 0 if is_late else number
        try:
            has_arrived = self._arrives(wire.arrives, at, timeout, stops)
        except RuntimeError as error:
            self._set(f"{_EXCHANGE} {self.rank}", number)
            raise self._lose(at, site, "before its connection was lost") from error
        except BaseException:
            self._end_later(number)
            raise
        if not has_arrived:
            if stops and (why := self._stop_before(number)):
                self._end_later(number)
                self._knows_stop = True
                raise RankError(why)
            raise self._lose(at, site, f"within {timeout:g} s")
        messages = wire.messages()
        self._free.append(self._under_way.pop(number))
        self._late.discard(number)
        stopped = [f"rank {rank} {one.text}" for rank, one in enumerate(messages) if one.answer >= FAILED]
        if stopped:
            self.quiet_steps, self.last_stop = 0, "; ".join(stopped)
            for one in messages:
                if one.answer >= FAILED:
                    self.open_loops &= ~one.bucket
            if not is_late:
                raise RankError(self.last_stop)
        return messages

    def _end_later(self, number: int) -> None:
        """Leave an exchange open, to be ended when the next one begins."""
        self._next_check = 0.0
        self._late.add(number)

    def _mismatch(self, own: CallSite, messages: Sequence[Message]) -> RankError:
        """Make the error for ranks at different call sites. It says where each is, or how the sites differ."""
        digests = [one.place for one in messages]
        try:
            sites = self._share_sites("place", own.digest, own, digests, GRACE)
        except RuntimeError:  # the errors of all kinds of stores
            return RankError(f"ranks do not run the same steps: this one is at {own.name}, and others do not say where")
        where = "; ".join(f"rank {rank} is at {one.name}" for rank, one in enumerate(sites))
        if len({one.name for one in sites}) == 1:
            where = f"their runners differ: {_differences(sites)}; all are at {own.name}"
        return RankError(f"ranks do not run the same steps: {where}")

    def _share_sites(self, what: str, key: int, own: CallSite, keys: Sequence[int], seconds: float) -> list[CallSite]:
        """Write a call site to the store, and read those of other keys.

        Raise RuntimeError if they do not come in time.
        """
        self._store.set(f"{what} {key}", own.text)
        self._store.wait([f"{what} {key}" for key in keys], dt.timedelta(seconds=seconds))
        return [CallSite(*json.loads(self._store.get(f"{what} {key}"))) for key in keys]

    def _lose(self, at: tuple[str, int], site: str, how: str) -> RankError:
        """Give up all further exchanges, and return the error that names the ranks that did not come.

        Args:
            at: The kind and number of the wait.
            site: The call site in words.
            how: How long this rank waited, in words.
        """
        kind, number = at
        missing = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + GRACE
        try:
            while missing := [rank for rank in missing if int(self._get(f"{kind} {rank}") or 0) < number]:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL)
            why = self._stop_before(number if kind == _EXCHANGE else self.exchanges + 1)
            lost = "; ".join(
                f"rank {rank} did not come: it {why.removeprefix(f'rank {rank} ')}"
                if why.startswith(f"rank {rank} ")
                else f"rank {rank} did not come {how}: it is dead, stuck, or does something else"
                for rank in missing
            )
            lost = lost or ("" if f" {_LOST}" in why else why)
        except RuntimeError:  # the errors of all kinds of stores
            lost = "ranks were lost, and so was the store that could say which: see its host"
        self.broken = f"{site}: {lost or f'all ranks came, but not all {how}, or what connects them broke'}"
        self._announce_stop(self.exchanges + 1, f"{_LOST}{self.broken}")
        return RankError(self.broken)

    def _stop_before(self, number: int) -> str:
        """Return which rank aborted before an exchange, or before an open one, and why, or ""."""
        return next(filter(None, (self._stop_at(one)[1] for one in {*self._under_way, number})), "")

    def _announce_stop(self, number: int, text: str) -> None:
        """Write to the store that this rank aborted before an exchange."""
        self._set(f"{_STOPPED} {number}", f"{self.quiet_steps} rank {self.rank} {text}")

    def _stop_at(self, number: int) -> tuple[int, str]:
        """Return after which quiet step a rank aborted before this exchange, which rank and why, or empty values."""
        with contextlib.suppress(RuntimeError):  # the store is gone; `_lose` reports that
            if found := self._get(f"{_STOPPED} {number}"):
                step, _, text = found.partition(" ")
                return int(step), text
        return 0, ""

    def _set(self, key: str, value: object) -> None:
        """Write to the store the exchange or wait that this rank has reached, or why it aborted."""
        with contextlib.suppress(RuntimeError):  # the store is gone; `_lose` reports that
            self._store.set(key, str(value))

    def _get(self, key: str) -> str:
        """Return the values of ranks in the store under a key, or empty."""
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""


def _differences(sites: Sequence[CallSite]) -> str:
    """Describe the facts that differ between ranks, and which ranks have which value."""
    found = list[str]()
    for part in dict.fromkeys(name for one in sites for name in one.parts):
        ranks = dict[str, list[str]]()
        for rank, one in enumerate(sites):
            ranks.setdefault(one.parts.get(part, "not there"), []).append(str(rank))
        if len(ranks) > 1:
            each = [f"{value} on rank{'s' * (len(of) > 1)} {', '.join(of)}" for value, of in ranks.items()]
            found.append(f"{part}: {', but '.join(each)}")
    return "; ".join(found)


def checked_group(group: "dist.ProcessGroup | None") -> "dist.ProcessGroup":
    """Return the group, or the default one. Raise ConfigError if this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "ranks need a process group: call torch.distributed.init_process_group first, as under torchrun"
        )
    found: Any = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        raise ConfigError(f"group: expected a process group that this process is in, got {found!r}")
    return found
