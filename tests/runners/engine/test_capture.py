"""Capture: order, warm-ups, account, progress, failures; and that it changes nothing that a user can see."""

import gc
import io
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import pytest
import rich.console
import rich.progress
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch.nn import functional

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied
from slotgraph.backends import Backend
from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import CaptureError
from slotgraph.runners.engine import capture as capturing
from tests.runners.models import PlainInputs, assert_right, decoder, plain_runner, plain_step, random_batch


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_buckets_are_captured_largest_first_after_warm_ups(cpu: str, warmups: int) -> None:
    """Each bucket is looked at, warmed up as often as was said and captured, the largest first."""
    seen: list[int] = []

    def step(view: PlainInputs) -> torch.Tensor:
        seen.append(view.weights.shape[0])
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[2, 16, 4], backend=cpu, warmups=warmups)
    report = runner.capture()
    runs = len(seen) // 3
    assert seen == [rows for rows in (16, 4, 2) for _ in range(runs)]
    assert runs in {max(1, warmups) + 1, 1 + warmups + 1}  # the look is the first warm-up, or the compiler is imported
    assert (report.captured, report.failed, runner.report) == ((2, 4, 16), {}, report)
    assert report.seconds > 0


def test_a_lazy_runner_captures_each_bucket_once(cpu: str) -> None:
    """Each bucket is captured when its first batch comes, once, and goes into the report; none is captured anew."""
    seen: list[int] = []

    def step(view: PlainInputs) -> torch.Tensor:
        seen.append(view.weights.shape[0])
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[2, 4, 8], backend=cpu, lazy=True, warmups=1)
    report = runner.capture()
    assert (report.captured, report.failed, report.memory.outputs, seen) == ((), {}, 0, [])
    assert runner.decide(random_batch(3, seed=1)).why == "fits"
    with capture_logs() as events:
        for requests, done in ((3, (4,)), (4, (4,)), (7, (4, 8)), (1, (2, 4, 8)), (30, (2, 4, 8)), (3, (2, 4, 8))):
            batch = random_batch(requests, seed=requests)
            assert_right(runner(batch), batch)
            assert runner.stats()["capture"]["buckets"] == [*done]
    assert [event["buckets"] for event in events if event["event"] == "captured"] == [[4], [4, 8], [2, 4, 8]]
    assert runner.graphs.memory().outputs == (2 + 4 + 8) * 4 * 4
    assert runner.stats()["steps"] == {"graph": 5, "eager": 1}
    with pytest.raises(CaptureError, match=r"captured already.* make a new runner"):
        runner.capture()


class CacheInputs(Inputs):
    places: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, rewritten=True)
    values: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0)


@pytest.mark.parametrize("lowering", LADDER)
def test_lazy_capture_keeps_what_a_producer_wrote(cpu: str, lowering: str) -> None:
    """Warm-ups run no batch twice, and leave rows that wait in place as they are, though the step writes both."""
    cache = torch.zeros(32)

    def step(view: CacheInputs) -> torch.Tensor:
        cache.index_copy_(0, view.places, view.values)
        return view.places.add_(1).clone()

    runner = decoder(CacheInputs, step, buckets=[2, 4, 8], backend=cpu, lazy=True, lowering=lowering)
    runner({"places": torch.arange(10, 15), "values": torch.full((5,), 3.0)})
    cache[10:15] = 7
    runner({"places": torch.tensor([1]), "values": torch.tensor([9.0])})
    assert (cache[10:15].tolist(), cache[1].item()) == ([7.0] * 5, 9.0)
    places = runner.inputs(8).places
    places[:3] = torch.tensor([10, 20, 30])
    assert runner({"places": places[:3], "values": torch.ones(3)}).tolist() == [11, 21, 31]
    assert runner.stats()["capture"]["buckets"] == [2, 4, 8]


class WithExtra(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)


