"""Steps of ranks taken home: one process, without a process group, and the bytes of every slot are the same."""

import functools
import pathlib
import random
from typing import Any, Final, cast

import attrs
import pytest
import torch
import torch.distributed as dist
import typer.testing

import slotgraph
from slotgraph import BATCH, TOKENS, EagerRunner, Inputs, computed, output
from slotgraph.dataflow.errors import RecordingError
from slotgraph.runners.engine.hooks import Watcher
from slotgraph.runners.engine.statistics import Decision
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.recording.records import RecordedFile
from slotgraph.runners.recording.replaying import RecordedRanks, replay_file, replay_step
from slotgraph.runners.standard.counts import DP
from slotgraph_cli import app
from tests.ranks import stepping
from tests.ranks.processes import Processes, raised
from tests.ranks.stepping import Counted, Gathered, runner_on, soon
from tests.runners import prefilled
from tests.runners.check.test_planted import passed
from tests.runners.models import ready

STEPS: Final = 24
BACKENDS: Final = ("cpu", "cpu-capture")
KINDS: Final = (*BACKENDS, "eager", "quiet", *prefilled.KINDS)
Bytes = dict[str, bytes]


class Placed(Gathered):
    """Counted, among what the others bring. place: this rank's first row, its number, and how many ranks and shards."""

    place: torch.Tensor = computed(
        lambda ranks: [sum(ranks.live(BATCH)[: ranks.rank]), ranks.rank, ranks.size, ranks.shards],
        shape=4,
        dtype=torch.int64,
    )
    sums: torch.Tensor = output(TOKENS, dtype=torch.int64)


def step(view: Placed) -> torch.Tensor:
    """Of all that a rank is told; no collective, so that one process can run it."""
    view.sums.copy_(view.ids + view.global_num_tokens.sum() + view.place[0])
    return view.sums * view.weights.long()


class Slots(Watcher):
    """The bytes of every slot after each step."""

    def __init__(self) -> None:
        self.steps: list[Bytes] = []

    def replayed(self, view: Inputs, outputs: Any) -> Any:
        """A step is done."""
        slots = {name: one for name, one in vars(view).items() if isinstance(one, torch.Tensor)}
        self.steps.append({name: one.numpy().tobytes() for name, one in slots.items()})
        return outputs


def runner_of(kind: str, ranks: Ranks, **options: Any) -> Any:
    """A runner over ranks, captured if it can be."""
    if kind == "eager":
        return EagerRunner(Placed, step, sizes={DP: ranks.size}, ranks=ranks, backend="cpu")
    if kind in prefilled.KINDS:
        return ready(prefilled.runner_of(kind, prefilled.Model(named=kind == "piecewise"), "cpu", ranks=ranks))
    backend = "cpu" if kind == "quiet" else kind
    return runner_on(ranks, step, Placed, sizes={DP: ranks.size}, backend=backend, **options)


LENGTHS: Final = ([3], [2, 4, 1], [16], [9, 8], [1] * 6)


def batch_of(kind: str, rank: int, seed: int, draw: random.Random) -> dict[str, Any]:
    """A batch of one rank in one step: of prefill, the same on all quiet ranks, or each rank's own."""
    if kind in prefilled.KINDS:
        lengths = LENGTHS[seed % 5] if rank == 0 else [4, 2][: 1 + seed % 2]
        return prefilled.batch_of(lengths, seed, "cpu")
    rows = [draw.choice([0, 1, 2, 3, 5, 8, 8, 9]) for _ in range(2)]
    return stepping.batch_of(rows[0], seed) if kind == "quiet" else stepping.batch_of(rows[rank], 7 * seed + rank)


