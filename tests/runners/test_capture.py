"""Capture: order, warm-ups, account, progress, the garbage collector, failures, and what comes before and after."""

import gc
import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import rich.console
import rich.progress
import torch
from structlog.testing import capture_logs

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.backends.cpu_capture import Adapter as CaptureBackend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import CaptureError, ConfigError, ReplayError
from slotgraph.runners import capture as capturing
from tests.runners.models import (
    PlainInputs,
    assert_right,
    bytes_of,
    memory_of,
    nothing_changes,
    plain_runner,
    plain_step,
    random_batch,
)


@pytest.fixture(autouse=True)
def _nothing_stays_frozen() -> Iterator[None]:
    """No test may leave objects that the garbage collector passes over."""
    before = gc.get_freeze_count()
    yield
    assert gc.get_freeze_count() <= before


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_largest_first_after_warm_ups(cpu: str, warmups: int) -> None:
    """Each bucket is looked at, warmed up as often as was said and captured, the largest first.

    The look is the first warm-up, unless something in this process has imported the compiler.
    """
    seen: list[int] = []

    def step(view: PlainInputs) -> torch.Tensor:
        seen.append(view.weights.shape[0])
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[2, 16, 4], backend=cpu, warmups=warmups)
    report = runner.capture()
    runs = len(seen) // 3
    assert seen == [rows for rows in (16, 4, 2) for _ in range(runs)]
    assert runs in {max(1, warmups) + 1, 1 + warmups + 1}
    assert report.captured == (2, 4, 16)
    assert report.failed == {}
    assert report.seconds > 0
    assert runner.report == report


def test_memory_account(cpu: str) -> None:
    """Inputs are what was allocated for buffers, outputs what the step returned; the total is the sum."""
    runner = plain_runner(cpu, lowering="foreach")
    assert runner.report is not None
    account = runner.report.memory
    storages = [buffer.tensor.untyped_storage() for buffer in runner.graphs.buffers]
    assert account.inputs == sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert account.inputs >= sum(buffer.tensor.nbytes for buffer in runner.graphs.buffers)
    assert account.outputs == (4 + 8) * 4 * 4  # rows, columns, bytes
    assert (account.graphs > 0) == (cpu == "cpu-capture")
    assert account.uploads == 0
    assert account.total == account.inputs + account.graphs + account.outputs


@pytest.mark.parametrize("lowering", ["in_graph", "fused"])
def test_memory_that_feeds_the_kernel(cpu: str, lowering: str) -> None:
    """A fused lowering holds tables and a packet beside the rest, which are accounted for apart."""
    plain, fused = (plain_runner(cpu, lowering=one).report for one in ("foreach", lowering))
    assert plain is not None
    assert fused is not None
    assert fused.memory.uploads > 0
    assert (fused.memory.inputs, fused.memory.outputs) == (plain.memory.inputs, plain.memory.outputs)
    assert fused.memory.total == sum((fused.memory.inputs, fused.memory.graphs, fused.memory.outputs)) + (
        fused.memory.uploads
    )


def test_shared_output_counts_once(cpu: str) -> None:
    """An output that is returned twice, or as a view of another, is one piece of memory."""

    def step(view: PlainInputs) -> Any:
        rows = plain_step(view)
        return rows, rows[:, 0], {"again": rows}

    runner = DecodeRunner(PlainInputs, step, buckets=[8], backend=cpu)
    assert runner.capture().memory.outputs == 8 * 4 * 4


def test_event(cpu: str) -> None:
    """A capture is one event with its buckets, seconds and bytes; a bucket that failed is a warning with the reason."""

    def step(view: PlainInputs) -> torch.Tensor:
        if view.ids.shape[0] == 2:
            message = "not two"
            raise ValueError(message)
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[2, 4], backend=cpu)
    with capture_logs() as events, pytest.raises(CaptureError):
        runner.capture()
    failed, captured = [event for event in events if event["event"] in {"capture_failed", "captured"}]
    assert failed["log_level"] == "warning"
    assert "bucket 2" in failed["reason"]
    assert "not two" in failed["reason"]
    assert (captured["buckets"], captured["runner"], captured["log_level"]) == ([4], "DecodeRunner", "info")
    assert {"seconds", "inputs", "graphs", "outputs", "uploads"} <= captured.keys()


