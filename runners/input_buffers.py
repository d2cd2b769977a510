"""Buffers and fills without a runner, for engines that capture and replay their own graphs."""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, final

import attrs
import torch
from torch.autograd import profiler

from ..backends.base import Backend, Graph
from ..dataflow.axes import BATCH, TOKENS, Axis, Live, Sizes
from ..dataflow.buffers import Bound, Buffers
from ..dataflow.capabilities import AUTO, LoweringName
from ..dataflow.errors import BatchError, CaptureError, ConfigError, DeclarationError, ReplayError, did_you_mean
from ..dataflow.fill.bucket import Bucket, run_all
from ..dataflow.fill.kinds import KindTable
from ..dataflow.inputs import V
from ..dataflow.plan import NONE, Absent, FillPlan
from ..dataflow.sizing import Sizer
from ..dataflow.sources import NO_SIDE, Side
from ..dataflow.views import Viewer
from .engine.config import (
    Buckets,
    RunnerConfig,
    check_step,
    checked,
    checked_keys,
    checked_names,
    checked_sizes,
    is_collection,
    refuse,
)
from .engine.current import StepLock
from .engine.graphs import Captured, Filler, Filling, GraphSet, Key, ReadBatch, Reader
from .engine.hooks import Coordinator, Loop
from .engine.outputs import check_output_rows, cut_rows
from .engine.routes import EagerRoutes, GraphRoute, Route
from .engine.runner import Runner
from .engine.stage import NO_BINDINGS, NO_SIZES, Stage
from .engine.statistics import Decision, human_bytes
from .steps.chain import Chain
from .steps.loop import LaunchedStep, StepLoop


