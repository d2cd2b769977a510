"""Capture: order, warm-ups, account, progress, the garbage collector, failures, and what comes before and after."""

import gc
import io
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import rich.console
import rich.progress
import torch
from structlog.testing import capture_logs

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import CaptureError, ReplayError
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
            raise RuntimeError("out of workspace")
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


class WithExtra(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)


def test_a_pattern_that_fails(cpu: str) -> None:
    """Where one pattern of a bucket fails, no graph of the bucket is kept: batches of every pattern run eagerly."""
    tries = [1]

    def step(view: WithExtra) -> torch.Tensor:
        if view.extra is None and tries:
            raise RuntimeError(f"out of workspace, {tries.pop()}")
        return view.ids if view.extra is None else view.ids + view.extra

    runner = DecodeRunner(WithExtra, step, buckets=[4], absent=[["extra"]], backend=cpu, output_rows=None)
    with pytest.raises(CaptureError, match="out of workspace"):
        runner.capture()
    assert runner.report is not None
    assert runner.report.captured == ()
    ids = torch.arange(3)
    assert runner({"ids": ids, "extra": ids}).tolist() == [0, 2, 4]
    assert runner({"ids": ids}).tolist() == [0, 1, 2]
    assert runner.stats()["steps"] == {"graph": 0, "eager": 2}


@pytest.mark.parametrize("lazy", [False, True])
def test_error_mode_reaches_the_backend(monkeypatch: pytest.MonkeyPatch, *, lazy: bool) -> None:
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


@pytest.mark.parametrize("warmups", [0, 1])
def test_step_that_raises_in_capture(cpu: str, warmups: int) -> None:
    """A bucket whose step raises is named, told and left out; other buckets and eager runs are right."""
    for failing in (2, 4, 8):
        bad = [True]

        def step(view: PlainInputs, failing: int = failing, bad: list[bool] = bad) -> torch.Tensor:
            if bad[0] and view.ids.shape[0] == failing:
                raise RuntimeError("out of workspace")
            return plain_step(view)

        runner = DecodeRunner(PlainInputs, step, buckets=[2, 4, 8], backend=cpu, warmups=warmups)
        said = f"1 of 3 buckets .* bucket {failing}: .*RuntimeError: out of workspace"
        with capture_logs() as events, pytest.raises(CaptureError, match=said):
            runner.capture()
        bad[0] = False
        good = [rows for rows in (2, 4, 8) if rows != failing]
        failed, captured = [event for event in events if event["event"] in {"capture_failed", "captured"}]
        assert (failed["log_level"], failed["reason"][:8]) == ("warning", f"bucket {failing}")
        assert (captured["buckets"], captured["runner"], captured["log_level"]) == (good, "DecodeRunner", "info")
        assert {"seconds", "inputs", "graphs", "outputs", "uploads"} <= captured.keys()
        assert runner.report is not None
        assert (runner.report.captured, list(runner.report.failed)) == (tuple(good), [failing])
        for requests in (1, 2, 3, 7, 8, 9, 2):
            batch = random_batch(requests, seed=requests)
            fits = next((rows for rows in (2, 4, 8) if rows >= requests), None)
            why = "too_large" if fits is None else "not_captured" if fits == failing else "fits"
            assert runner.decide(batch).why == why
            assert_right(runner(batch), batch)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *, terminal: bool) -> None:
    """On a terminal the bar shows each bucket and the memory left, unless it is off; elsewhere nothing is printed."""
    shown = io.StringIO()

    def console(**_: Any) -> rich.console.Console:
        return rich.console.Console(file=shown, force_terminal=True, width=100)

    if terminal:
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
        batch = random_batch(3, seed=1)
        assert_right(runner(batch), batch)


def test_more_graphs_than_a_device_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    """More buckets than the device is said to bear graphs are told before the first is captured; all are tried."""
    for borne in (None, 2, 1):
        record = attrs.evolve(CpuCaptureBackend().capabilities, graphs_hint=borne)
        monkeypatch.setattr(CpuCaptureBackend, "capabilities", record)
        with capture_logs() as events:
            runner = plain_runner("cpu-capture")
        told = [(event["wanted"], event["borne"]) for event in events if event["event"] == "many_graphs"]
        assert told == ([(2, 1)] if borne == 1 else [])
        assert borne != 1 or events[0]["event"] == "many_graphs"
        assert runner.report is not None
        assert runner.report.captured == (4, 8)