def test_no_progress_off_a_terminal(cpu: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Where nobody looks, capture prints nothing at all."""
    plain_runner(cpu, progress=True)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


@pytest.mark.parametrize("progress", [False, True])
def test_progress_on_a_terminal(cpu: str, monkeypatch: pytest.MonkeyPatch, *, progress: bool) -> None:
    """On a terminal the bar shows each bucket and the memory left, unless it is switched off."""
    shown = io.StringIO()

    def console(**_: Any) -> rich.console.Console:
        return rich.console.Console(file=shown, force_terminal=True, width=100)

    class Module:
        Console = staticmethod(console)

    class Rich:
        console = Module
        progress = rich.progress

    monkeypatch.setattr(capturing, "rich", Rich)
    plain_runner(cpu, progress=progress)
    assert ("capturing bucket" in shown.getvalue()) == progress
    assert ("B free" in shown.getvalue()) == progress


def test_garbage_is_frozen_during_capture(cpu: str) -> None:
    """While a step is captured the collector passes over what was there before, and not any more afterwards."""
    frozen: list[int] = []

    def step(view: PlainInputs) -> torch.Tensor:
        frozen.append(gc.get_freeze_count())
        return plain_step(view)

    DecodeRunner(PlainInputs, step, buckets=[2, 4], backend=cpu).capture()
    assert all(count > 1000 for count in frozen)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_garbage_is_unfrozen_on_error(cpu: str, error: type[BaseException]) -> None:
    """However a capture ends, the collector goes on afterwards; an interrupt is let through, and capture may follow."""
    runs: list[int] = []

    def step(view: PlainInputs) -> torch.Tensor:
        runs.append(1)
        if len(runs) == 3:
            raise error
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[2, 4], backend=cpu)
    with pytest.raises(CaptureError if error is ValueError else error):
        runner.capture()
    assert gc.get_freeze_count() == 0
    if error is not ValueError:
        assert runner.capture().captured == (2, 4)
        batch = random_batch(3, seed=1)
        assert_right(runner(batch), batch)


def test_a_program_keeps_what_it_froze(cpu: str) -> None:
    """A server that froze its own objects at its start finds them frozen after a capture, and no others with them."""
    counts: list[int] = []

    def step(view: PlainInputs) -> torch.Tensor:
        counts.append(gc.get_freeze_count())
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[2, 4], backend=cpu)
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        runner.capture()
        assert all(before - 100 < count <= before for count in (*counts, gc.get_freeze_count()))
    finally:
        gc.unfreeze()
    assert len(counts) > 1


def test_capture_twice(runner: DecodeRunner[PlainInputs]) -> None:
    """A second capture is refused, and changes nothing."""
    batch = random_batch(3, seed=2)
    report = runner.report
    with nothing_changes(runner, batch), pytest.raises(CaptureError, match=r"captured already.* make a new runner"):
        runner.capture()
    assert runner.report is report


def test_replay_before_capture(cpu: str) -> None:
    """Before capture there is no view to replay, and no batch is filled."""
    runner = DecodeRunner(PlainInputs, plain_step, buckets=[4], backend=cpu)
    before = memory_of(runner)
    strange: Any = PlainInputs(**random_batch(3, seed=3))
    with pytest.raises(ReplayError, match="nothing is captured yet"):
        runner(random_batch(3, seed=3))
    with pytest.raises(ReplayError):
        runner.replay(strange)
    assert memory_of(runner) == before


@pytest.mark.parametrize("failing", [2, 4, 8])
@pytest.mark.parametrize("warmups", [0, 1])
def test_step_that_raises_in_capture(cpu: str, failing: int, warmups: int) -> None:
    """A bucket whose step raises is named with what was raised; other buckets and eager runs are right."""
    bad = [True]

    def step(view: PlainInputs) -> torch.Tensor:
        rows = plain_step(view)
        if bad[0] and view.ids.shape[0] == failing:
            message = "out of workspace"
            raise RuntimeError(message)
        return rows

    runner = DecodeRunner(PlainInputs, step, buckets=[2, 4, 8], backend=cpu, warmups=warmups)
    with pytest.raises(CaptureError, match=f"1 of 3 buckets .* bucket {failing}: .*RuntimeError: out of workspace"):
        runner.capture()
    bad[0] = False
    assert runner.report is not None
    assert runner.report.captured == tuple(rows for rows in (2, 4, 8) if rows != failing)
    assert list(runner.report.failed) == [failing]
    for requests in (1, 2, 3, 4, 7, 8, 9, 2, 1):
        batch = random_batch(requests, seed=requests)
        fits = next((rows for rows in (2, 4, 8) if rows >= requests), None)
        assert runner.decide(batch).why == (
            "too_large" if fits is None else "not_captured" if fits == failing else "fits"
        )
        assert_right(runner(batch), batch)


@pytest.mark.parametrize("lowering", LADDER)
def test_step_that_raises_in_replay(cpu: str, lowering: str) -> None:
    """A step that raises in a replay is a ReplayError; batch, buffers and other buckets stay usable."""
    runner = plain_runner(cpu, lowering=lowering)
    for requests in (3, 6):
        bad = random_batch(requests, seed=4)
        bad["ids"][1] = 1 << 20  # out of the table's range
        given, counted = {name: bytes_of(value) for name, value in bad.items()}, runner.stats()
        with pytest.raises(ReplayError, match="IndexError"):
            runner(bad)
        assert {name: bytes_of(value) for name, value in bad.items()} == given
        stats = runner.stats()
        assert {**stats, "lowerings": {}, "fills": {}} == {**counted, "lowerings": {}, "fills": {}}
        assert sum(stats["lowerings"].values()) - sum(counted["lowerings"].values()) in {0, 1}  # the fill was done
        for good in (3, 6, 2):
            batch = random_batch(good, seed=good)
            assert_right(runner(batch), batch)


def test_lazy_capture(cpu: str) -> None:
    """Each bucket is captured when its first batch comes, once, and goes into the report; decisions capture nothing."""
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
            assert runner.report is not None
            assert runner.report.captured == done
    assert [event["buckets"] for event in events if event["event"] == "captured"] == [[4], [4, 8], [2, 4, 8]]
    assert runner.report is not None
    assert runner.report.memory.outputs == (2 + 4 + 8) * 4 * 4
    assert runner.stats()["steps"] == {"graph": 5, "eager": 1}
    with pytest.raises(CaptureError, match="captured already"):
        runner.capture()


def test_lazy_capture_of_a_pattern(cpu: str) -> None:
    """The first batch of a bucket gets the graph of its own pattern of absent slots, whichever comes first."""
    for first in (False, True):
        runner = DecodeRunner(OptionalInputs, optional_step, buckets=[4], backend=cpu, lazy=True, absent=[{"extra"}])
        runner.capture()
        for number, present in enumerate((first, not first, first, first, not first)):
            ids, extra = torch.tensor([1, 2]) + number, torch.tensor([5, 6])
            batch = {"ids": ids, "extra": extra} if present else {"ids": ids}
            assert runner(batch).tolist() == (ids * 10 + (extra if present else 0)).tolist()
        assert runner.stats()["steps"] == {"graph": 5, "eager": 0}


class OptionalInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)


def optional_step(view: OptionalInputs) -> torch.Tensor:
    """It branches on the slot that may be absent."""
    return view.ids * 10 if view.extra is None else view.ids * 10 + view.extra


class CacheInputs(Inputs):
    places: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    values: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0)


@pytest.mark.parametrize("lowering", LADDER)
def test_lazy_capture_runs_no_batch_twice(cpu: str, lowering: str) -> None:
    """Warm-ups run on what is harmless, not on the batch before: what that wrote to may be someone else's by now."""
    cache = torch.zeros(32)

    def step(view: CacheInputs) -> torch.Tensor:
        cache.index_copy_(0, view.places, view.values)
        return view.values * 2

    runner = DecodeRunner(CacheInputs, step, buckets=[2, 8], backend=cpu, lazy=True, lowering=lowering)
    runner.capture()
    runner({"places": torch.arange(10, 15), "values": torch.full((5,), 3.0)})
    cache[10:15] = 7
    runner({"places": torch.tensor([1]), "values": torch.tensor([9.0])})
    assert cache[10:15].tolist() == [7.0] * 5
    assert cache[1] == 9.0


class AdvancedInputs(Inputs):
    places: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, rewritten=True)