def recorded(rank: int, folder: str, kind: str) -> tuple[str, list[Bytes], list[Any]]:
    """Random steps, idle and too large ones among them: the file, slots' bytes by step, and the decisions of all."""
    ranks = soon(equal=kind == "quiet", shards=2 if kind == "quiet" else 1)
    runner, slots, draw = runner_of(kind, ranks), Slots(), random.Random(5)
    path, agreed = pathlib.Path(folder, f"{kind}-{rank}.safetensors"), []
    with slotgraph.record(runner, path, last=STEPS, outputs=True):
        runner.watch.add(slots)
        for seed in range(STEPS):
            batch = batch_of(kind, rank, seed, draw)
            own = len(next(iter(batch.values())))
            if seed % 3 == 0 and own:
                runner.agree_ahead(batch)
            if own or rank == 0 or kind == "quiet":
                runner(batch)
            else:
                runner.idle()
            agreed.append(runner.agreed)
    return str(path), slots.steps, agreed


@pytest.fixture(scope="module")
def home(two: Processes, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file that rank 1 brings home."""
    return str(two.run(recorded, str(tmp_path_factory.mktemp("one")), "cpu")[1][0])


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_slots_have_the_same_bytes(two: Processes, tmp_path: pathlib.Path, kind: str) -> None:
    """Padded rows and counts of ranks among them, in the bucket or on the path that all took, and by the same rank."""
    found = two.run(recorded, str(tmp_path), kind)
    assert not dist.is_initialized()
    forced = 0
    for rank, (path, bytes_by_step, agreed) in enumerate(found):
        file, ranks = RecordedFile.read(path), RecordedRanks.of(path)
        assert (ranks.rank, ranks.size, ranks.equal) == (rank, 2, kind == "quiet")
        runner, slots = runner_of(kind, ranks), Slots()
        runner.watch.add(slots)
        for number, (record, bytes_then) in enumerate(zip(file.steps, bytes_by_step, strict=True)):
            done = replay_step(record, runner)
            assert (done.outcome, done.lines) == ("equal", ())
            assert slots.steps[-1] == bytes_then, (number, record.messages)
            assert runner.agreed == agreed[number]
            assert done.decision is not None
            assert done.decision == record.decision
            forced += record.alone not in ("", done.decision.reason)
    assert forced == {"quiet": 0, "eager": 2 * STEPS}.get(kind, forced) >= 0
    assert kind not in BACKENDS or forced > STEPS
    buckets = {one.bucket for one in found[0][2] if one is not None}
    assert kind not in prefilled.KINDS or buckets == {4, 16, None}
    path = found[1][0]
    report = replay_file(RecordedFile.read(path), runner_of(kind, RecordedRanks.of(path)))
    assert report.ok
    assert (len(report.steps), report.notes) == (STEPS, ())
    text = typer.testing.CliRunner().invoke(app, ["replay", path]).stdout
    assert ", rank 1 of 2" in text
    assert kind == "quiet" or "ranks brought " in text


def breaking(ranks: Ranks) -> Any:
    """A runner with a slot that rank 1 cannot compute where rank 0 brings seven rows."""

    def counted(ranks: Ranks) -> list[int]:
        if ranks.rank == 1 and ranks.live(BATCH)[0] == 7:
            raise ValueError("too many for me")
        return list(ranks.live(TOKENS))

    class Raising(Counted):
        counts: torch.Tensor = computed(counted, shape=DP, dtype=torch.int32)

    return runner_on(ranks, lambda view: view.ids * 2, Raising, sizes={DP: 2}, buckets=[4, 8])


def broken(rank: int, folder: str) -> str:
    """A good step, one whose batch rank 1 refuses, and one that it cannot fill when all have agreed on it."""
    runner, path = breaking(soon()), pathlib.Path(folder, f"broken-{rank}.safetensors")
    with slotgraph.record(runner, path):
        runner(stepping.batch_of(2, 1))
        assert "weights" in raised(runner, stepping.batch_of(3, 1) | ({"weights": None} if rank == 1 else {}))
        error = raised(runner, stepping.batch_of(7 - 4 * rank, 1))
    assert error == "" if rank == 0 else "too many for me" in error
    return str(path)


def test_steps_that_did_not_come_to_be_are_recorded(two: Processes, tmp_path: pathlib.Path) -> None:
    """What all had agreed on before is in the record; where nothing was, it says that the others' part is not there."""
    first, second = two.run(broken, str(tmp_path))
    last = RecordedFile.read(second).steps[-1]
    assert last.raised is not None
    assert last.decision is not None
    assert (last.decision.bucket, last.decision.reason) == (8, "bucket 8 fits the 7 rows of rank 0, the most of all")
    assert last.alone == "bucket 4 fits"
    assert [one.live[:2] for one in last.messages] == [(7, 7), (3, 3)]
    file = RecordedFile.read(first)
    assert [len(one.messages) for one in file.steps] == [2, 0, 2]
    steps = replay_file(file, breaking(RecordedRanks.of(first))).steps
    assert [one.outcome for one in steps] == ["equal"] * 3
    assert (
        "the other ranks' messages are not in the file: they are assumed to have the same batches as this one"
        in steps[1].lines
    )


def test_a_file_of_other_ranks_is_refused(home: str, tmp_path: pathlib.Path) -> None:
    """Other ranks, or none; and files of runners that had none."""
    file = RecordedFile.read(home)
    record = file.runner.ranks
    assert record is not None
    with pytest.raises(RecordingError, match=r"ranks: the file has rank 1 of 2, the runner rank 0 of 2; make it of"):
        replay_file(file, runner_of("cpu", RecordedRanks(attrs.evolve(record, rank=0))))
    plain = EagerRunner(Counted, lambda view: view.ids * 2, backend="cpu")
    with pytest.raises(RecordingError, match=r"ranks: the file has rank 1 of 2, the runner none; make it of"):
        replay_file(file, plain)
    with slotgraph.record(plain, tmp_path / "plain.safetensors"):
        plain(stepping.batch_of(3, 1))
    with pytest.raises(RecordingError, match=r"plain.safetensors: its runner had no ranks"):
        RecordedRanks.of(tmp_path / "plain.safetensors")
    old = RecordedFile.read(tmp_path / "plain.safetensors")
    runner = EagerRunner(Counted, lambda view: view.ids * 2, ranks=RecordedRanks(record), backend="cpu")
    with pytest.raises(RecordingError, match=r"ranks: the file has none, the runner rank 1 of 2"):
        replay_file(old, runner)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_runner_at_home_is_one_as_any(home: str, backend: str) -> None:
    """It is checked, debugged, explained, run and waited for: beside recorded steps all bring what it brings."""
    ranks = RecordedRanks.of(home)
    runner = runner_of(backend, ranks, debug="poison,parity")
    assert passed(runner).steps["races"] > 4
    batch = stepping.batch_of(3, 1)
    runner.agree_ahead(batch)
    outputs = runner(batch)
    assert torch.equal(outputs, (batch["ids"] + 6 + 3) * batch["weights"].long())
    assert ranks.live(BATCH) == (3, 3)
    told = slotgraph.explain(runner).ranks
    assert told is not None
    assert (told.rank, told.size) == (1, 2)
    runner.wait()


@pytest.mark.parametrize(
    ("ranks", "step", "told"),
    [
        ({"rank": -1}, attrs.evolve, "there is no rank -1 of 2"),
        ({"size": 1 << 40}, attrs.evolve, f"there is no rank 1 of {1 << 40}"),
        ({"shards": 0}, attrs.evolve, "there is no rank 1 of 2 with 0 shards"),
        (None, attrs.evolve, "its ranks are not the 0"),
        ({}, lambda one: attrs.evolve(one, messages=one.messages[:1]), "step 0: its ranks are not the 2"),
        ({}, functools.partial(attrs.evolve, decision=Decision("graph", 4, cast("Any", "mood"), "")), "mood"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(
    home: str, tmp_path: pathlib.Path, ranks: Any, step: Any, told: str
) -> None:
    """Is refused when it is read, with what is wrong."""
    file = RecordedFile.read(home)
    assert file.runner.ranks is not None
    changed = None if ranks is None else attrs.evolve(file.runner.ranks, **ranks)
    steps = (step(file.steps[0]), *file.steps[1:])
    attrs.evolve(file, runner=attrs.evolve(file.runner, ranks=changed), steps=steps).write(tmp_path / "x.safetensors")
    with pytest.raises(RecordingError, match=told):
        RecordedFile.read(tmp_path / "x.safetensors")
