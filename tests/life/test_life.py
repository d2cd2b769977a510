"""The life of runners of any declaration, in any order: declared, captured, run, refused, grown, replaced, dropped."""

import gc
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import attrs
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, Step
from slotgraph.backends import Backend
from slotgraph.dataflow.axes import extent
from slotgraph.dataflow.capabilities import HOST, Capabilities
from slotgraph.dataflow.errors import BatchError, CaptureError, ReplayError
from slotgraph.dataflow.slots import Computed, Constant, Copied, Slot, Staged
from slotgraph.dataflow.tails import Pad, resolve_value
from tests.life.worlds import steps_of
from tests.runners.models import bytes_of
from tests.strategies import AXES, HIDDEN, PAGES, Round, Sizes, batch_of, declarations, noise, same_bytes, source_for

PAGES_MOST: Final = 3
WIDE: Final = 2  # the size of HIDDEN
BUCKETS: Final = ((2, 6), (1, 4), (5,))
EXAMPLES: Final = 40 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 6
Batch = tuple[Any, dict[str, Any]]


@attrs.frozen(eq=False)
class Given:
    """One batch: its sources by slot, without those that are absent, the field that it carries, and its live sizes."""

    sources: Mapping[str, torch.Tensor]
    tag: int
    live: Sizes


def _computed(name: str, slot: Computed, known: Mapping[str, Any], view: Mapping[str, Any]) -> torch.Tensor:
    """What a function gives for one of its slots, without a tail."""
    compute, value = slot.function, view[name]
    found = {need: known[need] for need in compute.needs}
    arguments = compute.arguments(
        {need: one.cpu() if isinstance(one, torch.Tensor) else one for need, one in found.items()}
    )
    if compute.writes_out:
        alike = {one: torch.empty(view[one].shape, dtype=view[one].dtype) for one in compute.fills or (name,)}
        plain = compute.arguments(alike)
        compute.function(**arguments, out=plain if compute.fills else alike[name])
        return alike[name]
    made = compute.function(**arguments)
    made = made[compute.fills.index(name)] if compute.fills else made
    return torch.as_tensor(made).expand(value.shape).to(value.dtype)


def _constant(slot: Constant, value: torch.Tensor, capacity: Sizes) -> torch.Tensor:
    """Row i of a bucket is row i of the whole."""
    whole = extent(slot.shape, capacity)
    if callable(slot.value):
        made = torch.as_tensor(slot.value(Step(capacity, capacity)))
    else:
        number = resolve_value(slot.value, Capabilities(), {HIDDEN: WIDE})
        made = torch.full(whole, number, dtype=value.dtype)  # a NaN that is converted may have other bits
    return made.to(value.dtype)[tuple(slice(0, size) for size in value.shape)]


def whole_view(view: Any) -> dict[str, torch.Tensor]:
    """A step that copies all that it sees on the device."""
    slots = type(view).slotgraph.slots
    seen = {name: view.__dict__[name] for name, slot in slots.items() if slot.placement == "device"}
    return {name: value.clone() for name, value in seen.items() if value is not None}


