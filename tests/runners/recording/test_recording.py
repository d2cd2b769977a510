"""Recordings: what is kept of which steps, within which bounds, and what a step that raises leaves behind."""

import json
import pathlib
import stat
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open

import slotgraph
from slotgraph import BATCH, EagerRunner, Inputs, copied
from slotgraph.backends import choose, load
from slotgraph.dataflow.errors import BatchError, CheckError, ConfigError, RecordingError
from slotgraph.runners.engine.statistics import Decision
from slotgraph.runners.recording.records import RecordedFile, RecordedValue, StepRecord
from slotgraph.runners.recording.replaying import replay_file, replay_step
from tests.runners.recording.steps import Flaw, mixed_batch, mixed_runner, mixed_side


class Rows(Inputs):
    """One slot of 8 bytes a row."""

    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def eager(backend: Any = "cpu") -> EagerRunner[Rows]:
    """A runner over one slot."""
    return EagerRunner(Rows, lambda view: view.rows * 2, backend=backend)


def rows(count: int, value: int = 1) -> dict[str, torch.Tensor]:
    """A batch of one value."""
    return {"rows": torch.full((count,), value)}


def recorded(file: pathlib.Path) -> list[tuple[int, list[int] | None]]:
    """Each step's number and its rows, None where only sizes are kept."""
    steps = [(step.number, step.slots[0].elements) for step in RecordedFile.read(file).steps]
    return [(number, None if elements is None else elements.tolist()) for number, elements in steps]


def test_last_steps(tmp_path: pathlib.Path) -> None:
    """Of many steps the last are kept, as they were when they came."""
    runner, file, batch = eager(), tmp_path / "last.safetensors", rows(2)
    with slotgraph.record(runner, file, last=3):
        for number in range(7):
            batch["rows"].fill_(number)
            runner(batch)
        batch["rows"].fill_(99)
    assert recorded(file) == [(4, [4, 4]), (5, [5, 5]), (6, [6, 6])]
    runner(rows(1))
    assert not runner.watch.watchers