@pytest.mark.parametrize("lowering", LADDER)
def test_lazy_capture_keeps_what_a_producer_wrote(cpu: str, lowering: str) -> None:
    """Rows that wait in place for the batch that has a bucket captured stay as they are, though the step writes."""

    def step(view: AdvancedInputs) -> torch.Tensor:
        return view.places.add_(1).clone()

    runner = DecodeRunner(AdvancedInputs, step, buckets=[4, 8], backend=cpu, lazy=True, lowering=lowering)
    runner.capture()
    places = runner.inputs(8).places
    places[:3] = torch.tensor([10, 20, 30])
    assert runner({"places": places[:3]}).tolist() == [11, 21, 31]
    assert runner.report is not None
    assert runner.report.captured == (4, 8)


def test_lazy_capture_that_fails(cpu: str) -> None:
    """A bucket that fails when its first batch comes runs that batch eagerly, and is not tried again."""
    tries: list[int] = []

    def step(view: PlainInputs) -> torch.Tensor:
        if view.weights.shape[0] == 4 and len(tries) < 1:
            tries.append(1)
            message = "out of workspace"
            raise RuntimeError(message)
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[4, 8], backend=cpu, lazy=True)
    assert runner.capture().failed == {}
    with capture_logs() as events:
        for requests in (3, 4, 6, 3):
            batch = random_batch(requests, seed=requests)
            assert_right(runner(batch), batch)
    assert [event["buckets"] for event in events if event["event"] == "captured"] == [[], [8]]
    assert next(event["reason"] for event in events if event["event"] == "capture_failed").startswith("bucket 4: ")
    assert [event["why"] for event in events if event["event"] == "fallback"] == ["not_captured"]
    assert runner.report is not None
    assert runner.report.captured == (8,)
    assert "out of workspace" in runner.report.failed[4]
    assert runner.decide(random_batch(3, seed=1)).why == "not_captured"
    assert runner.stats()["steps"] == {"graph": 1, "eager": 3}
    assert tries == [1]


