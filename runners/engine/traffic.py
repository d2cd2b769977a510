"""Traffic: which memory the operators of a run read and write, and what they read of slots in host memory.

A device copies from host memory after a replay has returned, so the next fill could overwrite it before the copy. If a
step is seen to copy from such slots, an event follows each of its runs, and the next fill waits for it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from ...backends.base import Backend
from ...backends.operators import (
    OperatorWatch,
    is_composite,
    is_plain,
    run_uncompiled,
    run_under,
    storage_key,
    written,
)
from ...dataflow.buffers import Buffers, span
from ...dataflow.capabilities import HOST
from ...dataflow.plan import Absent

T = TypeVar("T")
OnWrite = Callable[[torch.Tensor, str, Sequence[Any]], None]
Done = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Traffic(OperatorWatch):
    """Records each operator of a run, except kernels that bypass torch's dispatcher, such as Triton's.

    Attributes:
        found: Storages that the run used and did not allocate, each with the operators that read or wrote it.

    Args:
        writes: Called before an operator writes memory that the run did not allocate.
        done: Called after each operator except views.
    """

    def __init__(self, *, writes: OnWrite | None = None, done: Done | None = None) -> None:
        super().__init__()
        self._writes = writes
        self._done = done
        self._made: set[int] = set()
        self.found: dict[int, set[str]] = {}

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one operator, and run it."""
        plain = is_plain(operator)
        if plain and is_composite(operator):  # inference mode does not decompose it
            return self.take_apart(operator, args, kwargs)
        name = str(operator._schema.name) if plain else str(operator)  # noqa: SLF001 - no public name
        taken = list(_strided((args, kwargs)))
        if not name.startswith("aten::lift"):  # it only returns a tensor that was just made from host data
            for key in {storage_key(tensor) for tensor in taken} - self._made:
                self.found.setdefault(key, set()).update(() if plain and operator.is_view else (name,))
        if self._writes is not None:
            # the schema of an operator that takes functions does not say what these write
            for tensor in _strided(list(written(operator, args, kwargs))) if plain else taken:
                if storage_key(tensor) not in self._made:
                    self._writes(tensor, name, args)
        result = operator(*args, **kwargs)
        results = list(_strided(result))
        self._made.update({storage_key(tensor) for tensor in results} - self.found.keys())
        if self._done is not None and not (plain and operator.is_view):
            self._done(name, taken, results)
        return result


def _strided(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that have memory with an address."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_meta):
            yield leaf


def run_seen(watch: OperatorWatch, run: Callable[[], T]) -> T:
    """Run a function while a watch sees this thread's operators. Compiled functions run as they were written."""
    return run_uncompiled(lambda: run_under(watch, run))


class HostReads:
    """The slots in host memory that the device work of one runner reads.

    Attributes:
        slots: The slots that are read, each with an operator that reads it.
        possible: Whether there is any slot in host memory.
        notes: Whether an event is recorded after each step, because operators read host slots, or might.
    """

    def __init__(self, backend: Backend, buffers: Buffers) -> None:
        self.use = buffers.use
        self.slots: dict[str, str] = {}
        self._backend = backend
        handed = backend.capabilities.host_parameters  # the host passes host parameters at each replay
        self._spans = [
            (*span(buffer.tensor), buffer.name)
            for buffer in buffers
            if buffer.slot.placement == HOST and buffer.nbytes and not (handed and buffer.slot.argument is not None)
        ]
        self.possible = bool(self._spans)
        self.notes = self.possible  # until a step was watched, its operators may read host slots
        self._looked: set[Absent] = set()
        self._unsure = False

    def wants(self, absent: Absent) -> bool:
        """Return whether a step that lacks these optional slots must still be watched."""
        return self.possible and absent not in self._looked

    def look(self, run: Callable[[], Any], absent: Absent) -> Any:
        """Run a step, find the host slots that its operators read, and return its result."""
        self._looked.add(absent)
        try:
            return run_seen(Traffic(done=self._note), run)
        except BaseException:
            self._unsure = True
            raise
        finally:
            self.notes = bool(self.slots) or self._unsure

    def _note(self, operator: str, taken: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Record an operator that moves data between a host slot and the device. On the CPU any operator counts."""
        kind = self._backend.device.type
        if kind == "cpu" or any(tensor.device.type == kind for tensor in (*taken, *results)):
            for tensor in taken:
                address = tensor.data_ptr() if tensor.is_cpu else None
                for low, high, name in self._spans:
                    if address is not None and low <= address < high:
                        self.slots.setdefault(name, operator)

    def wait(self) -> None:
        """Wait until the device has read host slots, before a fill writes them. Pools do not share such slots."""
        event = self.use.reading
        if event is not None:
            event.synchronize()
            self.use.reading = None

    def note(self) -> None:
        """Record an event after a step that may read host slots: see `notes`."""
        self.use.reading = self._backend.event()
