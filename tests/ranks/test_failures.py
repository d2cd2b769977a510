"""Ranks that fail: each failure is an error on every rank, soon, and names the rank that failed."""

import os
import pathlib
import time
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from slotgraph import DecodeRunner, EagerRunner
from slotgraph.dataflow.errors import CaptureError, ConfigError
from slotgraph.runners.ranks import group
from slotgraph.runners.ranks.group import Message, Ranks
from tests.programs import python
from tests.ranks import stepping
from tests.ranks.processes import Processes, raised, ranks
from tests.ranks.stepping import OVER, Counted, Kept, Numbered, Unreadable, runner_on, soon

KINDS: Final = ("decode", "eager")
CPU: Final = torch.device("cpu")


class LateWork:
    """An all-gather that ends just after the first wait for it timed out, in success or with an error."""

    def __init__(self, error: str) -> None:
        self.error = error
        self.waits = 0

    def wait(self, *_: Any) -> None:
        """Time out at first, as gloo does."""
        self.waits += 1
        if self.waits == 1 or self.error:
            raise RuntimeError(self.error or "Operation timed out!")

    def is_completed(self) -> bool:
        """By now it is."""
        return True


@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
def test_messages_that_arrive_as_a_wait_times_out_count(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """They count: ranks on a loaded machine once took such a wait for a lost connection, and lost each other."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    monkeypatch.setattr(dist, name, lambda *_, **__: LateWork(error))
    unused: Any = None
    wire = group.GlooWire(unused, 1)
    wire.send(Message(0))
    if error:
        with pytest.raises(RuntimeError, match=error):
            wire.arrives(0.0)
    else:
        assert wire.arrives(0.0)


def runner_of(kind: str, ranks: Ranks) -> Any:
    """One of each kind, whose step cannot run nine rows on rank 1."""

    def step(view: Any) -> torch.Tensor:
        if ranks.rank == 1 and view.ids.shape[0] == 9:
            raise ValueError("lost a page")
        out: torch.Tensor = view.ids * view.number
        return out

    if kind == "eager":
        return EagerRunner(Numbered, step, ranks=ranks, backend="cpu")
    return runner_on(ranks, step, Numbered, buckets=[4])


def batch_of(seed: int, factor: Any, rows: int = 3) -> dict[str, Any]:
    """A batch of which the host computes a number from a factor."""
    return {**stepping.batch_of(rows, seed), "factor": factor}


def refuses(rank: int, kind: str, over: str) -> list[tuple[str, bool]]:
    """Steps of which rank 1 refuses every second one, in another way each; and whether slots are as they were."""
    runner, found = runner_of(kind, soon(over)), []
    buffers = [] if kind == "eager" else [buffer.tensor for buffer in runner.graphs.buffers]
    for number in range(9):
        batch = batch_of(number, number + 1)
        wrong = (None, batch["ids"].to(torch.complex64), batch["ids"][None, None])
        odd = [*({**batch, "ids": ids} for ids in wrong), Unreadable(batch, OSError("lost a page"))]
        before = [one.clone() for one in buffers]
        error = raised(runner, odd[number // 2] if rank == 1 and number % 2 else batch)
        found.append((error, all(torch.equal(old, new) for old, new in zip(before, buffers, strict=True))))
    return found


@pytest.mark.parametrize(("kind", "over"), [*((kind, OVER[0]) for kind in KINDS), ("decode", "gloo")])
def test_a_batch_refused_by_one_rank_is_run_by_none(two: Processes, kind: str, over: str) -> None:
    """Nobody runs the step, nothing is written anywhere, each is told, and the next step is right."""
    first, second = two.run(refuses, kind, over)
    assert [error for error, _ in first[::2] + second[::2]] == [""] * 10
    for (other, unwritten), (own, also) in zip(first[1::2], second[1::2], strict=True):
        assert unwritten
        assert also
        assert own.startswith(("BatchError: ", "MissingSourceError: slot ", "OSError: lost "))
        assert other.startswith("RankError: rank 1 refused its batch, so that no rank runs the step: ")
        assert own.split(": ")[1] in other
    assert second[7][0].startswith("OSError: lost ")


def breaks_off(rank: int, kind: str, how: str) -> str:
    """Rank 1 cannot compute a slot of the second step, or cannot run it, and comes to no other."""
    runner = runner_of(kind, soon())
    runner(batch_of(1, 2))
    rows = 9 if how == "step" else 3
    if rank == 1:
        return raised(runner, batch_of(2, "no number" if how == "fill" else 3, rows))
    runner(batch_of(2, 3, rows))
    return raised(runner, batch_of(3, 4))


@pytest.mark.parametrize(("kind", "how"), [*((kind, "fill") for kind in KINDS), ("decode", "step")])
def test_a_step_that_one_breaks_off_is_told_in_the_next(two: Processes, kind: str, how: str) -> None:
    """The others run it; in the next one they are told what happened."""
    first, second = two.run(breaks_off, kind, how)
    assert second.startswith("ComputeError: slot 'number'" if how == "fill" else "ValueError: lost a page")
    name = "EagerRunner" if kind == "eager" else "DecodeRunner"
    assert first == f"RankError: rank 1 failed in a step of runner 1 ({name} of Numbered): {second}"


def fails_in_capture(rank: int) -> tuple[str, dict[int, str], tuple[int, ...]]:
    """Rank 1 cannot capture bucket 4."""

    def step(view: Counted) -> torch.Tensor:
        if rank == 1 and view.ids.shape[0] == 4:
            raise ValueError("no room for this one")
        return view.ids * 2

    runner = DecodeRunner(Counted, step, ranks=soon(), buckets=[2, 4, 8], backend="cpu", progress=False)
    with pytest.raises(CaptureError) as caught:
        runner.capture()
    assert runner.report is not None
    assert runner.decide(stepping.batch_of(3, 1)).why == "not_captured"
    return str(caught.value), runner.report.failed, runner.report.captured


def test_a_bucket_that_one_cannot_capture_is_left_out_by_all(two: Processes) -> None:
    """All leave it out, rank 0 says whose error it was, and the others are usable."""
    first, second = two.run(fails_in_capture)
    assert first[1].keys() == second[1].keys() == {4}
    assert first[2] == second[2] == (2, 8)
    assert first[1][4].startswith("rank 1: ")
    assert "no room for this one" in first[0]
    assert "no room for this one" in second[1][4]


def lost(rank: int, stalls: bool, over: str) -> list[str]:
    """Rank 2 stops after some steps, for good or for long; what the others are told in two steps."""
    stepping.make(rank, over=over)
    for number in range(5):
        stepping.run(rank, [1, 2, 3], number)
    Kept.runner.coordinator.timeout = 1.5
    if rank == 2:
        if not stalls:
            os.kill(os.getpid(), 9)
        time.sleep(6)
        return []
    return [raised(stepping.run, rank, [1, 2, 3], number) for number in range(2)]


@pytest.mark.parametrize(("stalls", "over"), [(False, OVER[0]), (True, OVER[0]), (False, "gloo")])
def test_a_lost_rank_is_named(tmp_path: pathlib.Path, stalls: bool, over: str) -> None:
    """The others are told which, none waits for ever, and who tries again is told at once."""
    with ranks(3, tmp_path, timeout=20) as made:
        outcomes = made.outcomes(lost, stalls, over)
    how = {(True, OVER[0]): "within 1.5 s", (False, OVER[0]): "before its connection was lost"}.get((stalls, over), "")
    for one in outcomes[:2]:
        assert one is not None
        first, again = (told.removeprefix("RankError: ") for told in one.value)
        place = "a step of runner 1 (DecodeRunner of Counted)"
        assert first.startswith(f"{place}: rank 2 did not come {how}")
        assert "rank 0" not in first
        assert "rank 1" not in first
        assert again == f"{place}: these ranks are lost to each other: {first}"


def waits(rank: int, absent: int, where: str) -> tuple[int, list[str]]:
    """Each rank waits for its device, which passes the ends of two steps, unless the rank is lost before the third.

    A CPU never stands still, so that its events are made here.
    """
    made, runs = soon(timeout=2.0, capture_timeout=2.0), list[int]()
    runner = DecodeRunner(Counted, stepping.step, buckets=[2], ranks=made, backend="cpu", progress=False)
    late = time.monotonic() + 0.2
    queries = (lambda: False, lambda: time.monotonic() > late, lambda: True)
    events = [SimpleNamespace(query=one) for one in queries]
    backend: Any = SimpleNamespace(device=CPU, event=events.pop)

    def step() -> None:
        runs.append(1)
        if where != "warm_up":
            runner.coordinator.wait(backend.event(), CPU, read=where == "read")

    run = runner.coordinator.warm_up(step, backend) if where == "warm_up" else step
    run()
    run()
    errors = [] if rank == absent else [raised(run), raised(runner.capture)]
    return len(runs), errors


@pytest.mark.parametrize("absent", [1, -1])
@pytest.mark.parametrize("where", ["wait", "read", "warm_up"])
def test_waiting_for_a_device_that_stands_still_ends(two: Processes, absent: int, where: str) -> None:
    """Waiting for it ends, with the name of the rank that did not come, if one did not; nothing is exchanged then."""
    name = "runner 1 (DecodeRunner of Counted)"
    what = f"{name}: a warm-up before a capture" if where == "warm_up" else "the end of a step on the device"
    late = "all ranks came, but not all within 2 s"
    why = late if absent < 0 else "rank 1 did not come within 2 s: it is dead, stuck, or"
    for runs, (error, again) in two.run(waits, absent, where)[: 1 if absent == 1 else 2]:
        assert runs == 3
        assert error.startswith(f"RankError: {what}: {why}")
        assert f"these ranks are lost to each other: {what}: {why}" in again


def nonsense(_: int) -> None:
    """Numbers, groups, buckets that do not divide, late captures."""
    with pytest.raises(ConfigError, match=r"timeout: expected seconds, more than 0 .*, got 0 of type int"):
        Ranks(timeout=0)
    with pytest.raises(ConfigError, match="expected a process group that this process is in, got 'tp'"):
        Ranks("tp")  # type: ignore[arg-type] # on purpose
    with pytest.raises(ConfigError, match="bucket 3 has 3 tokens, which do not divide among 2 shards"):
        runner_on(soon(shards=2), stepping.step, buckets=(2, 3))
    with pytest.raises(ConfigError, match="lazy=True captures at the first batch"):
        runner_on(soon(), stepping.step, lazy=True)


def test_what_makes_no_sense_is_refused(two: Processes) -> None:
    """When it is declared."""
    two.run(nonsense)


def test_a_torch_without_process_groups_is_told() -> None:
    """Some builds have none: slotgraph is imported all the same, and ranks say what is missing."""
    code = (
        "import torch.distributed as dist\n"
        "for name in ('ProcessGroup', 'new_group', 'Work', 'isend', 'group', 'get_rank'): delattr(dist, name)\n"
        "dist.is_available = lambda: False\n"
        "import slotgraph.ranks\n"
        "slotgraph.ranks.Ranks()\n"
    )
    done = python("-c", code)
    assert done.stderr.splitlines()[-1].startswith(
        "slotgraph.errors.ConfigError: ranks need a process group: call torch.distributed.init_process_group"
    )
