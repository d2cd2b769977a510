"""Buffers and fills without a runner, for engines that capture and replay graphs of their own."""

from collections.abc import Collection, Mapping
from typing import Any, Generic, final

import attrs

from ..backends.base import Backend
from ..dataflow.axes import Axis, Live, Sizes
from ..dataflow.bucket import Absent
from ..dataflow.buffers import Bound
from ..dataflow.capabilities import AUTO, Lowering
from ..dataflow.errors import BatchError, CaptureError, ConfigError, DeclarationError, did_you_mean
from ..dataflow.plan import FillPlan
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from .capture import Filling
from .config import checked_keys, checked_sizes
from .graphs import Filler
from .running import Gate
from .stage import NO_BINDINGS, NO_SIZES, Stage, V
from .statistics import human_bytes

_Key = tuple[Live, Absent]


@final
class InputBuffers(Generic[V]):
    """The slots of a declaration at fixed addresses, and the fills of them, for graphs that you capture and replay.

    You choose the padded sizes of each fill. Axes do not follow from one another: give BATCH and TOKENS both. Fill and
    replay on one stream. Runners are built on the same fills.

    Args:
        inputs: The declaration class.
        sizes: The capacity of every axis: the most rows that a batch brings, and the sizes of fixed axes.
        settings: What `when=` of slots refers to.
        bind: Tensors to adopt as buffers, by slot.
        keep_bound: Leave what adopted tensors hold, in place of each slot's initial value.
        graphs_read_host_slots: Whether a graph of yours copies from slots in host memory. If so, a fill waits
            until the device has done all work that it was given, since it would overwrite them under that copy.
        lowering: How fills are run: one of the backend's `lowerings`, or "auto" for the first of them.
        backend: A backend or its name.

    Raises:
        ConfigError: A size is missing, or an argument does not fit.
        BindError: A tensor cannot be adopted.
    """

    def __init__(
        self,
        inputs: type[V],
        sizes: Sizes,
        *,
        settings: object = None,
        bind: Mapping[str, Bound] = NO_BINDINGS,
        keep_bound: bool = False,
        graphs_read_host_slots: bool = True,
        lowering: str = AUTO,
        backend: str | Backend = "auto",
    ) -> None:
        """Allocate the slots, each with its initial value."""
        stage = Stage.of(inputs, lambda _: None, backend, sizes, settings)
        self._stage = stage = attrs.evolve(stage, views=inputs)  # the caller's own steps assign to its views
        self._axes = stage.declaration.varying
        self.capacity = stage.complete(stage.sizes)
        bound = checked_keys("bind", "a mapping of slots' names to tensors", bind, str)
        self._buffers = stage.allocate(self.capacity, bound, keep_bound=keep_bound)
        self._filler = Filler(stage, self._buffers, lowering, [self.capacity])
        self._waits = graphs_read_host_slots
        self._fillings: dict[_Key, Filling] = {}
        self._in_graph: set[_Key] = set()
        self._sizers: dict[frozenset[Axis], Sizer] = {}
        self.gate = Gate(type(self).__name__)

    def __repr__(self) -> str:
        """One line."""
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.capacity.items())
        on = f"{self._stage.declaration.name} on {self._stage.backend.name}"
        return f"<InputBuffers of {on}: {sizes}, {self.lowering}, {human_bytes(self.nbytes)}>"

    @property
    def lowering(self) -> Lowering:
        """How fills are run."""
        return self._filler.lowering

    @property
    def nbytes(self) -> int:
        """Bytes of the slots and of what fills need, on the device and on the host."""
        return self._buffers.nbytes + self._filler.nbytes

    def prepare(self, padded: Sizes = NO_SIZES, *, absent: Collection[str] = ()) -> None:
        """Make what fills of these padded sizes need. A first `fill` does it, too; inside a capture it is too late.

        Args:
            padded: The padded size of each axis; the capacity for an axis that is left out.
            absent: Optional slots that the batches lack.

        Raises:
            ConfigError: A size is larger than the capacity, or an axis or a slot is unknown.
        """
        with self.gate.open():
            self._filling(self._key(padded, absent))

    def fill(
        self,
        batch: Any,
        padded: Sizes = NO_SIZES,
        *,
        live: Sizes = NO_SIZES,
        absent: Collection[str] | None = None,
        **side: Any,
    ) -> V:
        """Fill from a batch, reset the padding, compute what follows from slots, and return the view.

        If a graph of yours begins with `fill_in_graph` for these sizes, that part of the fill is left to its replay:
        replay it next, and read the view after it.

        Args:
            batch: An object or a mapping that has the sources.
            padded: The padded size of each axis; the capacity for an axis that is left out.
            live: Live rows of axes that no source tells.
            absent: Optional slots that the batch comes without; by default it is asked.
            side: Side arguments of slots that are declared with `source=side(...)`.

        Returns:
            The slots at their padded sizes, as an instance of the declaration. A later fill overwrites them.

        Raises:
            BatchError: The batch does not fit; nothing was written.
            ConfigError: A size is larger than the capacity, or an axis is unknown.
        """
        with self.gate.open():
            pattern = self._stage.absent(batch, side) if absent is None else absent
            key = self._key(padded, pattern)
            given = live if live is NO_SIZES else checked_sizes(live, "live")
            rows = self._live(batch, given, side)
            self._stage.declaration.check_fields(batch)
            filling, turn = self._filling(key), self._buffers.turn
            if self._waits and self._filler.hosts.possible:
                self._filler.hosts.note()
            turn.fills += 1
            self._filler.order()
            whole = key in self._in_graph
            try:
                ready = self._filler.fill(filling, batch, rows, key[1], side, whole=whole)
            except BatchError as error:
                turn.fills -= 1
                self._sizer(frozenset(given)).explain(error, batch, side)
                raise
            if not whole:
                ready.compute_on_device(batch)
            return self._stage.view(ready, batch)

    def fill_in_graph(self, padded: Sizes = NO_SIZES, *, absent: Collection[str] = ()) -> None:
        """Record the device's part of a fill; call it first inside of your capture.

        With the lowering `in_graph` that is the fused kernel and the slots that are computed on the device, else the
        latter alone. From then on `fill` leaves it to the replay. With `in_graph`, a replay without a fill advances
        slots that have `then=`.

        Raises:
            CaptureError: Nothing was filled or prepared with these sizes yet.
        """
        with self.gate.open():
            key = self._key(padded, absent)
            filling = self._fillings.get(key)
            if filling is None:
                sizes = ", ".join(f"{axis} {size}" for axis, size in zip(self._axes, key[0], strict=True))
                raise CaptureError(
                    f"padded sizes {sizes} are new: call fill() or prepare() with them before the capture"
                )
            self._filler.first_node(filling, key[1])
            filling.whole(key[1]).compute_on_device()
            self._in_graph.add(key)

    def view(self, padded: Sizes = NO_SIZES, *, absent: Collection[str] = (), written: bool = False) -> V:
        """The slots at their padded sizes, for a capture, or for a producer.

        Args:
            padded: The padded size of each axis; the capacity for an axis that is left out.
            absent: Optional slots that are None in the view.
            written: Whether a producer writes slots by this view. Each later fill then resets the padding behind them.

        Raises:
            ConfigError: A size is larger than the capacity, or an axis or a slot is unknown.
        """
        with self.gate.open():
            key = self._key(padded, absent)
            if written:
                self._buffers.ledger.handed_out = True
            return self._stage.view_of_capture(self._filling(key).whole(key[1]))

    def plan(self, padded: Sizes = NO_SIZES, *, absent: Collection[str] = ()) -> FillPlan:
        """How a fill of these padded sizes is run, for tensors on the device of their slots' dtypes."""
        key = self._key(padded, absent)
        return self._filling(key).bucket.planned(key[1]).plan

    def stats(self) -> dict[str, dict[str, int]]:
        """Fills by lowering."""
        return {"lowerings": dict(self._filler.lowered)}

    def _filling(self, key: _Key) -> Filling:
        if key not in self._fillings:
            sizes = {**self.capacity, **dict(zip(self._axes, key[0], strict=True))}
            self._fillings[key] = self._filler.make(sizes, key[1])
        return self._fillings[key]

    def _key(self, padded: Sizes, absent: Collection[str]) -> _Key:
        """Padded sizes by varying axis, and absent slots. ConfigError where they do not fit."""
        capacity = self.capacity
        if not isinstance(absent, frozenset):
            self._stage.declaration.check_names("absent", absent, "optional")
        for axis, size in checked_sizes(padded, "padded").items():
            most = capacity.get(axis)
            if most is None or (axis.fixed and size != most):
                raise self._unknown("padded", axis)
            if size > most:
                raise ConfigError(f"padded size {size} of {axis} is more than its capacity, {most}")
        return tuple(padded.get(axis, capacity[axis]) for axis in self._axes), frozenset(absent)

    def _unknown(self, argument: str, axis: Axis) -> ConfigError:
        """The error for an axis that no slot varies on."""
        axes = [one.name for one in self._axes]
        what = f"it takes the axes of slots that vary, and these are {', '.join(axes)}"
        return ConfigError(f"{argument} names {axis}: {what}{did_you_mean(axis, axes)}")

    def _sizer(self, given: frozenset[Axis]) -> Sizer:
        """What reads live sizes of all axes but the given ones.

        ConfigError for an axis that there is not, DeclarationError where no copied slot tells one that is not given.
        """
        known = self._sizers.get(given)
        if known is None:
            for axis in sorted(given - self.capacity.keys()):
                raise self._unknown("live", axis)
            try:
                known = self._sizers[given] = Sizer(self._stage.declaration, {}, self.capacity, known=given)
            except DeclarationError as error:
                raise DeclarationError(f"{error}, or give live=") from None
        return known

    def _live(self, batch: Any, given: Sizes, side: Side) -> Live:
        """Live rows by varying axis: those that were given, and those that sources tell."""
        read = self._sizer(frozenset(given))(batch, side)
        if not given:
            return read
        others = iter(read)
        return tuple(given[axis] if axis in given else next(others) for axis in self._axes)