def test_a_bucket_of_a_failed_pattern_is_left_out(cpu: str) -> None:
    """Where one pattern of a bucket fails, no graph of the bucket is kept: batches of every pattern run eagerly."""
    tries = [1]

    def step(view: WithExtra) -> torch.Tensor:
        if view.extra is None and tries:
            raise RuntimeError(f"out of workspace, {tries.pop()}")
        return view.ids if view.extra is None else view.ids + view.extra

    runner = DecodeRunner(WithExtra, step, buckets=[4], absent=[["extra"]], backend=cpu)
    with pytest.raises(CaptureError, match="out of workspace"):
        runner.capture()
    ids = torch.arange(3)
    assert runner({"ids": ids, "extra": ids}).tolist() == [0, 2, 4]
    assert runner({"ids": ids}).tolist() == [0, 1, 2]
    assert runner.stats()["steps"] == {"graph": 0, "eager": 2}


@pytest.mark.parametrize("lazy", [False, True])
def test_the_error_mode_reaches_the_backend(monkeypatch: pytest.MonkeyPatch, *, lazy: bool) -> None:
    """Every capture of a runner runs in the mode that was said, that of the fill alone among them."""
    seen: list[str | None] = []
    original = CpuCaptureBackend.capture

    def capture(self: CpuCaptureBackend, step: Any, **options: Any) -> Any:
        seen.append(options["error_mode"])
        return original(self, step, **options)

    monkeypatch.setattr(CpuCaptureBackend, "capture", capture)
    runner = plain_runner("cpu-capture", error_mode="relaxed", lazy=lazy, lowering="in_graph")
    for requests in (3, 7):
        runner(random_batch(requests, seed=requests))
    assert len(seen) >= 2
    assert set(seen) == {"relaxed"}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("warmups", [0, 1])
def test_a_bucket_whose_step_raises_is_left_out(cpu: str, warmups: int, *, lazy: bool) -> None:
    """A bucket whose step raises is named, left out and not tried again; other buckets and eager runs are right."""
    for failing in (2, 4, 8):
        tries: list[int] = []

        def step(view: PlainInputs, failing: int = failing, tries: list[int] = tries) -> torch.Tensor:
            if view.ids.shape[0] == failing:
                tries.append(failing)
                if len(tries) == 1:
                    raise RuntimeError("out of workspace")
            return plain_step(view)

        runner = DecodeRunner(PlainInputs, step, buckets=[2, 4, 8], backend=cpu, warmups=warmups, lazy=lazy)
        said = f"1 of 3 buckets .* bucket {failing}: .*RuntimeError: out of workspace"
        with capture_logs() as events:
            with nullcontext() if lazy else pytest.raises(CaptureError, match=said):
                runner.capture()
            for requests in (failing, 1, 2, 3, 7, 8, 9, 2):
                batch = random_batch(requests, seed=requests)
                assert_right(runner(batch), batch)
                fits = next((rows for rows in (2, 4, 8) if rows >= requests), None)
                why = "too_large" if fits is None else "not_captured" if fits == failing else "fits"
                assert runner.decide(batch).why == why
        assert len(tries) == 1 + sum(requests == failing for requests in (failing, 2, 8, 2))
        good, capture = [rows for rows in (2, 4, 8) if rows != failing], runner.stats()["capture"]
        [failed] = {event["reason"] for event in events if event["event"] == "capture_failed"}
        captured = [event for event in events if event["event"] == "captured"][-1]
        assert failed == f"bucket {failing}: {capture['failed'][failing]}"
        assert "out of workspace" in failed
        assert (captured["buckets"], captured["runner"], list(capture["failed"])) == (good, "DecodeRunner", [failing])


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_shows_progress_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *, terminal: bool
) -> None:
    """On a terminal the bar shows each bucket and the memory left, unless it is off; elsewhere nothing is printed."""
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)

    def console(**_: Any) -> rich.console.Console:
        return rich.console.Console(file=shown, force_terminal=True, width=100)

    module = types.SimpleNamespace(console=types.SimpleNamespace(Console=console), progress=rich.progress)
    monkeypatch.setattr(capturing, "rich", module)
    for progress in (False, True):
        plain_runner("cpu", progress=progress)
        assert ("capturing bucket" in shown.getvalue()) == ("B free" in shown.getvalue()) == (progress and terminal)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_garbage_is_frozen_during_capture_alone(cpu: str, error: type[BaseException]) -> None:
    """The collector passes over what was there before; however a capture ends it goes on, and capture may follow."""
    frozen: list[int] = []

    def step(view: PlainInputs) -> torch.Tensor:
        frozen.append(gc.get_freeze_count())
        if len(frozen) == 3:
            raise error
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[2, 4], backend=cpu)
    with pytest.raises(CaptureError if error is ValueError else error):
        runner.capture()
    assert all(count > 1000 for count in frozen)
    assert gc.get_freeze_count() == 0
    if error is not ValueError:
        gc.freeze()  # as a server does at its start
        try:
            before = gc.get_freeze_count()
            assert runner.capture().captured == (2, 4)
            assert before // 2 < gc.get_freeze_count() <= before  # some of it was of the error above
        finally:
            gc.unfreeze()


