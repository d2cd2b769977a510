"""What comes from outside of a program: environment variables, paths and labels, each refused by its name."""

import pathlib
from typing import Any

import pytest
import torch

from slotgraph import BATCH, EagerRunner, Inputs, copied
from slotgraph.config import RunnerConfig
from slotgraph.dataflow import environment
from slotgraph.errors import ConfigError, RecordingError
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
        with pytest.raises(ConfigError, match="what label 'two' names: expected a runner, got"):
            collector.add("two", thing)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected a runner"):
            exposition(two=thing)  # type: ignore[arg-type]
    assert {sample.labels["runner"] for metric in collector.collect() for sample in metric.samples} == {"one"}
