"""The rows of `slotgraph bench` that are about runners: each fill held to the one by hand, before it is timed."""

import itertools
import pathlib
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
import typer.testing

from slotgraph import BATCH, TOKENS, BreakableRunner, PrefillRunner, standard
from slotgraph.backends import choose
from slotgraph.dataflow.errors import WrongBytesError
from slotgraph.runners.commands import bench, plot
from slotgraph.runners.commands.app import app
from slotgraph.runners.commands.bench_tables import show
from slotgraph.runners.commands.figures import Figure, Results, RunnerFigure
from slotgraph.runners.commands.runner_kinds import DRAFTS, FRONT, SERVING, TOPK, Kind, Scale, kinds
from slotgraph.runners.commands.runner_races import Race, races
from slotgraph.runners.commands.screen import screen
from slotgraph.runners.commands.timing import Spread

if TYPE_CHECKING:
    from slotgraph.backends import Backend
    from slotgraph.runners.commands.workload import Batch

TINY = Scale(requests=(3, 4), tokens=(11, 16), prompts=2, most_prompts=3, hidden=5)
KINDS = {kind.phase: kind for kind in kinds(TINY)}
RUNNERS = {
    "decode": "DecodeRunner",
    "verify": "DecodeRunner",
    "eager": "EagerRunner",
    "prefill": "BreakableRunner",
    "draft": "DraftRunner",
    "extend": "DraftExtendRunner",
    "multi-layer": "MultiLayerDraftExtendRunner",
}

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def wrong_in(race: Race, name: str) -> Race:
    """The same race, in which the fill by hand leaves another last element in one slot."""

    def fill(batch: "Batch") -> Any:
        view = race.by_hand(batch)
        changed = getattr(view, name).clone()
        last = changed.view(-1)[-1:]
        last.copy_(~last if last.dtype == torch.bool else last + 1)
        setattr(view, name, changed)
        return view

    return attrs.evolve(race, by_hand=fill)


def figure(kind: Kind, gpu: Spread | None = None) -> RunnerFigure:
    """A figure that was not measured."""
    race = Race.of(kind, choose("cpu"))
    return RunnerFigure.of(race, (Spread(30.04, 28.0, 33.0), gpu), (Spread(10.0, 9.0, 12.0), gpu))


def test_there_is_a_row_for_every_runner() -> None:
    """Each public runner but PrefillRunner, whose fill is BreakableRunner's, at the sizes of a server."""
    assert {kind.phase: kind.runner for kind in kinds()} == RUNNERS
    assert PrefillRunner.fill is BreakableRunner.fill
    serving = {kind.phase: kind for kind in kinds(SERVING)}
    assert {(one.live, one.shown) for one in serving.values()} == {(200, 256), (200, 200), (1800, 2048)}
    widths = {one.phase: one.width for one in serving.values()}
    assert (widths["verify"], widths["draft"], widths["extend"], widths["multi-layer"]) == (8, TOPK, 8, FRONT + DRAFTS)
    assert serving["prefill"].sizes(1800)[BATCH] == 8
    assert serving["verify"].sizes(200)[TOKENS] == 1600


@each_kind
def test_declarations_are_standard(kind: Kind) -> None:
    """A class of the standard, or one with the count for experts, which is then among its slots."""
    names = kind.declared.split(", ")
    assert all(issubclass(kind.inputs, getattr(standard, name)) for name in names)
    assert ("num_token_non_padded" in kind.declaration.slots) == ("ExpertParallel" in names)


@each_kind
def test_both_fill_the_same(kind: Kind, backend: "Backend") -> None:
    """Over growing and shrinking batches from spoilt memory, tails included, in every slot that a fill writes."""
    race = Race.of(kind, backend)
    graph_computes = {"select_index"} & set(kind.declaration.slots)
    assert set(race.filled) == set(kind.declaration.slots) - graph_computes - {"next_token_logits"}


@each_kind
def test_a_wrong_byte_in_any_slot_is_caught(kind: Kind) -> None:
    """One element, in the tail where there is one, is enough: the slot, the runner and the rows are named."""
    race = Race.of(kind, choose("cpu"))
    for name in race.filled:
        message = rf"{kind.runner} for {kind.phase} .* different bytes in slot '{name}', {kind.live}/{kind.shown} rows"
        with pytest.raises(WrongBytesError, match=message):
            wrong_in(race, name).verify()


