"""Ranks: the processes that run each step together, and what they tell each other."""

import datetime as dt
import itertools
from collections.abc import Mapping
from typing import Any, Final, final

import torch
import torch.distributed as dist

from ...dataflow.axes import Axis
from ...dataflow.errors import ConfigError, RankError
from .device_wire import DeviceWire
from .exchange import Exchange
from .message import Message
from .rollcall import RollCall
from .wire import HostWire, Wire

HOST: Final = "host"
_COUNT: Final = itertools.count()


@final
class Ranks:
    """The ranks that run each step together, over a process group of torch.distributed.

    group: the one that they form; the default group where none is given. equal: whether all ranks get the same batches,
    as those of tensor parallelism do: nothing is exchanged before a step then. shards: over how many ranks a bucket's
    tokens are spread, by which every bucket must divide. timeout: seconds that a rank waits for the others before a
    step. capture_timeout: while graphs are captured, which some ranks may take longer for.

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
        capture_timeout: float = 1800.0,
    ) -> None:
        self.group = checked_group(group)
        self.rank: int = dist.get_rank(self.group)
        self.size: int = dist.get_world_size(self.group)
        for name, number in (("shards", shards), ("timeout", timeout), ("capture_timeout", capture_timeout)):
            if number <= 0:
                message = f"{name} is {number}: expected more than 0"
                raise ConfigError(message)
        self.equal = equal
        self.shards = shards
        self.timeout = timeout
        self.capture_timeout = capture_timeout
        self.on = on
        self.exchanges = 0
        self._broken: RankError | None = None
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
    def quiet(self) -> bool:
        """Whether nothing is exchanged before a step: there is one rank, or all are known to get the same batches."""
        return self.size == 1 or self.equal

    def live(self, axis: Axis) -> tuple[int, ...]:
        """Live rows on an axis that each rank brought to the step, in the order of ranks; zeros before the first."""
        return self._live.get(axis, (0,) * self.size)

    def brought(self, live: Mapping[Axis, tuple[int, ...]]) -> None:
        """What the ranks bring to the step that begins now."""
        self._live = live

    def broke_off(self, error: BaseException) -> None:
        """This rank broke off a step, in which others may wait for it: their errors will say so."""
        if self.size > 1:
            self._roll.raised(f"{type(error).__name__}: {error}"[:500])

    def begin(self, message: Message, told: str) -> Exchange:
        """Tell all ranks; what they tell is to be waited for. RankError where an exchange before failed."""
        if self._broken is not None:
            message_now = f"{told}: these ranks are lost to each other: {self._broken}"
            raise RankError(message_now)
        self.exchanges += 1
        wire = self._free.pop() if self._free else self._wire()
        message.write(wire.writable)
        wire.begin()
        return Exchange(wire, self.exchanges, self._roll, told)

    def end(self, exchange: Exchange, timeout: float) -> list[Message]:
        """What all ranks told, in their order.

        RankError where one does not come within `timeout` seconds; from then on nothing is exchanged any more.
        """
        try:
            found = exchange.wait(timeout)
        except BaseException as error:  # an interrupt, too, leaves others with an answer that nobody reads
            told = str(error) if isinstance(error, RankError) else f"{exchange.told} was broken off"
            self._broken = RankError(told)
            raise
        self._free.append(exchange.wire)
        return found


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
