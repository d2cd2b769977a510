"""Configuration: from Python, TOML and JSON, each key and type checked, and read back as it was written."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import DecodeRunner, EagerRunner
from slotgraph.backends import choose
from slotgraph.config import RunnerConfig
from slotgraph.dataflow.errors import ConfigError
from tests.runners.models import PlainInputs, plain_step

configs = st.builds(
    RunnerConfig,
    backend=st.sampled_from(["auto", "cpu", "cpu-capture", "third-party"]),
    buckets=st.none() | st.lists(st.integers(1, 512), min_size=1, max_size=5, unique=True),
    max_batch=st.integers(1, 512),
    max_waste=st.floats(0, 1),
    width=st.integers(1, 8),
    warmups=st.integers(0, 5),
    progress=st.booleans(),
    debug=st.none() | st.booleans() | st.sampled_from(["poison", "parity,streams", "", "addresses, generations"]),
    no_copy=st.none() | st.booleans(),
    sharing=st.booleans(),
    lowering=st.sampled_from(["auto", "in_graph", "fused", "foreach", "slot_by_slot"]),
    lazy=st.booleans(),
    error_mode=st.none() | st.sampled_from(["global", "thread_local", "relaxed"]),
)


def toml_of(data: dict[str, Any]) -> str:
    """Plain values as TOML, whose numbers, lists and strings are written as JSON's."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in data.items())


@pytest.mark.parametrize(("suffix", "write"), [(".json", json.dumps), (".toml", toml_of)])
@given(config=configs)
def test_file_round_trip(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, write: Any, config: RunnerConfig
) -> None:
    """What a configuration gives as plain data, written to a file, is read back as the same configuration."""
    file = tmp_path_factory.getbasetemp() / f"round_trip{suffix}"
    file.write_text(write(config.as_data()), encoding="utf-8")
    assert RunnerConfig.load(file) == RunnerConfig.load(str(file)) == config


def test_every_fault_at_once() -> None:
    """Two wrong values arrive in one message."""
    with pytest.raises(ConfigError, match=r"(?s)width.*debug"):
        RunnerConfig.of({"width": "2", "debug": 1})


def test_files_give_what_they_name(tmp_path: Path) -> None:
    """What a file leaves out is no keyword, so that each runner takes it; what it names is one, default or not."""
    file = tmp_path / "runner.toml"
    file.write_text("width = 1\nlazy = true\n", encoding="utf-8")
    assert RunnerConfig.load(file).as_data() == {"width": 1, "lazy": True}
    DecodeRunner(PlainInputs, plain_step, **RunnerConfig.load(file).as_data())
    with pytest.raises(ConfigError, match="EagerRunner does not use option 'width': leave it out"):
        EagerRunner(PlainInputs, plain_step, **RunnerConfig.load(file).as_data())
    EagerRunner(PlainInputs, plain_step, **RunnerConfig(backend="cpu").as_data())


def test_lowering_of_a_configuration(cpu: str) -> None:
    """A runner takes the backend's preferred lowering, or the one that is named."""
    has = choose(cpu).capabilities.lowerings
    assert DecodeRunner(PlainInputs, plain_step, backend=cpu).lowering == has[0]
    assert [DecodeRunner(PlainInputs, plain_step, backend=cpu, lowering=one).lowering for one in has] == [*has]


def test_bad_files(tmp_path: Path) -> None:
    """A file that does not parse, holds something else or has an unknown key is refused; the rest is default."""
    wrong = [
        *(("runner.yaml", "width: 2", "a .toml or .json file"), ("runner.toml", "width = = 2", "runner.toml: ")),
        *(("runner.json", "{", "runner.json: "), ("runner.json", "[1]", r"expected keys and values, got \[1\]")),
        ("runner.json", '{"widht": 2}', "did you mean 'width'"),
    ]
    for name, text, says in wrong:
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=says):
            RunnerConfig.load(tmp_path / name)
    (tmp_path / "good.toml").write_text('backend = "cpu"\nbuckets = [1, 2, 4]\nmax_waste = 1\n', encoding="utf-8")
    assert RunnerConfig.load(tmp_path / "good.toml") == RunnerConfig(backend="cpu", buckets=(1, 2, 4), max_waste=1)