def test_wrong_fills_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command fails before anything is measured."""

    def of(kind: Kind, backend: "Backend") -> Race:
        race = wrong_in(Race.of(kind, backend), "positions")
        race.verify()
        return race

    monkeypatch.setattr(bench, "races", lambda backend: (of(kind, backend) for kind in KINDS.values()))
    monkeypatch.setattr(bench, "measure", pytest.fail)
    result = typer.testing.CliRunner().invoke(app, ["bench", "--quick", "--slots", "4", "--backend", "cpu"])
    assert result.exit_code == 1
    assert "the fill of DecodeRunner for decode" in result.stderr


@each_kind
def test_sets_differ_in_addresses_and_values(kind: Kind) -> None:
    """No step finds the sources of the one before; a prefill's lengths are at least one and come to its tokens."""
    batches = kind.sets(choose("cpu"))
    for one, other in itertools.pairwise(batches):
        for name in kind.declaration.slots:
            value = getattr(one, name, None)
            if value is not None and name != "extend_seq_lens":
                assert not torch.equal(value, getattr(other, name))
                assert value.data_ptr() != getattr(other, name).data_ptr()
    if kind.phase == "prefill":
        assert all(int(batch.extend_seq_lens.sum()) == TINY.tokens[0] for batch in batches)
        assert all(int(batch.extend_seq_lens.min()) > 0 for batch in batches)


def test_figures_as_data() -> None:
    """What a row says: the runner, its sizes, what it copies, and both ways' times; null where nothing was measured."""
    row = figure(KINDS["decode"]).as_row()
    told = ("phase", "runner", "declaration", "slots", "live", "padded")
    assert [row[name] for name in told] == ["decode", "DecodeRunner", "DecodeInputs, ExpertParallel", 8, 3, 4]
    assert row["nbytes"] == 3 * (8 + 4 + 4 + 8 + 8 + 8)
    assert (row["per_slot_host_us"], row["ours_host_us"], row["ours_host_p90_us"]) == (30.04, 10.0, 12.0)
    assert (row["per_slot_gpu_us"], row["ours_gpu_us"]) == (None, None)
    gpu = figure(KINDS["eager"], Spread(2.0, 1.0, 3.0)).as_row()
    assert (gpu["live"], gpu["padded"], gpu["ours_gpu_us"], gpu["ours_gpu_p10_us"]) == (3, 3, 2.0, 1.0)
    assert Results([], [], "foreach", [figure(KINDS["decode"])]).as_data({})["runners"] == [row]


@pytest.mark.parametrize(("columns", "named"), [("220", True), ("80", False)])
def test_the_table_fits_the_terminal(columns: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 - a case
    """Wide with names and percentiles, narrow without; the device's time where it was measured."""
    monkeypatch.setenv("COLUMNS", columns)
    gpu = Spread(2.25, 1.0, 3.0)
    for time in (None, gpu):
        runners, console = [figure(KINDS[phase], time) for phase in ("multi-layer", "prefill")], screen()
        with console.capture() as output:
            show(Results([], [], "foreach", runners), console)
        text = output.get().partition("microseconds of each runner")[2]
        assert ("MultiLayerDraftExtendRunner" in text, "30.0 (28.0-33.0)" in text) == (named, named)
        assert ("11/16" in text, "3.0 x" in text, "…" in text) == (True, True, False)
        assert ("device" in text, "2.2" in text) == (time is not None, time is not None)


def test_runners_are_drawn(tmp_path: pathlib.Path) -> None:
    """A panel of their own, below all others."""
    host = Spread(10.0, 9.0, 12.0)
    plain = Figure(
        what="step", lowering="bare", sources="device", slots=4, lowest=7, live=7, padded=8, host=host, gpu=None
    )
    for name, runners in (("without.svg", []), ("with.svg", [figure(KINDS["draft"]), figure(KINDS["prefill"])])):
        plot.draw(Results([plain], [], "foreach", runners), tmp_path / name)
        drawn = (tmp_path / name).read_text(encoding="utf-8")
        assert "host us, whole step" in drawn
        assert ("each runner" in drawn, "11/16" in drawn, "per_slot" in drawn) == (bool(runners),) * 3


def test_races_are_of_all_runners() -> None:
    """The command's races are those of all kinds, each with two runs over the same batches."""
    found = list(races(choose("cpu"), TINY))
    assert [race.kind.phase for race in found] == list(RUNNERS)
    for race in found:
        by_hand, ours = race.runs()
        assert by_hand.batches is ours.batches is race.batches
        assert by_hand.way is race.by_hand