@final
class InputBuffers(Generic[V]):
    """The slots of a declaration at fixed addresses, and their fills, for graphs that you capture and replay.

    You choose the padded sizes of each fill. Axes do not follow from one another: give both BATCH and TOKENS. Fill and
    replay on one stream. Runners are built on the same fills.

    Args:
        inputs: The declaration class.
        sizes: The capacity of every axis: the most rows that a batch has, and the sizes of fixed axes.
        settings: What `when=` of slots refers to.
        bind: Tensors to adopt as buffers, by slot.
        keep_bound: Keep the contents of adopted tensors, in place of each slot's initial value.
        graphs_read_host_slots: Whether a graph of yours copies from slots in host memory. If so, a fill waits until the
            device has done all its work, since it would overwrite them before that copy.
        lowering: How fills are run: one of the backend's `lowerings`, or "auto" for the first of them.
        compile_computed: Whether `prepare` compiles the functions that a graph runs by `fill_in_graph`, as the option
            of runners says.
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
        compile_computed: bool | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        """Allocate the slots, each with its initial value."""
        stage = Stage.of(inputs, lambda _: None, backend, sizes, settings)
        stage = attrs.evolve(stage, views=inputs)  # the caller's code may assign to views
        bound = checked_keys("bind", "a mapping of slots' names to tensors", bind, str)
        self.capacity = stage.complete(stage.sizes)
        buffers = stage.allocate(self.capacity, bound, keep_bound=keep_bound)
        checked("compile_computed", "True, False or None", compile_computed, (bool, type(None)))
        self._layer = Layer(stage, buffers, self.capacity, lowering, waits=graphs_read_host_slots)
        self._layer.filler.compile_computed = compile_computed
        self._known: dict[Live, BucketBuffers[V]] = {}
        self.step_lock = self._layer.step_lock

    def __repr__(self) -> str:
        """Return one line."""
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.capacity.items())
        on = f"{self._layer.stage.declaration.name} on {self._layer.stage.backend.name}"
        return f"<InputBuffers of {on}: {sizes}, {self.lowering}, {human_bytes(self.nbytes)}>"

    @property
    def lowering(self) -> LoweringName:
        """How fills are run."""
        return self._layer.filler.lowering.name

    @property
    def nbytes(self) -> int:
        """The bytes of the slots, of packets and of tables, on the device and on the host."""
        layer = self._layer
        return layer.buffers.nbytes + sum(one.nbytes for one in {layer.filler, layer.unpadded_filler})

    def prepare(self, padded: Sizes = NO_SIZES, *, absent: Collection[str] = ()) -> None:
        """Allocate and compile what fills of these padded sizes need.

        The first `fill` allocates, too, but must not inside a capture.

        Args:
            padded: The padded size of each axis. An axis that is left out has its capacity.
            absent: Optional slots that the batches lack.

        Raises:
            ConfigError: A size is larger than the capacity, or an axis or a slot is unknown.
        """
        with self.step_lock.open():
            self.at(padded).filling(self._layer.pattern(absent)).compile()

    def fill(
        self,
        batch: Any,
        padded: Sizes = NO_SIZES,
        *,
        live: Sizes = NO_SIZES,
        absent: Collection[str] | None = None,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
        **side: Any,
    ) -> V:
        """Fill from a batch, reset the padding, compute computed slots, and return the view.

        If a graph of yours begins with `fill_in_graph` for these sizes, that part of the fill is left to its replay:
        replay it next, and read the view after it.

        A fill in two parts writes some slots early, such as the metadata that attention plans from: first with `only`,
        then with the same names as `skip`. With `skip` alone you say that these slots are unchanged since the last
        fill. Slots of `skip` are still written if they do not have this batch: if the last fill was of other sizes,
        padded or live, or without other slots, or if a producer has a view to write by.

        Args:
            batch: An object or a mapping that has the sources.
            padded: The padded size of each axis. An axis that is left out has its capacity.
            live: Live rows of axes that no source has.
            absent: Optional slots that the batch lacks. By default they are read from it.
            only: Copied slots to write, at once and not in a graph. Others keep their contents. Computed slots are
                computed if all slots that they need have this batch.
            skip: Copied slots that keep their contents.
            side: Side arguments of slots that are declared with `source=side(...)`.

        Returns:
            The slots at their padded sizes, as an instance of the declaration. A later fill overwrites them.

        Raises:
            BatchError: The batch does not fit; nothing was written.
            ConfigError: A size is larger than the capacity, an axis or a slot is unknown, or `only` and `skip` are both
                given.
        """
        return self.at(padded).fill(batch, live=live, absent=absent, only=only, skip=skip, **side)

    def fill_unpadded(
        self,
        batch: Any,
        *,
        live: Sizes = NO_SIZES,
        absent: Collection[str] | None = None,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
        **side: Any,
    ) -> V:
        """Fill from a batch that is not padded, for a step without a graph, and return a view of the live rows.

        Sizes may differ in each call: nothing is made for them, and no row behind the live ones is written. Such a fill
        is never left to a graph's replay.

        Args:
            batch: An object or a mapping that has the sources.
            live: Live rows of axes that no source has.
            absent: Optional slots that the batch lacks. By default they are read from it.
            only: As for `fill`.
            skip: As for `fill`.
            side: Side arguments of slots that are declared with `source=side(...)`.

        Raises:
            BatchError: The batch does not fit; nothing was written.
            ConfigError: An axis or a slot is unknown, or `only` and `skip` are both given.
        """
        return self._unpadded.fill(batch, live=live, absent=absent, only=only, skip=skip, **side)

    @functools.cached_property
    def _unpadded(self) -> "BucketBuffers[V]":
        """The fills of batches that are not padded."""
        return BucketBuffers(self._layer, self._padded(NO_SIZES), exact=True)

    def at(self, padded: Sizes = NO_SIZES) -> "BucketBuffers[V]":
        """Return the fills of these padded sizes, the same object each time. If you keep it, you save the lookup.

        Args:
            padded: The padded size of each axis. An axis that is left out has its capacity.

        Raises:
            ConfigError: A size is larger than the capacity, or an axis is unknown.
        """
        key = self._padded(padded)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = BucketBuffers(self._layer, key)
        return known

    def fill_in_graph(self, padded: Sizes = NO_SIZES, *, absent: Collection[str] = ()) -> None:
        """Record the device's part of a fill. Call it first inside your capture.

        With the lowering `in_graph` that is the fused kernel and the slots that are computed on the device, else only
        the latter. From then on `fill` leaves it to the replay. With `in_graph`, a replay without a fill advances slots
        that have `then=`.

        Args:
            padded: The padded size of each axis. An axis that is left out has its capacity.
            absent: Optional slots that the batches lack.

        Raises:
            CaptureError: Nothing was filled or prepared with these sizes yet.
        """
        self.at(padded).fill_in_graph(absent=absent)

    def steps(
        self,
        launch: Callable[[V], Any],
        batch: Any,
        *,
        padded: Collection[Sizes] = (NO_SIZES,),
        output_rows: Axis | None = TOKENS,
        keys: Iterable[Hashable] | None = None,
        ahead: int = 0,
        read: Callable[[Any], Any] | None = None,
        needs: Collection[str] = (),
    ) -> Iterator[LaunchedStep[Any]]:
        """Run one step after another, as `DecodeRunner.steps` does, by graphs of yours.

        Slots advance and are edited before each launch, or in your graph if it begins with `fill_in_graph`. A fill in
        the middle ends the loop with ReplayError.

        Args:
            launch: Replays your graph for the padded sizes of the view that it gets, or runs the step itself, on the
                current stream. Returns the outputs, padded rows included. The view has the fields of the first batch.
            batch: The first step's batch.
            padded: The padded sizes that you have graphs for, as `fill` takes them. A step has the smallest that hold
                its requests.
            output_rows: The axis that the rows of outputs follow: TOKENS, BATCH, or None to get outputs whole.
            keys: As for `DecodeRunner.steps`, and so are the arguments after it.
            ahead: How many steps are launched beyond the one that is handed out.
            read: Chooses what of the outputs is copied to the host.
            needs: Slots of which `step.needs` says what later steps need.

        Returns:
            The steps in order, which the device may still be running.

        Raises:
            ConfigError: No slot advances, rows of a slot do not belong to requests, or an argument does not fit.
            BatchError: The batch does not fit, or has too many requests.
        """
        if not is_collection(padded):
            refuse("padded", "a list of padded sizes, such as [{BATCH: 1, TOKENS: 1}]", padded)
        graphs = OwnGraphs(self._layer, [self.at(sizes) for sizes in padded], launch, batch, output_rows)
        chain = Chain(graphs, batch, graphs.buckets, (), Loop(), (1,))
        return iter(StepLoop(graphs, chain, batch, keys, ahead, read, needs))

    def view(self, padded: Sizes = NO_SIZES, *, absent: Collection[str] = (), written: bool = False) -> V:
        """Return the slots at their padded sizes, for a capture, or for a producer.

        Args:
            padded: The padded size of each axis. An axis that is left out has its capacity.
            absent: Optional slots that are None in the view.
            written: Whether a producer writes slots by this view. Each later fill then resets the padding behind them.

        Raises:
            ConfigError: A size is larger than the capacity, or an axis or a slot is unknown.
        """
        return self.at(padded).view(absent=absent, written=written)

    def plan(self, padded: Sizes = NO_SIZES, *, absent: Collection[str] = ()) -> FillPlan:
        """Return how a fill of these padded sizes is run, for tensors on the device of their slots' dtypes.

        Args:
            padded: The padded size of each axis. An axis that is left out has its capacity.
            absent: Optional slots that the batches lack.
        """
        return self.at(padded).filling(self._layer.pattern(absent)).bucket.plan

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the number of fills by lowering, how the functions in graphs run, and how often those on the host did.

        See `CaptureReport` for `functions`, and `Statistics` for `again`.
        """
        filler = self._layer.filler
        again = self._layer.buffers.again
        return {"lowerings": dict(filler.lowered), "functions": filler.how_computed, "again": again}

    def _padded(self, padded: Sizes) -> Live:
        """Return padded sizes by varying axis. Raise ConfigError if one does not fit."""
        capacity = self.capacity
        for axis, size in checked_sizes(padded, "padded").items():
            most = capacity.get(axis)
            if most is None or (axis.fixed and size != most):
                raise self._layer.unknown("padded", axis)
            if size > most:
                raise ConfigError(f"padded size {size} of {axis} is more than its capacity, {most}")
        return tuple([padded.get(axis, capacity[axis]) for axis in self._layer.stage.declaration.varying])


