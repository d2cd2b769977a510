"""Replays: recorded steps of every runner are run again, and what differs is shown by slot and row."""

import pathlib
import re
from typing import Any

import pytest
import torch

import slotgraph
from slotgraph import BATCH, TOKENS, Axis, EagerRunner, Inputs, copied, staged
from slotgraph.backends import load
from slotgraph.dataflow.errors import RecordingError
from slotgraph.dataflow.sources import Source
from slotgraph.runners.engine.sampling import rebuilt
from slotgraph.runners.recording.records import RecordedFile, RunnerRecord
from slotgraph.runners.recording.replaying import ReplayReport, replay_file, unlike
from tests.life import test_ahead as advancing
from tests.runners import prefilled
from tests.runners.models import decoder
from tests.runners.recording.steps import Flaw, Mixed, Scored, mixed_batch, mixed_runner, mixed_side


def report_of(file: pathlib.Path, runner: Any, only: int | None = None) -> ReplayReport:
    """A file's steps on a runner."""
    return replay_file(RecordedFile.read(file), runner, only)


def test_decode(backend_name: str, tmp_path: pathlib.Path) -> None:
    """Padded, full, absent and too large batches, of every kind of value, are equal where nothing is wrong."""
    runner, device = mixed_runner(backend_name), load(backend_name)().device
    with slotgraph.record(runner, tmp_path / "x.safetensors", outputs=True):
        for rows, bias in ((3, True), (4, True), (1, False), (6, True)):
            runner(mixed_batch(rows, rows, device, bias=bias), **mixed_side(rows, rows, device))
    report = report_of(tmp_path / "x.safetensors", mixed_runner(backend_name))
    assert [step.outcome for step in report.steps] == ["equal"] * 4
    assert [step.decision and step.decision.bucket for step in report.steps] == [4, 4, 2, None]
    assert report.notes == ()
    assert report.ok


@pytest.mark.parametrize("lowering", ["foreach", "in_graph"])
def test_steps_that_follow_one_another(backend_name: str, lowering: str, tmp_path: pathlib.Path) -> None:
    """Each step of a loop is recorded as an ordinary one, with what slots advanced to, and runs again on the CPU."""
    runner, device = advancing.runner_on(backend_name, lowering), load(backend_name)().device
    first, joins = (
        advancing.batch_of([{**advancing.ROW, "ids": one} for one in ids], device, lists=True) for ids in ((3, 6), [9])
    )
    returned = []
    with slotgraph.record(runner, tmp_path / "x.safetensors", outputs=True):
        for step in runner.steps(first, keys=[*"ab"], ahead=2):
            returned.append(step.outputs.tolist())
            if step.number == 2:
                step.join(joins, ["c"])
                step.leave(["a"])
            if step.number == 4:
                step.edit(["b"], pages=[[5, 5, 5, 5, 5]])
            if step.number == 6:
                step.leave([*"bc"])
    file = RecordedFile.read(tmp_path / "x.safetensors")
    kept = [one.elements for step in file.steps for one in step.outputs or ()]
    assert [one.tolist() for one in kept if one is not None] == returned
    for other in ("cpu", "cpu-capture"):
        report = replay_file(file, advancing.runner_on(other, lowering))
        assert [step.outcome for step in report.steps] == ["equal"] * 7


def test_frozen_value(backend_name: str, tmp_path: pathlib.Path) -> None:
    """A number that the graph froze is shown by slot and row; against the recording, too."""
    if backend_name == "cpu":
        pytest.skip("cpu runs the step again, which freezes nothing")
    device, flaw = load(backend_name)().device, Flaw()
    healthy, frozen = mixed_runner(backend_name), mixed_runner(backend_name, flaw)
    flaw.frozen = 2.0
    with slotgraph.record(healthy, tmp_path / "x.safetensors", outputs=True):
        healthy(mixed_batch(3, 7, device), **mixed_side(3, 7, device))
    found = report_of(tmp_path / "x.safetensors", frozen).steps[0]
    assert found.outcome == "different"
    assert re.match(
        r"slot 'scores' row 0, at \[0, 0\]: graph .*, eager .* \(bucket 4\); all slots agree", found.lines[0]
    )
    other = mixed_runner(backend_name, flaw)
    (apart,) = report_of(tmp_path / "x.safetensors", other).steps[0].lines
    assert re.match(r"outputs row 0, at \[0, 0\]: here .*, recorded ", apart)


