"""What comes from outside of a program: environment variables, paths and labels, each refused by its name."""

import pathlib
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from slotgraph import BATCH, DecodeRunner, EagerRunner, InputBuffers, Inputs, copied
from slotgraph.backends import choose
from slotgraph.config import RunnerConfig
from slotgraph.dataflow import environment
from slotgraph.errors import BackendUnavailableError, ConfigError, RecordingError
from slotgraph.runners.engine.config import CHEAP, modes_of
from slotgraph.runners.metrics import Collector, exposition
from slotgraph.runners.recording.records import RecordedFile

ON = ["1", "true", "yes", "on", "True", "YES", "oN", " 1 "]
OFF = ["0", "false", "no", "off", "False", "NO", "oFF", "", "  "]


class Ids(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def hands_through(**options: Any) -> bool:
    """Whether a step sees the batch's own tensor."""
    ids = torch.tensor([1])
    runner: Any = EagerRunner(Ids, lambda view: view.ids, backend="cpu", **options)
    return runner({"ids": ids}) is ids


@pytest.mark.parametrize("text", [*ON, *OFF], ids=repr)
def test_switches_take_plain_words(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable that is on or off takes the same words, in whatever case; an argument wins."""
    is_on = text in ON
    monkeypatch.setenv(environment.NO_COPY, text)
    assert hands_through() == is_on
    assert hands_through(no_copy=not is_on) != is_on
    monkeypatch.setenv(environment.DEBUG, text)
    assert modes_of(None) == (CHEAP if is_on else frozenset())


@pytest.mark.parametrize("text", ["2", "ja", "tru", "none", "1,0", "-1"])
def test_other_words_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other word is refused by the variable's name, with the words that there are."""
    monkeypatch.setenv(environment.NO_COPY, text)
    with pytest.raises(ConfigError, match=f"SLOTGRAPH_EAGER_NO_COPY='{text}': use 1, true, yes or on, or 0, false"):
        EagerRunner(Ids, lambda view: view.ids, backend="cpu")
    assert not hands_through(no_copy=False)
    monkeypatch.setenv(environment.DEBUG, text)
    with pytest.raises(ConfigError, match="SLOTGRAPH_DEBUG: unknown debug mode"):
        modes_of(None)


def test_what_auto_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the backend and the lowering of what leaves them open; an option or argument wins."""
    monkeypatch.setenv(environment.BACKEND, " cpu-capture ")
    monkeypatch.setenv(environment.LOWERING, "slot_by_slot")
    chosen, own = RunnerConfig(), RunnerConfig(backend="cpu", lowering="foreach")
    open_ways: list[dict[str, Any]] = [{}, {"backend": "auto", "lowering": "auto"}, {"config": chosen}]
    for given in [*open_ways, {"config": own, "backend": "auto", "lowering": "auto"}]:
        runner: Any = DecodeRunner(Ids, lambda view: view.ids, buckets=[2], **given)
        assert (runner.stage.backend.name, runner.lowering) == ("cpu-capture", "slot_by_slot")
    assert choose("auto").name == EagerRunner(Ids, lambda view: view.ids).stage.backend.name == "cpu-capture"
    assert InputBuffers(Ids, {BATCH: 2}).lowering == "slot_by_slot"
    ways: list[dict[str, Any]] = [{"backend": "cpu", "lowering": "foreach"}, {"config": own}]
    for given in ways:
        runner = DecodeRunner(Ids, lambda view: view.ids, buckets=[2], **given)
        assert (runner.stage.backend.name, runner.lowering) == ("cpu", "foreach")
    for unset in ("", "  ", "auto"):
        monkeypatch.setenv(environment.LOWERING, unset)
        assert InputBuffers(Ids, {BATCH: 2}).lowering == choose("cpu-capture").capabilities.lowerings[0] != "foreach"


def test_what_auto_cannot_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend or lowering that there is not is refused by the variable's name, with the nearest one."""
    monkeypatch.setenv(environment.LOWERING, "foreac")
    with pytest.raises(ConfigError, match=r"SLOTGRAPH_LOWERING 'foreac': this backend has .*did you mean 'foreach'"):
        DecodeRunner(Ids, lambda view: view.ids, backend="cpu")
    for text in ("cpu-captur", "nonsense"):
        monkeypatch.setenv(environment.BACKEND, text)
        with pytest.raises(BackendUnavailableError, match=f"SLOTGRAPH_BACKEND: there is no backend '{text}'"):
            EagerRunner(Ids, lambda view: view.ids)


def test_unknown_variables_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first runner of a process names them, each with the nearest known one; known ones are not told."""
    for variable in environment.VARIABLES:
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv("SLOTGRAPH_DEBGU", "1")
    monkeypatch.setenv("SLOTGRAPH_QQ", "1")
    environment.warn_of_unknown.cache_clear()
    with capture_logs() as events:
        for _ in range(2):
            EagerRunner(Ids, lambda view: view.ids, backend="cpu")
    told = [(one["event"], one["log_level"], one["variable"], one["reason"]) for one in events]
    known = f"there are {', '.join(environment.VARIABLES)}"
    assert told == [
        ("unknown_variable", "warning", "SLOTGRAPH_DEBGU", f"{known}; did you mean 'DEBUG'?"),
        ("unknown_variable", "warning", "SLOTGRAPH_QQ", known),
    ]


@pytest.mark.parametrize("wrong", [None, 5, True, b"runner.toml", ["runner.toml"], {}])
def test_paths(wrong: Any) -> None:
    """What is no path is refused as one."""
    with pytest.raises(ConfigError, match=r"path: expected the path of a \.toml or \.json file, got"):
        RunnerConfig.load(wrong)
    with pytest.raises(RecordingError, match="expected the path of a recording, got"):
        RecordedFile.read(wrong)


def test_configurations_that_are_none(tmp_path: pathlib.Path) -> None:
    """A configuration is a mapping of options."""
    for wrong in (None, 5, "backend", ["backend"]):
        with pytest.raises(ConfigError, match="options: expected a mapping of options, got"):
            RunnerConfig.of(wrong)  # type: ignore[arg-type]
    (tmp_path / "runner.toml").write_text("width = 3\n", encoding="utf-8")
    assert RunnerConfig.load(tmp_path / "runner.toml").width == 3


def test_labels_and_runners_of_metrics() -> None:
    """A collector takes a text and a runner, and is as before when it refuses another thing."""
    pytest.importorskip("prometheus_client")
    runner = EagerRunner(Ids, lambda view: view.ids, backend="cpu")
    collector = Collector(one=runner)
    for label in (5, None, b"two", ("two",)):
        with pytest.raises(ConfigError, match="label: expected a text, got"):
            collector.add(label, runner)  # type: ignore[arg-type]
    for thing in (5, None, "runner", EagerRunner, Ids(ids=torch.tensor([1]))):
        with pytest.raises(ConfigError, match="what label 'two' names: expected a runner, or of a ModeRunner one of"):
            collector.add("two", thing)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected a runner"):
            exposition(two=thing)  # type: ignore[arg-type]
    assert {sample.labels["runner"] for metric in collector.collect() for sample in metric.samples} == {"one"}
