"""Ranks: the processes that run each step together, what they tell each other, and the wires that carry it."""

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
from ..config import check_seconds, checked, refuse
from ..running import Unique
from .shared import RankMemory

Exchange = Callable[[float], "list[Message]"]
"""An exchange under way: called with a timeout in seconds, it returns every rank's message."""
HOST: Final = "host"
EXCHANGE: Final = "exchange"
WAIT: Final = "wait"
_STOPPED: Final = "stopped before exchange"
PATIENCE: Final = 0.2
"""Seconds after which a rank that waits says in the store that it is there, and looks there whether one broke off."""
GRACE: Final = 2.0
"""Seconds that others have to say that they are there, once one rank knows that something is wrong."""
_LOOK: Final = 0.02
PAUSE: Final = 0.5
"""Seconds between two looks of ranks that exchange nothing."""
_ABORTED: Final = 20.0
"""Seconds in which collectives are gone that were aborted."""
FITS, EAGER, REFUSED, FAILED, STOPPED, LEFT = range(6)
"""What a rank says of its batch: a bucket takes it, none does, or the rank refuses it.

Or, in the place of that: it failed in the step before, which the others ran; it was stopped before it could say
anything of this one; it left a loop of steps.
"""
AXES: Final = 8
"""Varying axes whose live sizes one message holds, at most."""
_TEXT: Final = 256
_LAYOUT: Final = struct.Struct(f"<{5 + AXES}q{_TEXT}s")
_SPIN: Final = 0.001
"""Seconds that a rank asks without a pause; then each pause is 1 % of what it has waited. An idle rank waits often."""
_LOOPS: Final = 62
"""Loops of steps that may be open at once, at most: each has a bit of a message's number."""