def test_more_graphs_than_a_device_bears_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """More buckets than the device is said to bear graphs are told before the first is captured; all are tried."""
    for borne in (None, 2, 1):
        record = attrs.evolve(CpuCaptureBackend().capabilities, graphs_hint=borne)
        monkeypatch.setattr(CpuCaptureBackend, "capabilities", record)
        with capture_logs() as events:
            runner = plain_runner("cpu-capture")
        told = [event.get("wanted") for event in events]
        assert told == ([2, None] if borne == 1 else [None])  # before the event of the capture
        assert runner.stats()["capture"]["buckets"] == [4, 8]


ROWS = 8


class Carrying(Inputs):  # requests that take their id from the step before, as asynchronous schedulers have it
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    carry: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    places: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


State = dict[str, torch.Tensor]
Write = Callable[[State, torch.Tensor, torch.Tensor], Any]


def by_batch_norm(state: State, _places: torch.Tensor, values: torch.Tensor) -> None:
    """Move a running mean, which the operator's schema does not say."""
    channels = values.double().reshape(-1, 1, 1).expand(-1, ROWS, 2).to(torch.float32)
    functional.batch_norm(channels, state["noise"], torch.ones(ROWS, device=values.device), training=True)


WRITES: Mapping[str, Write] = {
    "slice": lambda state, _, values: state["last"][: values.shape[0]].copy_(values),
    "index": lambda state, places, values: state["cache"].__setitem__(places, values),
    "out": lambda state, _, values: torch.add(values, 1, out=state["last"][: values.shape[0]]),
    "count": lambda state, *_: state["cache"].index_copy_(0, state["count"].add_(1) % ROWS, state["count"]),
    "random": lambda state, _, values: state["noise"][: len(values)].uniform_(),
    "batch_norm": by_batch_norm,
}


def state_on(device: torch.device, seed: int) -> State:
    """A step's state, with random contents."""
    draw = torch.Generator(device="cpu").manual_seed(seed)
    shapes = {"last": (ROWS,), "cache": (ROWS,), "pool": (ROWS, 1), "count": (1,)}
    numbers = {name: torch.randint(1, 99, shape, generator=draw) for name, shape in shapes.items()}
    return {name: one.to(device) for name, one in (numbers | {"noise": torch.rand(ROWS, generator=draw)}).items()}


def step_of(state: State, writes: Sequence[Write]) -> Callable[[Any], torch.Tensor]:
    """A step that reads and writes its state."""

    def step(view: Any) -> torch.Tensor:
        known = state["last"] + state["cache"] + state["pool"][:, 0]
        out = torch.where(view.carry >= 0, known[view.carry.clamp(min=0)], view.ids) * 3 + 1
        for write in writes:
            write(state, view.places, out % 97)
        return out

    return step