class Life(RuleBasedStateMachine):  # one runner at a time, and what plain Python knows of it
    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend, self.lowerings = backend, list(backend.capabilities.lowerings)
        self.runner: Any = None
        self.kept: Any = None
        self.owned: dict[str, torch.Tensor] = {}

    @initialize(inputs=declarations(), data=st.data())
    def declare(self, inputs: type[Inputs], data: st.DataObject) -> None:
        """A declaration, and a first runner over it; where operators take host slots, the step here calls none."""
        hosts = any(slot.placement == HOST for slot in inputs.slotgraph.slots.values())
        assume(not (hosts and self.backend.capabilities.host_parameters))
        self.inputs = inputs
        optional = sorted(name for name, slot in inputs.slotgraph.slots.items() if slot.optional)
        self.pattern = frozenset(data.draw(st.sets(st.sampled_from(optional)))) if optional else frozenset[str]()
        self.width = data.draw(st.integers(1, 2))
        self.make(data.draw(st.sampled_from(BUCKETS)), data.draw(st.sampled_from(self.lowerings)))

    def make(self, buckets: tuple[int, ...], lowering: str, *, lazy: bool = False, **bind: torch.Tensor) -> None:
        self.buckets, self.lazy, self.steps = buckets, lazy, 0
        self.capacity = self.padded(max(buckets))
        sizes = {PAGES: PAGES_MOST, HIDDEN: WIDE}
        self.runner = DecodeRunner(
            self.inputs,
            whole_view,
            buckets=list(buckets),
            width=self.width,
            sizes={axis: size for axis, size in sizes.items() if axis in self.inputs.slotgraph.axes},
            absent=[self.pattern],
            output_rows=None,
            backend=self.backend,
            lowering=lowering,
            lazy=lazy,
            bind=bind,
            progress=False,
        )
        self.is_captured, self.kept, self.is_bound, self.owned = False, None, bool(bind), bind

    def padded(self, rows: int) -> Sizes:
        return {BATCH: rows, TOKENS: rows * self.width, PAGES: PAGES_MOST, HIDDEN: WIDE}

    def drawn(self, drawn: tuple[int, int, int, bool, bool]) -> tuple[Batch, Given]:
        """A batch as engines have them, and the same as plain facts."""
        rows, pages, seed, absent, usual = drawn
        live = {**self.padded(rows), PAGES: pages}
        gone = self.pattern if absent else frozenset[str]()
        turn = Round(live, live, gone, choices=seed, seed=seed - seed % 7 + (3 if usual else 4))
        slots = self.inputs.slotgraph.slots
        sources = {
            name: source_for(slot, self.backend.capabilities, turn, seed >> index)
            for index, (name, slot) in enumerate(slots.items())
            if slot.reads(name) is not None and name not in gone
        }
        return batch_of(self.inputs, self.backend.capabilities, turn, sources), Given(sources, turn.seed % 7, live)

    sized = st.tuples(st.integers(0, 8), st.integers(0, 4), st.integers(0, 1 << 20), st.booleans(), st.booleans())

    @precondition(lambda self: self.runner is not None and not self.is_captured)
    @rule(drawn=sized)
    def capture(self, drawn: Any) -> None:
        (batch, side), _ = self.drawn(drawn)
        with pytest.raises(ReplayError, match="nothing is captured yet"):
            self.runner(batch, **side)
        report = self.runner.capture()
        assert report.captured == (() if self.lazy else self.buckets)
        assert report.failed == {}
        self.is_captured = True

    @precondition(lambda self: self.is_captured)
    @rule()
    def capture_again(self) -> None:
        """A captured runner is not captured again: its addresses are sealed."""
        with pytest.raises(CaptureError, match="make a new runner to capture again"):
            self.runner.capture()

    @precondition(lambda self: self.is_captured)
    @rule(drawn=sized, split=st.booleans())
    def run(self, drawn: Any, split: bool) -> None:
        """A step, at once or by halves: the outputs are what its view must hold, and it goes where plain rules say."""
        (batch, side), given = self.drawn(drawn)
        if split and self.fills(drawn):
            self.replay()
            return
        if self.cannot_grow(batch, side, given):
            return
        padded, by_graph = self.expect(batch, side, given)
        outputs = self.runner(batch, **side)
        self.check(outputs, given, padded, by_graph=by_graph)
        self.kept = None
        self.steps += 1
        assert steps_of(self.runner) == self.steps

    def cannot_grow(self, batch: Any, side: dict[str, Any], given: Given) -> bool:
        """A batch that is too large for memory that was adopted is refused, and changes nothing."""
        refused = self.is_bound and any(given.live[axis] > self.capacity[axis] for axis in AXES)
        if refused:
            before = self.memory()
            with pytest.raises(BatchError, match="bound to memory that cannot grow"):
                self.runner(batch, **side)
            assert self.memory() == before
        return refused

    def expect(self, batch: Any, side: dict[str, Any], given: Given) -> tuple[Sizes, bool]:
        """The padded sizes that a batch is run with, and whether a graph does it."""
        optional = {name for name, slot in self.inputs.slotgraph.slots.items() if slot.optional}
        why = "fits" if given.tag == 3 else "field_differs"
        if optional - given.sources.keys() not in (set(), self.pattern):
            why = "absent"
        if given.live[BATCH] > max(self.buckets) or any(given.live[axis] > self.capacity[axis] for axis in AXES):
            why = "too_large"
        decision = self.runner.decide(batch, **side)
        assert decision.why == why
        if why != "fits":
            return given.live, False
        bucket = next(size for size in self.buckets if size >= given.live[BATCH])
        assert decision.bucket == bucket
        return self.padded(bucket), True

    def check(self, found: Any, given: Given, padded: Sizes, *, by_graph: bool) -> None:
        """Outputs, or a view, are what they must be; slots that an output leaves out are the view's alone."""
        slots = self.inputs.slotgraph.slots
        seen = {name: found.get(name) for name, slot in slots.items() if slot.placement == "device"}
        unseen = {name: given.sources.get(name) for name in slots if name not in seen}  # others are computed from them
        capacity = self.capacity if by_graph else None
        assert list(self.faults({**unseen, **seen}, given, padded, capacity, unseen)) == []

    def faults(
        self, view: Mapping[str, Any], given: Given, padded: Sizes, capacity: Sizes | None, unseen: Collection[str] = ()
    ) -> Iterator[str]:
        """Every slot that does not hold what it must. capacity: of the buffers, where it is known. unseen: left out."""
        step = Step(given.live, padded)
        known = {**view, "step": step, "tag": given.tag}
        for name, slot in self.inputs.slotgraph.slots.items():
            value, source = view[name], given.sources.get(name)
            if name in unseen:
                continue
            if isinstance(slot, Copied) and source is None:
                holds = value is None
            elif tuple(value.shape) != extent(slot.shape, step.padded_sizes):
                holds = False
            elif isinstance(slot, Computed):
                made = _computed(name, slot, known, {**view, name: value})
                live = extent(slot.shape, step.live_sizes) if slot.pad is not None else tuple(value.shape)
                holds = self._rows(slot, value.cpu(), made[tuple(map(slice, live))], live)
            elif slot.is_state:  # nobody writes it here
                number: Any = slot.initial()
                number = resolve_value(number, self.backend.capabilities, {HIDDEN: WIDE})
                holds = same_bytes(value.cpu(), torch.full_like(value.cpu(), number))
            elif isinstance(slot, Constant):
                holds = capacity is None or same_bytes(value.cpu(), _constant(slot, value, capacity))
            else:
                holds = self._rows(slot, value.cpu(), source, extent(slot.shape, step.live_sizes))
            if not holds:
                yield f"{name}, {slot}: {value}"

    def _rows(self, slot: Slot, value: torch.Tensor, source: torch.Tensor | None, live: tuple[int, ...]) -> bool:
        """Whether the live part is the source, and all beyond it the tail's value, where the rule names one."""
        parts, rule = tuple(slice(0, size) for size in live), slot.rule()
        if source is not None and not same_bytes(value[parts], source.cpu().to(value.dtype)):
            return False
        if not isinstance(slot, Copied | Computed | Staged) or not isinstance(rule, Pad):
            return True
        beyond = torch.ones(value.shape, dtype=torch.bool)
        beyond[parts] = False
        number, found = resolve_value(rule.value, self.backend.capabilities, {HIDDEN: WIDE}), value[beyond]
        return same_bytes(found, torch.full_like(found, number))

    @precondition(lambda self: self.is_captured)
    @rule(drawn=sized)
    def fill(self, drawn: Any) -> None:
        self.fills(drawn)

    def fills(self, drawn: Any) -> bool:
        """Whether a fill was possible: the view is what it must be, and the one before it is gone by."""
        (batch, side), given = self.drawn(drawn)
        if self.cannot_grow(batch, side, given):
            return False
        padded, by_graph = self.expect(batch, side, given)
        before = self.kept
        view = self.runner.fill(batch, **side)
        if before is not None:
            with pytest.raises(ReplayError, match="was not filled last"):
                self.runner.replay(before[0])
        self.kept = view, given, padded, by_graph
        if not by_graph:
            self.whole(view, given, padded, by_graph=False)
        assert steps_of(self.runner) == self.steps
        return True

    def whole(self, view: Any, given: Given, padded: Sizes, *, by_graph: bool) -> None:
        """A view with all its slots is what it must be."""
        assert list(self.faults(vars(view), given, padded, self.capacity if by_graph else None)) == []

    @precondition(lambda self: self.kept is not None)
    @rule()
    def replay(self) -> None:
        """The view that was filled last, again and again; after a graph's replay its computed slots are there too."""
        view, given, padded, by_graph = self.kept
        self.check(self.runner.replay(view), given, padded, by_graph=by_graph)
        self.whole(view, given, padded, by_graph=by_graph)
        self.steps += 1
        assert steps_of(self.runner) == self.steps

    @precondition(lambda self: self.is_captured)
    @rule(drawn=sized, which=st.integers(0, 9), how=st.sampled_from(["missing", "dtype", "rank", "values"]))
    def refuse(self, drawn: Any, which: int, how: str) -> None:
        """A batch that does not fit is refused; every byte is as it was, and the view filled last still stands."""
        (_, given) = self.drawn(drawn)
        slots = self.inputs.slotgraph.slots
        names = [n for n, slot in slots.items() if type(slot) is Copied and n in given.sources and not slot.optional]
        name = names[which % len(names)]
        one, sources = given.sources[name], {n: source.clone() for n, source in given.sources.items()}
        spoil: dict[str, Callable[[], torch.Tensor | None]] = {
            "missing": lambda: None,
            "dtype": lambda: one.to(torch.complex64),
            "rank": lambda: one[None, None],
            "values": lambda: one.to("meta"),
        }
        turn = Round(given.live, given.live, frozenset(slots.keys() - sources.keys()), 2, given.tag)
        batch, side = batch_of(self.inputs, self.backend.capabilities, turn, {**given.sources, name: spoil[how]()})
        before = self.memory()
        with pytest.raises(BatchError, match=f"{name!r}|bound to memory that cannot grow"):
            self.runner(batch, **side)
        assert self.memory() == before
        assert all(same_bytes(source, sources[n]) for n, source in given.sources.items())
        assert steps_of(self.runner) == self.steps
        if self.kept is not None:
            self.replay()

    @precondition(lambda self: self.is_captured and self.owned)
    @rule(seed=st.integers(0, 1 << 20))
    def write(self, seed: int) -> None:
        """The owner of adopted memory writes it between steps."""
        self.kept = None
        for index, tensor in enumerate(self.owned.values()):
            tensor.copy_(noise(tuple(tensor.shape), tensor.dtype, seed + index))

    def memory(self) -> dict[str, bytes]:
        """Every byte of the buffers that graphs read."""
        return {buffer.name: bytes_of(buffer.tensor) for buffer in self.runner.graphs.buffers}

    @precondition(lambda self: self.is_captured)
    @rule(buckets=st.sampled_from(BUCKETS), lazy=st.booleans(), data=st.data())
    def replace(self, buckets: tuple[int, ...], lazy: bool, data: st.DataObject) -> None:
        """A new runner over the memory of the old one, which goes: the way to capture again."""
        slots = self.inputs.slotgraph.slots
        capacity, fits = self.padded(max(buckets)), max(buckets) <= max(self.buckets)
        cut = {one.name: one.view(capacity) for one in self.runner.graphs.buffers if fits}
        adopted = {name: one for name, one in cut.items() if type(slots.get(name)) is Copied and one.is_contiguous()}
        self.kept = None
        self.make(buckets, data.draw(st.sampled_from(self.lowerings)), lazy=lazy, **adopted)
        places = {one.name: one.tensor.data_ptr() for one in self.runner.graphs.buffers}
        assert all(places[name] == tensor.data_ptr() for name, tensor in adopted.items())

    @precondition(lambda self: self.is_captured)
    @rule(buckets=st.sampled_from(BUCKETS))
    def drop(self, buckets: tuple[int, ...]) -> None:
        """A runner that nobody holds takes its buffers and its graphs with it; another begins anew."""
        graphs = self.runner.graphs
        held: list[Callable[[], object]] = [weakref.ref(self.runner), weakref.ref(graphs)]
        held += [weakref.ref(buffer.tensor) for buffer in graphs.buffers if not buffer.adopted]
        del graphs
        self.kept = self.runner = None
        gc.collect()
        assert [one() for one in held] == [None] * len(held)
        self.make(buckets, self.lowerings[0])


@pytest.mark.usefixtures("_quick_collections")
def test_runners_are_right_whatever_comes_after_whatever(backend: Backend) -> None:
    """Whatever comes after whatever, each step is what plain Python says, and nothing is left behind."""

    class Here(Life):
        def __init__(self) -> None:
            super().__init__(backend)

    phases = [phase for phase in Phase if phase not in {Phase.shrink, Phase.explain}]  # a step of it is short enough
    calm = [HealthCheck.filter_too_much, HealthCheck.too_slow]
    bounds = settings(max_examples=EXAMPLES, stateful_step_count=20, phases=phases, suppress_health_check=calm)
    run_state_machine_as_test(Here, settings=bounds)