class Layer(Generic[V]):
    """The state that `InputBuffers` and its buckets share.

    Attributes:
        stage: The declaration and the backend.
        buffers: The memory of the slots.
        capacity: The most rows of each axis.
        waits: Whether fills wait for the caller's graphs, which copy from slots in host memory.
        step_lock: Lets one fill in at a time.
        table: The kinds of batches seen so far.
        reader: Reads batches.
        filler: Fills the buckets.
        checks_fields: Whether fields have converters or validators.
        behind: The bucket of the last partial fill, and the slots that did not have its batch afterwards.
    """

    def __init__(self, stage: Stage[V], buffers: Buffers, capacity: Sizes, lowering: str, *, waits: bool) -> None:
        self.stage = stage
        self.buffers = buffers
        self.capacity = capacity
        self.waits = waits
        self.step_lock = StepLock(InputBuffers.__name__)
        self._sizers: dict[frozenset[Axis], Sizer] = {}
        try:
            sizer = self.sizer(frozenset())
        except DeclarationError:  # no source determines an axis: each fill gets its size as `live=`
            sizer = None
        self.table = KindTable(stage.declaration, capacity, sizer)
        self.reader = Reader(stage, self.table, lambda batch, side: self.live(batch, NO_SIZES, side))
        self.filler = Filler(stage, buffers, lowering, [capacity], self.table)
        self.checks_fields = bool(stage.declaration.checked_fields)
        self.behind: tuple[Bucket | None, frozenset[str]] = None, NONE

    @functools.cached_property
    def unpadded_filler(self) -> Filler[V]:
        """The filler of live rows alone, which no kernel can fill."""
        filler = self.filler
        stage = self.stage
        if not filler.lowering.has_kernel:
            return filler
        lowering = stage.lowering_without_kernel()
        made = Filler(stage, self.buffers, lowering, [self.capacity], self.table)
        made.clock = filler.clock
        made.lowered = filler.lowered
        return made

    def pattern(self, absent: Collection[str]) -> Absent:
        """Return absent slots as a set. Raise ConfigError if one is unknown, or not optional."""
        if not isinstance(absent, frozenset):
            self.stage.declaration.check_names("absent", checked_names("absent", absent), "optional")
        return frozenset(absent)

    def unknown(self, argument: str, axis: Axis) -> ConfigError:
        """Return the error for an axis that no slot varies on."""
        axes = [one.name for one in self.stage.declaration.varying]
        what = f"it takes the axes of slots that vary, and these are {', '.join(axes)}"
        return ConfigError(f"{argument} names {axis}: {what}{did_you_mean(axis, axes)}")

    def sizer(self, given: frozenset[Axis]) -> Sizer:
        """Return the `Sizer` of all axes except the given ones.

        Raise ConfigError for an unknown axis, and DeclarationError if no copied slot has an axis that is not given.
        """
        known = self._sizers.get(given)
        if known is None:
            for axis in sorted(given - self.capacity.keys()):
                raise self.unknown("live", axis)
            try:
                known = self._sizers[given] = Sizer(self.stage.declaration, {}, self.capacity, known=given)
            except DeclarationError as error:
                raise DeclarationError(f"{error}, or give live=") from None
        return known

    def read(self, batch: Any, live: Sizes, absent: Collection[str] | None, side: Side) -> ReadBatch:
        """Read a batch for which the caller gives some live sizes, or the optional slots that it lacks."""
        pattern = self.stage.absent(batch, side) if absent is None else self.pattern(absent)
        rows = self.live(batch, live if live is NO_SIZES else checked_sizes(live, "live"), side)
        sources = zip(self.table.names, self.table.gather(batch, side), strict=True)
        given = tuple([None if name in pattern else source for name, source in sources])
        return ReadBatch(batch, side, given, None, rows, pattern)

    def live(self, batch: Any, given: Sizes, side: Side) -> Live:
        """Return live rows by varying axis: the given ones, and those of the sources."""
        read = self.sizer(frozenset(given))(batch, side)
        if not given:
            return read
        others = iter(read)
        return tuple([given[axis] if axis in given else next(others) for axis in self.stage.declaration.varying])


