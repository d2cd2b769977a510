"""Ranks: the processes that run each step together, and what they tell each other."""

import contextlib
import datetime as dt
import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from ...backends.base import Event
from ...dataflow.axes import Axis
from ...dataflow.errors import ConfigError, RankError
from ..arguments import check_seconds, checked, refuse
from ..exclusive import Unique
from .device_wire import DeviceWire
from .exchange import PATIENCE, Exchange
from .message import Message
from .rollcall import EXCHANGE, WAIT, RollCall
from .wire import HostWire, Wire

HOST: Final = "host"
_BUSY: Final = 0.01
"""Seconds for which the device is asked as often as can be: as long as most steps take."""
_PAUSE: Final = 0.0001
_ABORTED: Final = 20.0
"""Seconds in which collectives are gone that were aborted."""
_COUNT: Final = itertools.count()


class Ranks(Unique):
    """The ranks that run each step together, over a process group of torch.distributed.

    group: the one that they form; the default group where none is given. equal: whether all ranks get the same batches,
    as those of tensor parallelism do: nothing is exchanged before a step then. shards: over how many ranks a bucket's
    tokens are spread, by which every bucket must divide; where the group divides so, each so many ranks in a row share
    a batch, and must bring the same sizes. timeout: seconds that a rank waits for the others before a step.
    capture_timeout: for each bucket while graphs are captured, which some ranks may take longer for; less than the ten
    minutes after which NCCL, unless told otherwise, ends a process without a word of who was missing.

    on: where sizes are exchanged: in "host" memory, over a group of gloo, or by the name of a device's kind, such as
    "cuda", over a group of that kind's own backend, on the current device. Either is made here, by all ranks at once.
    Runners share one of these where they run on the same ranks. Raises ConfigError where there is no group, or a number
    makes no sense.
    """

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
        if checked("shards", "a whole number, at least 1", shards, int) < 1:
            refuse("shards", "a whole number, at least 1", shards)
        check_seconds("timeout", timeout)
        check_seconds("capture_timeout", capture_timeout)
        _check_place(on)
        self.group = checked_group(group)
        self.rank: int = dist.get_rank(self.group)
        self.size: int = dist.get_world_size(self.group)
        self.equal = equal
        self.shards = shards
        self.timeout = timeout
        self.capture_timeout = capture_timeout
        self.on = on
        self.exchanges = 0
        self._waits = 0
        self.broken: RankError | None = None
        self._live: Mapping[Axis, tuple[int, ...]] = {}
        if self.size > 1:
            self._connection, self._roll = self._connected()
            self._free = [self._wire()]

    def _connected(self) -> "tuple[dist.ProcessGroup, RollCall]":
        """The group on the host, and the store that its ranks are called in."""
        members, number = dist.get_process_group_ranks(self.group), next(_COUNT)
        limit = dt.timedelta(seconds=2 * max(self.timeout, self.capture_timeout))  # beyond both, which come first
        backend = "gloo" if self.on == HOST else dist.get_default_backend_for_device(self.on)
        made: Any = dist.new_group(
            members, timeout=limit, backend=backend, use_local_synchronization=True, group_desc="slotgraph"
        )
        from torch.distributed.distributed_c10d import (  # noqa: PLC0415 - some builds of torch have none of it
            PrefixStore,
            _get_process_group_store,
        )

        store = _get_process_group_store(made)
        return made, RollCall(PrefixStore(f"slotgraph{number}", store), self.rank, self.size)

    def _wire(self) -> Wire:
        """Memory for one more exchange at a time."""
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
        """Whether nothing is exchanged before a step: there is one rank, or all are known to get the same batches."""
        return self.size == 1 or self.equal

    def live(self, axis: Axis) -> tuple[int, ...]:
        """Live rows on an axis that each rank brought to the step, in the order of ranks; zeros before the first.

        ConfigError of an axis that batches do not vary on, whose rows no rank tells.
        """
        if self._live and axis not in self._live:
            message = (
                f"ranks do not tell each other their live rows on {axis}: declare a copied slot that has this axis"
            )
            raise ConfigError(message)
        return self._live.get(axis, (0,) * self.size)

    def brought(self, live: Mapping[Axis, tuple[int, ...]]) -> None:
        """What the ranks bring to the step that begins now."""
        self._live = live

    def broke_off(self, error: BaseException) -> None:
        """This rank broke off a step, in which others may wait for it: their errors will say so."""
        if self.size > 1:
            self._roll.raised(f"{type(error).__name__}: {error}"[:500])

    def wait(self, event: Event, device: torch.device) -> None:
        """Wait until a device is past an event, which it never is where its collectives wait for a lost rank.

        RankError after `timeout` seconds; from then on nothing is exchanged, and the group's collectives are aborted.
        """
        if self.size == 1:
            event.synchronize()
            return
        self._waits += 1
        begin, here = time.monotonic(), False
        while not event.query():
            waited = time.monotonic() - begin
            if waited > PATIENCE and not here:
                self._roll.here(WAIT, self._waits)
                here = True
            if waited > self.timeout:
                raise self._lost(WAIT, self._waits, "the end of a step on the device", self.timeout, event, device)
            time.sleep(0 if waited < _BUSY else _PAUSE)

    def stood_still(self, event: Event, device: torch.device, told: str, seconds: float) -> RankError:
        """A device has stood for so long before an event of a capture: who is lost, as each exchange says after it."""
        return self._lost(EXCHANGE, self.exchanges + 1, told, seconds, event, device)

    def _lost(self, what: str, number: int, told: str, seconds: float, event: Event, device: torch.device) -> RankError:
        """Who did not come in so many seconds, before an event that the device never passes."""
        self._roll.here(what, number)
        self.broken = self._roll.loss(what, number, told, f"within {seconds:g} s")
        self._abort(event, device)
        return self.broken

    def _abort(self, event: Event, device: torch.device) -> None:
        """End the group's collectives on the device, so that nobody waits for it for ever, this process's end neither.

        A group without any there has nothing to end, nor has a CPU, where the group's own time-out ends them.
        """
        if device.type == "cpu":
            return
        with contextlib.suppress(RuntimeError):  # which is how it says that it has none
            abort = self.group._get_backend(device).abort  # noqa: SLF001 - torch has no other name for it
            threading.Thread(target=abort, name="slotgraph abort", daemon=True).start()  # it does not soon return
            deadline = time.monotonic() + _ABORTED
            while not event.query() and time.monotonic() < deadline:
                time.sleep(_PAUSE)

    def begin(self, message: Message, told: str) -> Exchange:
        """Tell all ranks; what they tell is to be waited for. RankError where an exchange before failed."""
        if self.broken is not None:
            message_now = f"{told}: these ranks are lost to each other: {self.broken}"
            raise RankError(message_now)
        self.exchanges += 1
        wire = self._free.pop() if self._free else self._wire()
        message.write(wire.writable)
        wire.begin()
        return Exchange(wire, self.exchanges, self._roll, told)

    def end(self, exchange: Exchange, timeout: float) -> list[Message]:
        """What all ranks told, in their order; the same when asked again.

        RankError where one does not come within `timeout` seconds; from then on nothing is exchanged any more.
        """
        if exchange.messages is None:
            try:
                exchange.messages = exchange.wait(timeout)
            except BaseException as error:  # an interrupt, too, leaves others with an answer that nobody reads
                told = str(error) if isinstance(error, RankError) else f"{exchange.told} was broken off"
                self.broken = RankError(told)
                raise
            self._free.append(exchange.wire)
        return exchange.messages


def _check_place(on: Any) -> None:
    """ConfigError where sizes cannot be exchanged there: it is neither the host nor a kind of device."""
    try:
        known = (
            checked("on", "'host' or the name of a device's kind", on, str) == HOST or torch.device(on).index is None
        )
    except RuntimeError:  # torch knows no such kind
        known = False
    if not known:
        refuse("on", "'host' or the name of a device's kind, such as 'cuda'", on)


def checked_group(group: "dist.ProcessGroup | None") -> "dist.ProcessGroup":
    """The group, or the default one. ConfigError where this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        message = "ranks need a process group: call torch.distributed.init_process_group first, as under torchrun"
        raise ConfigError(message)
    found: Any = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        message = f"group: expected a process group that this process is in, got {found!r}"
        raise ConfigError(message)
    return found