def test_state_goes_on_from_step_to_step(backend_name: str, tmp_path: pathlib.Path) -> None:
    """A cache that steps write is put back between the runs of one step, and left to the next step."""

    class Cached(Inputs):
        values: torch.Tensor = copied(TOKENS, dtype=torch.float32, pad=0)

    def made() -> tuple[Any, torch.Tensor]:
        cache = torch.zeros(1, device=load(backend_name)().device)

        def step(view: Cached) -> torch.Tensor:
            cache.add_(view.values.sum())
            return view.values + cache

        runner = decoder(Cached, step, backend=backend_name)
        cache.zero_()
        return runner, cache

    runner, _ = made()
    device = runner.stage.backend.device
    with slotgraph.record(runner, tmp_path / "x.safetensors", outputs=True):
        for value in (1.0, 2.0, 3.0):
            runner({"values": torch.full((3,), value, device=device)})
    again, cache = made()
    assert [step.outcome for step in report_of(tmp_path / "x.safetensors", again).steps] == ["equal"] * 3
    assert cache.item() == 18.0


@pytest.mark.parametrize("kind", prefilled.KINDS)
def test_prefill(backend_name: str, tmp_path: pathlib.Path, kind: str) -> None:
    """Prefill runners' steps, whose requests differ in length, with a field that breaks read."""
    runner, device = prefilled.captured(kind, backend_name)[0], load(backend_name)().device
    with slotgraph.record(runner, tmp_path / "x.safetensors", outputs=True):
        for lengths in ([3], [2, 4, 1]):
            runner(prefilled.batch_of(lengths, 5, device))
    steps = report_of(tmp_path / "x.safetensors", runner).steps
    assert [(step.outcome, step.decision and step.decision.path) for step in steps] == [("equal", kind)] * 2
    assert [step.fields[0].data for step in RecordedFile.read(tmp_path / "x.safetensors").steps] == ["3", "3"]