@final
class BucketBuffers(Generic[V]):
    """The slots of `InputBuffers` at one set of padded sizes, as `InputBuffers.at` returns them."""

    def __init__(self, layer: Layer[V], padded: Live, *, exact: bool = False) -> None:
        """Make the fills. exact: Whether they pad nothing, and have batches of any size up to `padded`."""
        self._layer = layer
        self._filler = layer.unpadded_filler if exact else layer.filler
        self._padded = padded
        self._exact = exact
        self._fillings = dict[Absent, tuple[Filling, Viewer[V]]]()
        self._parts = dict[tuple[Absent, frozenset[str]], Filling]()
        self._in_graph = set[Absent]()

    def __repr__(self) -> str:
        """Return one line."""
        return f"<{type(self).__name__} of {self._layer.stage.declaration.name}: {self._sizes()}>"

    def _sizes(self) -> str:
        axes = self._layer.stage.declaration.varying
        return ", ".join(f"{axis} {size}" for axis, size in zip(axes, self._padded, strict=True))

    @property
    def sizes(self) -> dict[Axis, int]:
        """The padded size of every axis."""
        layer = self._layer
        return {**layer.capacity, **dict(zip(layer.stage.declaration.varying, self._padded, strict=True))}

    def compute_before_graph(self, absent: Absent) -> None:
        """Do the device's part of a filled step, unless the caller's graph begins with it."""
        if absent not in self._in_graph:
            with torch.no_grad():
                self.filling(absent).first_nodes()

    def fill(
        self,
        batch: Any,
        *,
        live: Sizes = NO_SIZES,
        absent: Collection[str] | None = None,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
        **side: Any,
    ) -> V:
        """Fill from a batch: see `InputBuffers.fill`."""
        layer = self._layer
        lock = layer.step_lock.lock
        if lock.locked():
            raise layer.step_lock.refusal()
        with lock:
            if profiler._is_profiler_enabled:  # noqa: SLF001 - torch has no public name
                return profiler.record_function("slotgraph:fill")(self._fill)(batch, live, absent, only, skip, side)
            return self._fill(batch, live, absent, only, skip, side)

    def _fill(
        self,
        batch: Any,
        live: Sizes,
        absent: Collection[str] | None,
        only: Collection[str] | None,
        skip: Collection[str],
        side: Side,
    ) -> V:
        layer = self._layer
        filler = self._filler
        if live is NO_SIZES and absent is None:
            call = layer.reader.read(batch, side)
        else:
            call = layer.read(batch, live, absent, side)
        if layer.checks_fields:
            layer.stage.declaration.check_fields(batch)
        filling, viewer = self._fillings.get(call.absent) or self._make(call.absent)
        if layer.waits and filler.hosts.possible:
            filler.hosts.note()
        is_in_graph = call.absent in self._in_graph and only is None
        behind = NONE
        if only is not None or skip:
            filling, behind = self._part(call, filling, only, skip)
        try:
            filling.fill(call, whole=is_in_graph)
        except BatchError as error:
            layer.sizer(frozenset(live)).explain(error, batch, side)
            raise
        if not is_in_graph and not filler.lowering.is_reference:
            run_all(filling.bucket.functions(call.live).on_device, batch)
        layer.buffers.clean.is_sent = False  # the caller replays a graph that begins with it
        if filling.bucket.left:
            layer.behind = filling.bucket, behind
        return viewer(batch, call.live)

    def _part(
        self, call: ReadBatch, whole: Filling, only: Collection[str] | None, skip: Collection[str]
    ) -> tuple[Filling, frozenset[str]]:
        """Choose the fill of some slots only. Return it with the slots that will not have the batch afterwards.

        Raise ConfigError if an argument names a slot that is not copied, or if both arguments are given.
        """
        layer = self._layer
        declaration = layer.stage.declaration
        clean = layer.buffers.clean
        if only is not None and skip:
            raise ConfigError("only= and skip= are both given: name the slots to write, or those to skip")
        argument, names = ("skip", skip) if only is None else ("only", only)
        declaration.check_names(argument, checked_names(argument, names), "copied")
        copied = declaration.sources.keys() - call.absent
        last, behind = layer.behind
        is_own = last is not None and (last.padded, last.absent) == (self._padded, call.absent)
        if clean.was(whole.bucket, call.live):
            behind = NONE
        elif not (is_own and clean.was(last, call.live)):
            behind = frozenset(copied)
        if only is None:
            left = set(copied.intersection(skip) - behind)
            behind = NONE
        else:
            left = set(copied.difference(only))
            behind = behind.intersection(copied).difference(only)
            for name, compute in declaration.functions.items():
                if not behind.isdisjoint(compute.needs):  # computed together with the rest
                    left.add(name)
                    behind |= {name}
        if not left:
            return whole, behind
        key = call.absent, frozenset(left)
        if key not in self._parts:
            self._parts[key] = attrs.evolve(whole, bucket=whole.bucket.part(key[1]), alone=None)
        return self._parts[key], behind

    def fill_in_graph(self, *, absent: Collection[str] = ()) -> None:
        """Record the device's part of a fill: see `InputBuffers.fill_in_graph`."""
        layer = self._layer
        with layer.step_lock.open():
            pattern = layer.pattern(absent)
            if pattern not in self._fillings:
                raise CaptureError(
                    f"padded sizes {self._sizes()} are new: call fill() or prepare() with them before the capture"
                )
            self.filling(pattern).first_nodes()
            self._in_graph.add(pattern)

    def view(self, *, absent: Collection[str] = (), written: bool = False) -> V:
        """Return the slots at their padded sizes: see `InputBuffers.view`."""
        layer = self._layer
        with layer.step_lock.open():
            if written:
                layer.buffers.clean.handed_out = True
            bucket = self.filling(layer.pattern(absent)).bucket
            return layer.stage.viewer_of_capture(bucket)(None, bucket.padded)

    def filling(self, absent: Absent) -> Filling:
        """Return the fills from batches that lack some optional slots."""
        filling, _ = self._fillings.get(absent) or self._make(absent)
        return filling

    def _make(self, absent: Absent) -> tuple[Filling, Viewer[V]]:
        """Make the fills that `filling` returns, and the maker of their views."""
        layer = self._layer
        filling = self._filler.make(self.sizes, absent, exact=self._exact)
        made = self._fillings[absent] = filling, layer.stage.viewer(filling.bucket)
        return made