def carrying(rows: int, seed: int, device: Any = "cpu") -> State:
    """A batch whose rows write places of their own."""
    draw = torch.Generator(device="cpu").manual_seed(seed)
    ids, carry = torch.randint(1, 99, (rows,), generator=draw), torch.randint(-1, ROWS, (rows,), generator=draw)
    columns = {"ids": ids, "carry": carry, "places": 1 + torch.randperm(ROWS - 1, generator=draw)[:rows]}
    return {name: one.to(device) for name, one in columns.items()}


@settings(max_examples=settings().max_examples // 2)
@given(
    names=st.lists(st.sampled_from([*WRITES]), min_size=1, max_size=5),
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=6),
)
def test_early_and_late_captures_change_nothing(backend: Backend, names: Sequence[str], seeds: list[int]) -> None:
    """A runner that captures up front and one that captures late do the same, and captures alone change nothing."""
    writes = [WRITES[name] for name in names if name != "batch_norm" or backend.device.type != "npu"]  # which lacks it
    states = [state_on(backend.device, seeds[0]) for _ in range(2)]
    early, late = (
        DecodeRunner(Carrying, step_of(state, writes), buckets=[1, 2, 4], backend=backend, lazy=lazy, warmups=2)
        for state, lazy in zip(states, (False, True), strict=True)
    )
    befores = [{name: one.clone() for name, one in state.items()} for state in states]
    random = torch.get_rng_state()
    for runner, state, before in zip((early, late), states, befores, strict=True):
        runner.capture()
        assert [name for name in state if not torch.equal(state[name], before[name])] == []
    assert torch.equal(torch.get_rng_state(), random)
    for seed in seeds:
        batch, outputs = carrying(1 + seed % 4, seed, backend.device), []
        for runner in (early, late):
            torch.manual_seed(seed)
            outputs.append(runner(batch).clone())
        assert torch.equal(*outputs)
        alike = [name for name in states[0] if name != "noise" or backend.device.type == "cpu"]
        for name in alike:  # a device's graphs draw noise from their own offsets
            assert torch.equal(states[0][name], states[1][name])


def test_a_state_too_large_to_keep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of which no copy fits is refused by its name, up front and late, and `state=` is the way out."""
    kv_cache = torch.rand(64)
    before = kv_cache.clone()

    def step(view: Any) -> torch.Tensor:
        kv_cache.add_(1)
        ids: torch.Tensor = view.ids + kv_cache[0].long() * 0
        return ids

    monkeypatch.setattr("slotgraph.runners.engine.state._free_on", lambda *_: 100)
    with pytest.raises(CaptureError, match=r"kv_cache: the float32 tensor of shape \[64\].*give state="):
        decoder(Carrying, step, buckets=[2])
    assert torch.equal(kv_cache, before)
    late = decoder(Carrying, step, buckets=[2], lazy=True)
    late(carrying(2, 1))
    assert "kv_cache" in late.report.failed[2]
    assert torch.equal(kv_cache, before + 1)  # the step itself, which ran eagerly
    kv_cache.copy_(before)
    decoder(Carrying, step, buckets=[2], state=[kv_cache[:8]])
    assert torch.equal(kv_cache[:8], before[:8])
    assert not torch.equal(kv_cache[8:], before[8:])


def test_rows_of_a_large_cache_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache that is written by indices, the rows alone are kept: it may fill the device."""
    monkeypatch.setattr("slotgraph.runners.engine.state._free_on", lambda *_: 4096)
    cache = torch.rand(100_000)
    before = cache.clone()

    def step(view: Any) -> torch.Tensor:
        cache[view.places] = view.ids.float()
        cache.index_add_(0, view.places, view.ids.float() + 1)
        return cache[view.places]

    decoder(Carrying, step, warmups=3)
    assert torch.equal(cache, before)