@attrs.frozen
class Place:
    """A place in the program, which ranks reach together.

    Attributes:
        at: The place in words.
        parts: What must be the same on all ranks there, by name.
    """

    at: str
    parts: Mapping[str, str] = types.MappingProxyType({})

    @functools.cached_property
    def digest(self) -> int:
        """A number for it, the same on all ranks."""
        text = json.dumps([self.at, dict(self.parts)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@attrs.frozen
class Stop:
    """What this rank says in an exchange in place of what it would say, because it broke off a step or a loop.

    Attributes:
        answer: FAILED, STOPPED or LEFT.
        text: What it broke off, and why.
        loops: The loops of steps that it left, as bits.
    """

    answer: int
    text: str
    loops: int = 0


@attrs.frozen
class Message:
    """What one rank tells the others."""

    place: int  # a digest of the place in the program, the same on all ranks
    answer: int = FITS
    bucket: int = 0  # that takes the batch, 0 for none, or any other number to tell
    why: int = 0  # the reason's index among the known ones
    idle: bool = False
    live: tuple[int, ...] = ()  # sizes by axis; zeros follow them in a message that came
    text: str = ""  # the reason, of which the first 256 bytes are sent

    def pack_into(self, memory: Any) -> None:
        """Write the message into a buffer of bytes."""
        raw, live = self.text.encode(), self.live + (0,) * (AXES - len(self.live))
        if len(raw) > _TEXT:
            raw = raw[: _TEXT - 3].decode(errors="ignore").encode() + b"..."
        _LAYOUT.pack_into(memory, 0, self.place, self.answer, self.bucket, self.why, self.idle, *live, raw)


def _unpacked(memory: Any) -> list[Message]:
    """The messages in a buffer of bytes."""
    return [
        Message(place, answer, bucket, why, bool(idle), tuple(live), text.rstrip(b"\0").decode())
        for place, answer, bucket, why, idle, *live, text in _LAYOUT.iter_unpack(memory)
    ]


class HostWire:
    """Carries one exchange at a time over gloo, in host memory."""

    def __init__(self, group: "dist.ProcessGroup", size: int, *, pinned: bool = False) -> None:
        with outside_inference():
            self._own, self._all = (
                torch.zeros(count * _LAYOUT.size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                for count in (1, size)
            )
        self._group = group
        self._work: Any = None

    def send(self, message: Message) -> None:
        """Begin an exchange with this rank's message."""
        message.pack_into(self._own.numpy())
        self._work = _all_gather(self._all, self._own, self._group)

    def arrives(self, seconds: float) -> bool:
        """Wait for the messages, for so many seconds at most. RuntimeError if a connection is lost."""
        with contextlib.suppress(RuntimeError):  # the time is over; the work may end between that and the next line
            self._work.wait(dt.timedelta(seconds=max(seconds, 0.001)))
        if not self._work.is_completed():
            return False
        self._work.wait()  # returns at once, or raises what ended the work
        return True

    def messages(self) -> list[Message]:
        """Every rank's message, once they have arrived."""
        return _unpacked(self._all.numpy())


class DeviceWire(HostWire):
    """Carries exchanges over the device's group: an upload, an all-gather and a download on a stream of its own."""

    def __init__(self, group: "dist.ProcessGroup", size: int, device: torch.device) -> None:
        super().__init__(group, size, pinned=True)
        self._module: Any = torch.get_device_module(device)
        with outside_inference():
            self._mine, self._every = self._own.to(device), self._all.to(device)
        self._stream, self._event = self._module.Stream(device), self._module.Event()

    def arrives(self, seconds: float) -> bool:
        """Wait for the messages, for so many seconds at most."""
        return _passes(self._event.query, seconds)

    def send(self, message: Message) -> None:
        """Begin an exchange with this rank's message."""
        message.pack_into(self._own.numpy())
        with self._module.stream(self._stream), outside_inference():
            self._mine.copy_(self._own, non_blocking=True)
            _all_gather(self._every, self._mine, self._group).wait()
            self._all.copy_(self._every, non_blocking=True)
            self._event.record(self._stream)


class SharedWire:
    """Carries one exchange at a time through memory that all ranks of one host share."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory, self._number = memory, 0

    def send(self, message: Message) -> None:
        """Begin an exchange with this rank's message."""
        data = bytearray(_LAYOUT.size)
        message.pack_into(data)
        self._number = self._memory.send(data)

    def arrives(self, seconds: float) -> bool:
        """Wait for the messages, for so many seconds at most. RuntimeError if a process has ended."""
        return _passes(functools.partial(self._memory.came, self._number), seconds)

    def messages(self) -> list[Message]:
        """Every rank's message, once they have arrived."""
        return _unpacked(self._memory.take(self._number))


def _passes(query: Callable[[], bool], seconds: float) -> bool:
    """Wait until a query says yes, for so many seconds at most; whether it does."""
    begin = time.monotonic()
    while not query():
        waited = time.monotonic() - begin
        if waited > seconds:
            return False
        if waited < _SPIN:
            os.sched_yield()
        else:
            time.sleep(min(waited / 100, _LOOK))
    return True


def _all_gather(out: torch.Tensor, own: torch.Tensor, group: "dist.ProcessGroup") -> Any:
    """Begin to gather every rank's tensor, under the name that this torch has for it."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, own, group=group, async_op=True)


class Ranks(Unique):
    """The ranks that run each step together, over a process group of torch.distributed.

    All ranks make it at once, with the same arguments. Runners on the same ranks share one.

    Args:
        group: The process group that the ranks form; the default group if None.
        on: Where sizes are exchanged: in "host" memory, which all ranks share if they are on one host, else over a
            group of gloo; or by the name of a device's kind, such as "cuda", over a group of that kind's own backend,
            on the current device.
        equal: Whether all ranks get the same batches, as those of tensor parallelism do. Nothing is exchanged then.
        shards: Over how many ranks a bucket's tokens are spread: every bucket must divide by it. If the group divides,
            too, each `shards` ranks in a row share a batch and must bring the same sizes.
        timeout: Seconds that a rank waits for the others before a step.
        capture_timeout: The same for each bucket of a capture. Stay below the ten minutes after which NCCL, by default,
            ends a process without a word of who was missing.

    Raises:
        ConfigError: There is no such group, or an argument makes no sense.
        RankError: A rank did not come within `capture_timeout`.
    """

    over: str | None = None
    """What carries exchanges: "shared memory" if all ranks are on one host, else the backend; None for one rank."""
    _memory: RankMemory | None = None
    alone = False
    """Whether this is the only process, and the other ranks speak from a recording."""
    said: tuple[Message, ...] = ()
    """What each rank said of the last step that was agreed on."""
    brought: Mapping[Axis, tuple[int, ...]] = types.MappingProxyType({})
    """Live rows that each rank brings to the present step, by axis."""
    runners = 0
    """How many runners were made with these ranks."""
    open = 0
    """The loops of steps that no rank has left, as bits."""
    ended = "it has ended"
    """What ranks said that broke off last."""
    turns = 0
    """Steps of equal ranks since one broke off last."""
    _loops = 0
    _due = math.inf

    def __init__(
        self,
        group: "dist.ProcessGroup | None" = None,
        *,
        on: str = HOST,
        equal: bool = False,
        shards: int = 1,
        timeout: float = 60.0,
        capture_timeout: float = 480.0,
    ) -> None:
        checked("equal", "True or False", equal, bool)
        checked("shards", "a whole number, at least 1", shards, int, 1)
        check_seconds("timeout", timeout)
        check_seconds("capture_timeout", capture_timeout)
        kind = "'host' or the name of a device's kind, such as 'cuda'"
        try:
            known = checked("on", kind, on, str) == HOST or torch.device(on).index is None
        except RuntimeError:  # torch knows no such kind
            known = False
        if not known:
            refuse("on", kind, on)
        self.group = checked_group(group)
        self.rank: int = dist.get_rank(self.group)
        self.size: int = dist.get_world_size(self.group)
        self.on, self.equal, self.shards = on, equal, shards
        self.timeout, self.capture_timeout = timeout, capture_timeout
        self.exchanges = self._waits = 0
        self.broken: str | None = None
        self._stops: list[Stop] = []
        self._under_way: dict[int, HostWire | SharedWire] = {}
        self._late: list[int] = []
        self._heard_stop = False  # that a rank broke off, before the end of the exchange that it ended
        if self.size > 1:
            self._due = 0.0
            self._connect()
            self._free = [self._wire()]
            if self.on == HOST:
                self._share()

    def _connect(self) -> None:
        """Make the group that sizes are exchanged in, and a store that all ranks reach and nothing else uses."""
        from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store  # noqa: PLC0415 - some builds of torch have none of it

        whole = _get_process_group_store(self.group)
        count = functools.partial(whole.add, f"slotgraph ranks of {self.rank}")
        self._store = PrefixStore(f"slotgraph {count(1)}", whole)
        mine = Place("Ranks", {"equal=": repr(self.equal), "shards=": repr(self.shards), "on=": repr(self.on)})
        try:
            named = self._named("made by", self.rank, mine, [*range(self.size)], self.capture_timeout)
        except RuntimeError as error:
            lost = [str(rank) for rank in range(self.size) if not self._store.check([f"made by {rank}"])]
            self._store.delete_key(f"made by {self.rank}")
            count(-1)
            who = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(lost)}"
            raise RankError(
                f"Ranks: {who} did not come within {self.capture_timeout:g} s: make Ranks on all ranks at once, in the "
                "same order"
            ) from error
        if differing := _differing(named):
            raise RankError(f"Ranks were made otherwise on each rank: {differing}; give all the same arguments")
        members = dist.get_process_group_ranks(self.group)
        limit = dt.timedelta(seconds=2 * max(self.timeout, self.capture_timeout))  # beyond both, which come first
        self.over = "gloo" if self.on == HOST else dist.get_default_backend_for_device(self.on)
        try:
            self._connection: Any = dist.new_group(
                members, timeout=limit, backend=self.over, use_local_synchronization=True, group_desc="slotgraph"
            )
        except RuntimeError as error:
            raise RankError(f"Ranks: the ranks could not connect over {self.over}: {error}") from error

    def _share(self) -> None:
        """Exchange through shared memory from now on, if all ranks can open that of rank 0."""
        told, memory = "the choice of what carries exchanges", RankMemory(self.rank, self.size, _LAYOUT.size)
        place, seconds = "" if self.rank else memory.open(self._connection), self.capture_timeout
        first, *_ = self.begin(Message(0, text=place), told, seconds)(seconds)
        place = place or (first.text and memory.open(self._connection, first.text))
        if all(one.text for one in self.begin(Message(0, text=place), told, seconds)(seconds)):
            self._memory, self._free, self.over = memory, [], "shared memory"

    def _wire(self) -> HostWire | SharedWire:
        """What carries one more exchange at a time."""
        if self._memory:
            return SharedWire(self._memory)
        if self.on == HOST:
            return HostWire(self._connection, self.size)
        device = torch.device(self.on, torch.get_device_module(self.on).current_device())
        return DeviceWire(self._connection, self.size, device)

    @property
    def batches(self) -> int:
        """How many batches they bring where each `shards` ranks in a row share one; 0 where they do not divide so."""
        return 0 if self.size % self.shards else self.size // self.shards

    @property
    def quiet(self) -> bool:
        """Whether nothing is exchanged before a step, because there is one rank, or all get the same batches."""
        return self.size == 1 or self.equal

    def live(self, axis: Axis) -> tuple[int, ...]:
        """Live rows on an axis that each rank brought to the step, in the order of ranks; zeros before the first.

        ConfigError of an axis that batches do not vary on, whose rows no rank tells.
        """
        if self.brought and axis not in self.brought:
            raise ConfigError(
                f"ranks do not tell each other their live rows on {axis}: declare a copied slot that has this axis"
            )
        return self.brought.get(axis, (0,) * self.size)

    def stop(self, answer: int, text: str, loop: int = 0, *, is_new: bool = False) -> str:
        """Say in the next exchange that this rank broke off, and at once to ranks that wait for it.

        Args:
            answer: FAILED, STOPPED or LEFT.
            text: What it broke off, and why.
            loop: The bit of the loop of steps that it left, which includes what was broken off within it.
            is_new: Whether it is a step that `attend` has not counted.

        Returns:
            What another rank has said before, if one has.
        """
        if self.size == 1:
            return ""
        self._due, self.turns = 0.0, self.turns + is_new
        key = f"{_STOPPED} {self.exchanges + len(self._stops) + 1}"
        if loop and self._stops:
            last = self._stops.pop()
            self._stops.append(Stop(LEFT, f"{last.text}, and {text}", last.loops | loop))
            return ""
        self._stops.append(Stop(answer, text, loop))
        _, other = self._noted_stop(key)
        if not self._heard_stop:  # else the others know that the loop ended, and this need not be sent
            self._note(key, f"{self.turns} rank {self.rank} {text}")
        return other

    def resolve(self, told: str, timeout: float) -> None:
        """End the exchanges that were broken off, so that all ranks begin the next one together. told: the next one.

        RankError if an exchange before failed, or if the others come with the step after one that failed here.
        """
        if self.broken:
            raise RankError(f"{told}: these ranks are lost to each other: {self.broken}")
        while self._late:
            self._end(self._late[0], told, timeout, heeds=False)
        self._heard_stop = False
        while self._stops:
            stop = self._stops.pop(0)
            loops = stop.loops & self.open
            if stop.loops and not loops:  # all ranks know that they ended
                continue
            said = Message(0, stop.answer, bucket=loops, text=stop.text)
            messages = self._end(self._send(said), told, timeout, heeds=False)
            if stop.answer == FAILED and any(one.answer not in (FAILED, LEFT) for one in messages):
                raise RankError(self.ended)

    def attend(self, told: str, timeout: float) -> None:
        """Count one more step of ranks that exchange nothing. RankError, soon, if one broke off a step before it."""
        self.turns += 1
        if self._due < time.monotonic():
            self._due = time.monotonic() + PAUSE
            self.resolve(told, timeout)
            turn, why = self._noted_stop(f"{_STOPPED} {self.exchanges + 1}")
            if why and turn < self.turns:
                self.begin(Message(0), told, timeout)(timeout)  # which raises

    def begin_loop(self) -> int:
        """Open a loop of steps, as all ranks do now; its bit."""
        self._loops += 1
        bit = 1 << self._loops % _LOOPS
        self.open |= bit
        return bit

    def wait(self, event: Event, device: torch.device, told: str, seconds: float, *, together: bool) -> None:
        """Wait until a device is past an event. told: what ends there. together: whether all ranks wait for it.

        RankError after so many seconds. The group's collectives are aborted then.
        """
        if self.size == 1:
            event.synchronize()
            return
        if together:
            self._waits += 1
            at = WAIT, self._waits
        else:
            at = EXCHANGE, self.exchanges + 1  # the one that follows: other ranks may be there
        if not self._came(functools.partial(_passes, event.query), at, seconds, self.exchanges + 1, GRACE):
            lost = self._lost(at, told, f"within {seconds:g} s")
            self._abort(event, device)
            raise lost

    def _came(
        self, arrives: Callable[[float], bool], at: tuple[str, int], timeout: float, before: int, grace: float = 0.0
    ) -> bool:
        """Whether what is waited for arrives in time. at: what this rank then says that it waits for.

        before: wait only `grace` seconds longer once a rank says that it broke off before this exchange; 0 for none.
        """
        deadline, is_noted, is_stopped = time.monotonic() + timeout, False, False
        while not arrives(min(PATIENCE, max(deadline - time.monotonic(), 0.0))):
            if time.monotonic() >= deadline:
                return False
            if not is_noted:
                self._note(f"{at[0]} {self.rank}", at[1])
                is_noted = True
            if before and not is_stopped and self._stop_before(before):
                deadline, is_stopped = min(deadline, time.monotonic() + grace), True
        return True

    def _abort(self, event: Event, device: torch.device) -> None:
        """End the group's collectives on a device, which would wait for ever; on a CPU the group's time-out does."""
        if device.type == "cpu":
            return
        with contextlib.suppress(RuntimeError):  # which is how a group says that it has none on the device
            abort = self.group._get_backend(device).abort  # noqa: SLF001 - torch has no other name for it
            threading.Thread(target=abort, name="slotgraph abort", daemon=True).start()  # it does not soon return
            _passes(event.query, _ABORTED)

    def begin(self, message: Message, told: str, timeout: float, loop: int = 0) -> Exchange:
        """Tell all ranks a message, after what is left of exchanges before it has ended.

        Args:
            message: What this rank says.
            told: The place in the program, in words.
            timeout: Seconds to wait for the end of earlier exchanges.
            loop: The bit of the loop of steps that the message belongs to.

        Raises:
            RankError: An exchange before failed, this rank broke off a step before, or another one left the loop.
        """
        self.resolve(told, timeout)
        if loop & ~self.open:
            raise RankError(f"{told}: {self.ended}: begin again with all live requests")
        return functools.partial(self._end, self._send(message), told)

    def _send(self, message: Message) -> int:
        """Send a message; the number of its exchange."""
        wire = self._free.pop() if self._free else self._wire()
        wire.send(message)
        self.exchanges += 1
        self._under_way[self.exchanges] = wire
        return self.exchanges

    def _end(self, number: int, told: str, timeout: float, *, heeds: bool = True) -> list[Message]:
        """Every rank's message. RankError, in time, names the ranks that did not come, and ends all exchanges.

        heeds: whether it also raises if a rank broke off before: at once, so that the exchange is ended later.
        """
        at, wire = (EXCHANGE, number), self._under_way[number]
        try:
            came = self._came(wire.arrives, at, timeout, number if heeds else 0)
        except RuntimeError as error:
            self._note(f"{EXCHANGE} {self.rank}", number)
            raise self._lost(at, told, "before its connection was lost") from error
        except BaseException:
            self._put_off(number)
            raise
        if not came:
            if heeds and (why := self._stop_before(number)):
                self._put_off(number)
                self._heard_stop = True
                raise RankError(why)
            raise self._lost(at, told, f"within {timeout:g} s")
        messages = wire.messages()
        self._free.append(self._under_way.pop(number))
        self._late = [one for one in self._late if one != number]
        stops = [(rank, one) for rank, one in enumerate(messages) if one.answer >= FAILED]
        if stops:
            self.turns, self.ended = 0, "; ".join(f"rank {rank} {one.text}" for rank, one in stops)
            for _, one in stops:
                self.open &= ~one.bucket
            if heeds:
                raise RankError(self.ended)
        return messages

    def _put_off(self, number: int) -> None:
        """Leave the end of an exchange to the next one's begin."""
        self._due = 0.0
        if number not in self._late:
            self._late.append(number)

    def apart(self, mine: Place, messages: Sequence[Message]) -> RankError:
        """The error of ranks that are at different places: where each is, or what differs there."""
        digests = [one.place for one in messages]
        try:
            named = self._named("place", mine.digest, mine, digests, GRACE)
        except RuntimeError:  # what stores raise, whichever it is
            return RankError(f"ranks do not run the same steps: this one is at {mine.at}, and others do not say where")
        where = "; ".join(f"rank {rank} is at {one.at}" for rank, one in enumerate(named))
        if len({one.at for one in named}) == 1:
            where = f"their runners differ: {_differing(named)}; all are at {mine.at}"
        return RankError(f"ranks do not run the same steps: {where}")

    def _named(self, what: str, own: int, mine: Place, keys: Sequence[int], seconds: float) -> list[Place]:
        """Leave a place in the store, and read what others leave there. RuntimeError if they do not in time."""
        self._store.set(f"{what} {own}", json.dumps([mine.at, dict(mine.parts)]))
        self._store.wait([f"{what} {key}" for key in keys], dt.timedelta(seconds=seconds))
        return [Place(*json.loads(self._store.get(f"{what} {key}"))) for key in keys]

    def _lost(self, at: tuple[str, int], told: str, how: str) -> RankError:
        """The error of a rank that has waited in vain, from now on. told: for what. how: how long, or until when."""
        missing, deadline = [rank for rank in range(self.size) if rank != self.rank], time.monotonic() + GRACE
        try:
            while missing := [rank for rank in missing if int(self._noted(f"{at[0]} {rank}") or 0) < at[1]]:
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK)
            why = self._stop_before(at[1] if at[0] == EXCHANGE else self.exchanges + 1)
            lost = "; ".join(
                f"rank {rank} did not come: it {why.removeprefix(f'rank {rank} ')}"
                if why.startswith(f"rank {rank} ")
                else f"rank {rank} did not come {how}: it is dead, stuck, or does something else"
                for rank in missing
            )
        except RuntimeError:  # what stores raise, whichever it is
            lost = "ranks were lost, and so was the store that could tell which: see its host"
        self.broken = f"{told}: {lost or f'all ranks came, but not all {how}, or what connects them broke'}"
        self._note(f"{_STOPPED} {self.exchanges + 1}", f"{self.turns} rank {self.rank} lost others: {self.broken}")
        return RankError(self.broken)

    def _stop_before(self, number: int) -> str:
        """What a rank says that broke off before an exchange, or before one under way; nothing if none did."""
        found = (self._noted_stop(f"{_STOPPED} {one}")[1] for one in {*self._under_way, number})
        return next(filter(None, found), "")

    def _noted_stop(self, key: str) -> tuple[int, str]:
        """What a rank says that broke off, and the step of equal ranks after which it did; nothing if none did."""
        with contextlib.suppress(RuntimeError):  # the store is gone, which `_lost` says
            if found := self._noted(key):
                turn, _, text = found.partition(" ")
                return int(turn), text
        return 0, ""

    def _note(self, key: str, text: object) -> None:
        """Leave word in the store: the EXCHANGE or WAIT that this rank is at or past, or why it broke off."""
        with contextlib.suppress(RuntimeError):  # the store is gone, which `_lost` says
            self._store.set(key, str(text))

    def _noted(self, key: str) -> str:
        """What ranks have left there, or nothing."""
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""


def _differing(named: Sequence[Place]) -> str:
    """What is not the same on all ranks, and which of them have which."""
    found = list[str]()
    for part in dict.fromkeys(name for one in named for name in one.parts):
        ranks = dict[str, list[str]]()
        for rank, one in enumerate(named):
            ranks.setdefault(one.parts.get(part, "not there"), []).append(str(rank))
        if len(ranks) > 1:
            each = [f"{value} on rank{'s' * (len(of) > 1)} {', '.join(of)}" for value, of in ranks.items()]
            found.append(f"{part}: {', but '.join(each)}")
    return "; ".join(found)


def checked_group(group: "dist.ProcessGroup | None") -> "dist.ProcessGroup":
    """The group, or the default one. ConfigError where this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "ranks need a process group: call torch.distributed.init_process_group first, as under torchrun"
        )
    found: Any = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        raise ConfigError(f"group: expected a process group that this process is in, got {found!r}")
    return found
