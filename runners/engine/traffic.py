"""Traffic: which memory the operators of a run read and write, and what they read of slots in host memory.

A device copies from host memory when it gets there, which is after a replay has returned: the next fill would overwrite
it under the copy. So where a step is seen to copy from such slots, an event stands behind each of its runs, and the
next fill of that memory waits for it. All other runners spend nothing.
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
from ...dataflow.plan import NONE, Absent

T = TypeVar("T")
Writes = Callable[[torch.Tensor, str, Sequence[Any]], None]
Done = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Traffic(OperatorWatch):
    """Tells of each operator that is run, but not of kernels beside torch's dispatcher, such as Triton's.

    writes: called before an operator writes memory that the run did not make. done: called after each but a view.
    found: storages that the run took and did not make, each with the operators that read or wrote it.
    """

    def __init__(self, *, writes: Writes | None = None, done: Done | None = None) -> None:
        super().__init__()
        self._writes = writes
        self._done = done
        self._made: set[int] = set()
        self.found: dict[int, set[str]] = {}

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tell of one operator, and run it."""
        plain = is_plain(operator)
        if plain and is_composite(operator):  # which inference mode leaves whole: its parts tell what it reads
            return self.take_apart(operator, args, kwargs)
        name = str(operator._schema.name) if plain else str(operator)  # noqa: SLF001 - no public name
        taken = list(_strided((args, kwargs)))
        if not name.startswith("aten::lift"):  # which hands on what was made of host data a moment before
            for key in {storage_key(tensor) for tensor in taken} - self._made:
                self.found.setdefault(key, set()).update(() if plain and operator.is_view else (name,))
        if self._writes is not None:
            # an operator that takes functions does not say what these write
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
    """Tensors with memory that has an address."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_meta):
            yield leaf


def run_seen(watch: OperatorWatch, run: Callable[[], T]) -> T:
    """Run something while this thread's operators are looked at. Compiled functions run as they were written."""
    return run_uncompiled(lambda: run_under(watch, run))


class HostReads:
    """What one runner's device work reads of slots in host memory: `slots`, and by which operators.

    possible: whether there is any such slot. notes: whether an event follows each step: operators read host slots,
    or it is not known whether they do.
    """

    def __init__(self, backend: Backend, buffers: Buffers) -> None:
        self.turn = buffers.turn
        self.slots: dict[str, str] = {}
        self._backend = backend
        handed = backend.capabilities.host_parameters  # by the host, at each replay
        self._spans = [
            (*span(buffer.tensor), buffer.name)
            for buffer in buffers
            if buffer.slot.placement == HOST and buffer.nbytes and not (handed and buffer.slot.argument is not None)
        ]
        self.possible = bool(self._spans)
        self.notes = self.possible  # operators may read host slots, as long as no step was looked at
        self._looked: set[Absent] = set()
        self._unsure = False

    def wants(self, absent: Absent = NONE) -> bool:
        """Whether steps without some optional slots should be looked at."""
        return self.possible and absent not in self._looked

    def look(self, run: Callable[[], Any], absent: Absent = NONE) -> Any:
        """Run a step, and see which host slots its operators read; what it returned."""
        self._looked.add(absent)
        try:
            return run_seen(Traffic(done=self._note), run)
        except BaseException:
            self._unsure = True
            raise
        finally:
            self.notes = bool(self.slots) or self._unsure

    def _note(self, operator: str, taken: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """An operator that moves data between a host slot and the device; on the CPU, where both are one, any."""
        kind = self._backend.device.type
        if kind == "cpu" or any(tensor.device.type == kind for tensor in (*taken, *results)):
            for tensor in taken:
                address = tensor.data_ptr() if tensor.is_cpu else None
                for low, high, name in self._spans:
                    if address is not None and low <= address < high:
                        self.slots.setdefault(name, operator)

    def wait(self) -> None:
        """Before host slots, which no other runner shares, are written: until the device has read them."""
        event = self.turn.reading
        if event is not None:
            event.synchronize()
            self.turn.reading = None

    def note(self) -> None:
        """A step was handed to the device that may read host slots: see `notes`."""
        self.turn.reading = self._backend.event()