@final
@attrs.define(eq=False)
class OwnGraph(Graph):
    """The caller's graph for one bucket.

    Attributes:
        bucket: The bucket.
        absent: The optional slots that its batches lack.
        launch: Launches the graph for the view that it gets, and returns the outputs.
        view: The view.
        rows: The rows that each output has, or None if outputs are whole.
    """

    bucket: BucketBuffers[Any]
    absent: Absent
    launch: Callable[[Any], Any]
    view: Any
    rows: int | None
    outputs: Any = None

    def replay(self) -> None:
        """Launch it. It counts as recorded as long as it has always returned one and the same tensor.

        Raise ReplayError if outputs have another number of rows.
        """
        self.bucket.compute_before_graph(self.absent)
        before = self.outputs
        outputs = self.launch(self.view)
        is_same = isinstance(outputs, torch.Tensor) and outputs is before
        if not is_same and self.rows is not None:
            cut_rows(outputs, self.rows, "padded row of its view", error=ReplayError)
        self.outputs = outputs
        self.is_recorded = self.is_recorded and (is_same or (before is None and isinstance(outputs, torch.Tensor)))


def _by_requests(filled: Iterable[BucketBuffers[Any]]) -> tuple[dict[int, BucketBuffers[Any]], int]:
    """Return buckets by their number of requests, and how many tokens a request has: what the largest has room for.

    Raise ConfigError if a bucket has no room for the tokens of its requests.
    """
    found = dict[int, BucketBuffers[Any]]()
    for one in filled:
        rows = one.sizes.get(BATCH, one.sizes.get(TOKENS, 0))
        if found.setdefault(rows, one) is not one:
            raise ConfigError(f"padded= has two padded sizes for {rows} requests, {one} and {found[rows]}: give one")
    if not found or 0 in found:
        refuse("padded", "padded sizes of at least one request, such as [{BATCH: 1, TOKENS: 1}]", list(found.values()))
    most = max(found)
    width = max(found[most].sizes.get(TOKENS, most) // most, 1)
    for rows, one in found.items():
        tokens = one.sizes.get(TOKENS, rows)
        if tokens < rows * width:
            raise ConfigError(
                f"padded= has {tokens} tokens for {rows} requests, and needs {rows * width}: a request has {width} "
                f"tokens, as the largest padded sizes say"
            )
    return found, width


@final
class OwnGraphs(Runner[V, Any]):
    """Runs the caller's own graphs over `InputBuffers`, as a loop of steps needs it.

    Attributes:
        buckets: The numbers of requests that there are graphs for.
    """

    graphs: GraphSet[V]

    def __init__(
        self,
        layer: Layer[V],
        filled: Collection[BucketBuffers[V]],
        launch: Callable[[V], Any],
        batch: Any,
        output_rows: Axis | None,
    ) -> None:
        """Take the buckets of the graphs, and the first batch, whose optional slots all batches have."""
        check_step("launch", launch)
        stage = layer.stage
        filler = layer.filler
        absent = stage.absent(batch, NO_SIDE)
        by_rows, width = _by_requests(filled)
        self.buckets = Buckets(tuple(by_rows))
        rows = self.buckets.largest
        largest = {BATCH: rows, **by_rows[rows].sizes}
        size = Sizer(stage.declaration, {TOKENS: BATCH * width}, largest, BATCH)
        super().__init__(RunnerConfig(debug=False), stage, size, Coordinator(), capacity=largest)
        self.sizes = {rows: largest}
        self.eager = EagerRoutes(stage, self.name, self._table, buffers=layer.buffers)
        varying = stage.declaration.varying
        check_output_rows(output_rows, [axis for axis in (TOKENS, BATCH) if axis in varying])
        self.cuts = output_rows is not None
        self.graphs = GraphSet(  # pyright: ignore[reportIncompatibleVariableOverride] - it always has one
            stage,
            layer.buffers,
            filler,
            self.config,
            self.sizes,
            patterns=(),
            runner=self.name,
            coordinator=self.coordinator,
            variants={},
            axes=(BATCH if BATCH in varying else TOKENS,),
            output_rows=output_rows,
        )
        filler.hosts.notes &= layer.waits
        captured = dict[Key, Captured]()
        for rows, one in by_rows.items():
            filling = one.filling(absent)
            view = stage.viewer_of_capture(filling.bucket)(batch, filling.bucket.padded)
            cut = None if output_rows is None else one.sizes[output_rows]
            graph = OwnGraph(one, absent, launch, view, cut)
            captured[rows, absent, ()] = Captured(rows, filling, graph, graph.replay, {})
        self.graphs.captured = captured

    def _route(self, call: ReadBatch) -> Route[V]:
        captured = self.graphs.captured[self.buckets.fit(call.live[-1]) or 0, call.absent, ()]
        return GraphRoute(self.graphs, captured, self.tally.buckets[captured.bucket])

    def _decide(self, call: ReadBatch) -> Decision:
        requests = call.live[-1]
        rows = self.buckets.fit(requests)
        if rows is None:
            why = f"{requests} requests do not fit: padded= has room for at most {self.buckets.largest}"
            return Decision("eager", None, "too_large", why)
        return Decision("graph", rows, "fits", f"{requests} requests in {rows} rows")