def test_debug_modes_leave_a_file(tmp_path: pathlib.Path) -> None:
    """A wrong step that a debug mode finds is recorded like any other that raises."""
    flaw, file = Flaw(), tmp_path / "wrong.safetensors"
    runner = mixed_runner("cpu-capture", flaw, debug="parity")
    flaw.frozen = 2.0
    with slotgraph.record(runner, file), pytest.raises(CheckError, match="row 0") as caught:
        runner(mixed_batch(3, 1), **mixed_side(3, 1))
    assert "recorded in" in caught.value.__notes__[0]
    assert [step.raised and step.raised.kind for step in RecordedFile.read(file).steps] == ["CheckError"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": "x.pt"}, r"'x\.pt' cannot be recorded to: it is not a \.safetensors file"),
        ({"path": "nowhere/x.safetensors"}, "'nowhere/x.safetensors' cannot be recorded to: No such file"),
        ({"path": None}, "None cannot be recorded to"),
        ({"path": "x" * 300 + ".safetensors"}, "cannot be recorded to: File name too long"),
        ({"path": "a\0b.safetensors"}, "cannot be recorded to: .*null"),
        ({"last": 0}, "last: expected a whole number, at least 1, got 0"),
        ({"last": True}, "got True"),
    ],
)
def test_wrong_options(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    """What makes no sense is refused at once, before a step is lost; nothing is watched, and nothing left behind."""
    monkeypatch.chdir(tmp_path)
    runner = eager()
    given = {"path": tmp_path / "x.safetensors", **options}
    with pytest.raises(ConfigError, match=says):
        slotgraph.record(runner, given.pop("path"), **given)
    assert not runner.watch.watchers
    assert not [*tmp_path.iterdir()]


def test_failing_step(backend_name: str, tmp_path: pathlib.Path) -> None:
    """A step that raises leaves a file, and its error says where; the error, its sizes and its values are in it."""
    device, flaw, file = load(backend_name)().device, Flaw(), tmp_path / "failing.safetensors"
    runner = mixed_runner(backend_name, flaw)
    with slotgraph.record(runner, file):
        runner(mixed_batch(3, 1, device), **mixed_side(3, 1, device))
        assert not file.exists()
        flaw.error = ValueError("the cache is full")
        with pytest.raises(ValueError, match="cache is full") as caught:
            runner(mixed_batch(5, 2, device), **mixed_side(5, 2, device))
        told = f"slotgraph: the last steps are recorded in {file}; `slotgraph replay` runs them again"
        assert caught.value.__notes__ == [told]
        good, bad = RecordedFile.read(file).steps
    assert (good.decision, good.replays) == (Decision("graph", 4, "fits", "bucket 4 fits"), 1)
    assert (good.live, good.raised) == ((("BATCH", 3), ("TOKENS", 3)), None)
    told = "5 rows are more than the largest bucket, 4"
    assert (bad.decision, bad.replays) == (Decision("eager", None, "too_large", told), 0)
    assert bad.raised is not None
    assert (bad.raised.kind, bad.raised.message) == ("ValueError", "the cache is full")
    assert "steps.py" in bad.raised.traceback
    assert [one.name for one in bad.slots] == ["ids", "lengths", "weights", "mask", "bias"]
    assert [one.kind for one in bad.slots] == ["tensor", "plain", "array", "tensor", "tensor"]


def test_file_is_written_whole_or_not(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file cannot be written, the one before stays, nothing else is left, and the step's error says so."""
    runner, file = eager(), tmp_path / "whole.safetensors"
    recording = slotgraph.record(runner, file)
    runner(rows(1, 7))
    recording.save()
    before = file.read_bytes()
    monkeypatch.setattr("slotgraph.runners.recording.records.save_file", Mock(side_effect=OSError("no space left")))
    with pytest.raises(BatchError) as caught:
        runner({"rows": "text"})
    told = "whole.safetensors cannot be written: no space left"
    assert caught.value.__notes__ == [f"slotgraph: step 1 could not be recorded: {told}"]
    with pytest.raises(RecordingError, match=told):
        recording.save()
    assert [one.name for one in tmp_path.iterdir()] == ["whole.safetensors"]
    assert file.read_bytes() == before


def test_error_of_a_block_is_not_hidden(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block ends by an error and its file cannot be written, that error comes out, with a note."""
    monkeypatch.setattr(RecordedFile, "write", Mock(side_effect=OSError("no space left")))
    with pytest.raises(KeyError) as caught, slotgraph.record(eager(), tmp_path / "x.safetensors"):
        raise KeyError
    assert caught.value.__notes__ == ["slotgraph: the last steps could not be recorded: no space left"]
    with pytest.raises(OSError, match="no space"), slotgraph.record(eager(), tmp_path / "x.safetensors"):
        assert True


def test_file_is_its_owner_s(tmp_path: pathlib.Path) -> None:
    """What users asked is in the file: no one else may read it. Anyone's safetensors opens it, and its JSON."""
    runner, file = eager(), tmp_path / "own.safetensors"
    with slotgraph.record(runner, file):
        runner(rows(2, 3))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with safe_open(file, framework="pt") as opened:
        assert opened.get_tensor("0.slots.rows").tolist() == [3, 3]
        header = json.loads(opened.metadata()["slotgraph"])
    assert header["runner"]["facts"]["filling of slot 'rows'"] == "pad=0, batch.rows"
    assert header["versions"]["torch"] == torch.__version__


def test_what_a_failed_device_did_not_copy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that the device never made are given up; those before its failure are kept."""
    runner, file = eager(), tmp_path / "dead.safetensors"
    recording = slotgraph.record(runner, file)
    for number in range(2):
        runner(rows(2, number))
        recording.steps[-1].slots[0].arrived = torch.tensor([1 - number], dtype=torch.uint8)
    monkeypatch.setattr(type(choose("cpu")), "synchronize", Mock(side_effect=RuntimeError("illegal memory access")))
    recording.save()
    assert recorded(file) == [(0, [0, 0]), (1, None)]
    lost = RecordedFile.read(file).steps[1].missing()
    assert lost == ["slot 'rows': the device failed before it was copied: RuntimeError: illegal memory access"]


def test_failed_device(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a device has failed, the file of that failure is the last word: later errors do not write over it."""
    runner, file = eager(), tmp_path / "failed.safetensors"
    with slotgraph.record(runner, file):
        runner(rows(2, 5))
        monkeypatch.setattr(torch.Tensor, "clone", Mock(side_effect=RuntimeError("device-side assert")))
        for _ in range(3):
            with pytest.raises(BatchError):
                runner({"rows": torch.ones(2)})
        runner(rows(1))
    header = RecordedFile.read(file)
    assert header.notes == ("the device failed: RuntimeError: device-side assert",)
    assert [step.number for step in header.steps] == [0, 1]
    assert recorded(file)[0] == (0, [5, 5])


def test_copies_wait_for_no_one(backend_name: str, tmp_path: pathlib.Path) -> None:
    """Sources are copied in the stream's order, though they are overwritten before a device gets to the copies."""
    backend, file = load(backend_name)(), tmp_path / "x.safetensors"
    runner = eager(backend)
    source = torch.full((1 << 16,), 3, device=backend.device)
    with slotgraph.record(runner, file) as recording:
        for number in range(4):
            source.fill_(number)
            if backend_name == "cuda":
                torch.cuda._sleep(10_000_000)
            runner({"rows": source})
        source.fill_(99)
        recording.save()
    assert [step.slots[0].where for step in RecordedFile.read(file).steps] == ["device"] * 4
    assert recorded(file) == [(number, [number] * (1 << 16)) for number in range(4)]


def test_replay_needs_the_data(tmp_path: pathlib.Path) -> None:
    """A step of which only sizes are kept is left out, and it is said why."""
    step = StepRecord(number=3, slots=(RecordedValue(name="rows", kind="tensor", why="too large"),))
    done = replay_step(step, eager())
    assert (done.outcome, done.lines) == ("left out", ("slot 'rows': too large",))
    with slotgraph.record(eager(), tmp_path / "x.safetensors", outputs=True) as recording:
        choose("cpu").synchronize()
        recording.before_fill(rows(2), {})
    assert replay_file(RecordedFile.read(tmp_path / "x.safetensors"), eager()).steps[0].outcome == "equal"