def test_replay_again_and_fields(backend_name: str, tmp_path: pathlib.Path) -> None:
    """Replays of one fill are counted; a field that a file cannot hold is named."""

    class Counted(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        count: torch.Tensor = copied(1, dtype=torch.int32, pad=0)
        tag: Any = 1

    device = load(backend_name)().device
    runner = decoder(Counted, lambda v: v.ids * v.count, buckets=[2], backend=backend_name)
    ids, count = torch.tensor([5, 6], device=device), torch.tensor([3], dtype=torch.int32, device=device)
    with slotgraph.record(runner, tmp_path / "x.safetensors"):
        view = runner.fill({"ids": ids, "count": count})
        runner.replay(view)
        runner.replay(view)
        runner({"ids": ids.repeat(3), "count": count, "tag": object()})
    first, second = RecordedFile.read(tmp_path / "x.safetensors").steps
    assert first.replays == 2
    assert [(one.name, one.kind) for one in second.fields] == [("tag", "other")]
    assert second.fields[0].why == "builtins.object"
    done = report_of(tmp_path / "x.safetensors", runner)
    assert [step.outcome for step in done.steps] == ["equal", "equal"]
    assert done.steps[1].lines == ("field 'tag' is not in the file: builtins.object",)


def test_staged_slots(backend_name: str, tmp_path: pathlib.Path) -> None:
    """What a producer writes beside the step is recorded, and staged again at home."""

    class Masked(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        mask: torch.Tensor = staged(TOKENS, 2, dtype=torch.float32, pad=0)

    device = load(backend_name)().device
    runner = decoder(Masked, lambda v: v.ids[:, None] * v.mask, buckets=[2, 4], backend=backend_name)
    with slotgraph.record(runner, tmp_path / "x.safetensors", outputs=True):
        for rows in (3, 5):
            view = runner.fill({"ids": torch.arange(1, rows + 1, device=device)})
            view.mask[:rows] = torch.arange(2 * rows, device=device).view(rows, 2) + 0.5
            runner.replay(view)
    first, second = RecordedFile.read(tmp_path / "x.safetensors").steps
    assert [one.shape for one in (*first.staged, *second.staged)] == [(3, 2), (5, 2)]
    again = decoder(Masked, lambda v: v.ids[:, None] * v.mask, backend=backend_name)
    assert [step.outcome for step in report_of(tmp_path / "x.safetensors", again).steps] == ["equal"] * 2

    class Renamed(Masked, drop=("mask",)):
        cover: torch.Tensor = staged(TOKENS, 2, dtype=torch.float32, pad=0)

    other = EagerRunner(Renamed, lambda v: v.cover, backend=backend_name)
    assert "slot 'mask': the file has float32 [3, 2], tensor" in str(report_of(tmp_path / "x.safetensors", other).steps)


class Other(Mixed):
    """The same slots, each declared in another way."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=1)
    lengths: torch.Tensor = copied(BATCH, 2, dtype=torch.int32, pad=1, source="lengths")
    more: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def test_every_difference_is_named(tmp_path: pathlib.Path) -> None:
    """A runner of another declaration is refused with each slot, what the file has and what the runner has."""
    runner = mixed_runner("cpu")
    with slotgraph.record(runner, tmp_path / "x.safetensors"):
        runner(mixed_batch(1, 1), **mixed_side(1, 1))
    other = EagerRunner(Other, Scored(), backend="cpu")
    with pytest.raises(RecordingError) as caught:
        report_of(tmp_path / "x.safetensors", other)
    assert str(caught.value) == (
        "x.safetensors does not fit the runner: slot 'ids': the file has copied int64 [TOKENS] on device, "
        "the runner copied int32 [TOKENS] on device; slot 'lengths': the file has copied int32 [BATCH] on device, "
        "the runner copied int32 [BATCH, 2] on device; slot 'more': the file has none, the runner copied int64 "
        "[TOKENS] on device"
    )
    noted = unlike(RunnerRecord.of(runner).facts, RunnerRecord.of(other).facts)
    assert "kind: the file has DecodeRunner, the runner EagerRunner" in noted
    assert "filling of slot 'ids': the file has pad=0, batch.ids, the runner pad=1, batch.ids" in noted


def test_what_does_not_keep_a_step_from_running_is_noted(tmp_path: pathlib.Path) -> None:
    """A repaired tail, other buckets, and a fixed axis of another size: noted, noted, and refused."""
    hidden = Axis("HIDDEN", fixed=True)

    class Sized(Inputs):
        ids: torch.Tensor = copied(TOKENS, hidden, dtype=torch.int64, pad=0)

    def made(size: int, *buckets: int) -> Any:
        return decoder(Sized, lambda v: v.ids + 1, sizes={hidden: size}, buckets=buckets)

    runner = made(2, 4)
    with slotgraph.record(runner, tmp_path / "x.safetensors"):
        runner({"ids": [[1, 2]]})
    assert report_of(tmp_path / "x.safetensors", made(2, 8)).notes == (
        "buckets: the file has [4], the runner [8]",
        "config 'buckets': the file has [4], the runner [8]",
    )
    with pytest.raises(RecordingError, match="size of HIDDEN: the file has 2, the runner 3"):
        report_of(tmp_path / "x.safetensors", made(3, 4))


def test_sources_that_cannot_be_stood_in_for() -> None:
    """A source of another class, or two that exclude one another, is refused by name."""

    class Own(Source):
        def read(self, batch: Any, side: Any) -> Any:
            raise NotImplementedError

    class Hidden(Inputs):
        a: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, source=Own())

    class Nested(Inputs):
        a: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, source="x")
        b: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, source="x.real")

    with pytest.raises(RecordingError, match="slot 'a': its source is a Own, which"):
        rebuilt(Hidden.slotgraph, {"a": torch.ones(1)}, {})
    with pytest.raises(RecordingError, match=r"slot 'b': its source batch\.x\.real contains another source"):
        rebuilt(Nested.slotgraph, {"a": torch.ones(1), "b": torch.ones(1)}, {})
    fields = {"x": {"kept": 1}}
    assert rebuilt(Nested.slotgraph, {"b": 2}, fields).batch == {"x": {"kept": 1, "real": 2}}