@pytest.mark.parametrize("lazy", [False, True])
def test_error_mode_reaches_the_backend(monkeypatch: pytest.MonkeyPatch, *, lazy: bool) -> None:
    """Every capture of a runner runs in the mode that was said, that of the fill alone among them."""
    seen: list[str | None] = []
    original = CaptureBackend.capture

    def capture(self: CaptureBackend, step: Any, **options: Any) -> Any:
        seen.append(options["error_mode"])
        return original(self, step, **options)

    monkeypatch.setattr(CaptureBackend, "capture", capture)
    runner = plain_runner("cpu-capture", error_mode="relaxed", lazy=lazy, lowering="in_graph")
    for requests in (3, 7):
        runner(random_batch(requests, seed=requests))
    assert len(seen) >= 2
    assert set(seen) == {"relaxed"}


def test_error_mode_that_is_none(cpu: str) -> None:
    """A mode that a backend does not know is refused when the runner is made, with those that it knows."""
    known = "has global, thread_local, relaxed" if cpu == "cpu-capture" else "has none"
    with pytest.raises(ConfigError, match=f"error_mode 'loose': this backend {known}"):
        DecodeRunner(PlainInputs, plain_step, buckets=[2, 4], backend=cpu, error_mode="loose")


FORK = """
    import os, torch
    from slotgraph.dataflow.errors import ReplayError
    from tests.runners.models import assert_right, plain_runner, random_batch
    runner = plain_runner({backend!r})
    runner(random_batch(3, seed=1))
    child = os.fork()
    if not child:
        try:
            runner(random_batch(3, seed=2))
        except ReplayError as error:
            os._exit(17 if "forked after capture" in str(error) else 18)
        os._exit(19)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    batch = random_batch(4, seed=3)
    assert_right(runner(batch), batch)
    child = os.fork()
    if not child:
        fresh = plain_runner({backend!r})
        assert_right(fresh(batch), batch)
        os._exit(23)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 23
"""


def test_fork_after_capture(cpu: str) -> None:
    """A graph is refused in a forked process, which may capture its own; the parent's go on."""
    program = "import torch; torch.set_num_threads(1)\n" + textwrap.dedent(FORK.format(backend=cpu))
    done = subprocess.run(  # noqa: S603 - this test's own program
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("borne", "warned"), [(None, False), (2, False), (1, True)])
def test_more_graphs_than_are_borne(monkeypatch: pytest.MonkeyPatch, borne: int | None, *, warned: bool) -> None:
    """More buckets than the device is said to bear graphs are told before the first is captured; all are tried."""
    record = attrs.evolve(CaptureBackend().capabilities, graphs_hint=borne)
    monkeypatch.setattr(CaptureBackend, "capabilities", property(lambda _self: record))
    with capture_logs() as events:
        runner = plain_runner("cpu-capture")
    told = [event for event in events if event["event"] == "many_graphs"]
    assert [(event["wanted"], event["borne"]) for event in told] == [(2, borne)] * warned
    assert events.index(told[0]) == 0 if warned else not told
    assert runner.report is not None
    assert runner.report.captured == (4, 8)
