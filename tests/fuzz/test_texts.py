"""Plans and configurations out of anything: what was written, or ConfigError that names what is wrong; nothing else."""

import copy
import json
import pathlib
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slotgraph.config import RunnerConfig
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.plan import FillPlan
from slotgraph.runners.engine.config import MOST_ROWS, json_data
from slotgraph.runners.serial import from_data, to_data
from tests.fuzz.hostile import DEEP, NASTY_TEXTS, leaves, spoilt, values
from tests.runners.test_serial import PLAN


def read(text: str) -> FillPlan:
    """The plan of a JSON text."""
    try:
        data = json_data(text)
    except ValueError as error:
        raise ConfigError(f"no FillPlan: {error}") from error
    return from_data(data, FillPlan)


def check(text: str) -> None:
    """A plan that can be written again, or ConfigError with a message."""
    try:
        plan = read(text)
    except ConfigError as error:
        assert str(error).startswith("no FillPlan: ")
        return
    assert json.dumps(to_data(plan), allow_nan=False)
    assert str(plan)


@settings(max_examples=2 * settings().max_examples)
@given(st.data())
def test_spoilt_plans(data: st.DataObject) -> None:
    """A plan of which some places hold something else."""
    check(json.dumps(data.draw(spoilt(copy.deepcopy(to_data(PLAN))))))


def test_nasty_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no dtype is refused, even if torch has it, and torch is not asked to load a module of that name."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    nasty: list[Any] = ["surprise", {"a": []}, [[]], "_dynamo", "Tensor", "has_mps", "", "\ud800", None, 10**400]
    for value in nasty:
        data: Any = to_data(PLAN)
        data["copies"][0]["dst_dtype"] = value
        with pytest.raises(ConfigError, match=r"dtype|expected str"):
            from_data(data, FillPlan)
    assert asked == []


@given(text=st.text() | values.map(repr), data=st.data())
def test_any_text(text: str, data: st.DataObject) -> None:
    """Random text, and a plan's text with a letter changed, or cut off."""
    check(text)
    right = json.dumps(to_data(PLAN))
    place = data.draw(st.integers(0, len(right) - 1))
    check(right[:place] + data.draw(st.characters()) + right[place + 1 :])
    check(right[:place])


def test_nasty_texts(tmp_path: pathlib.Path) -> None:
    """Text that has broken readers before is refused, as a plan and in files."""
    for text in NASTY_TEXTS:
        with pytest.raises(ConfigError, match="no FillPlan: "):
            read(text)
        for suffix in (".toml", ".json"):
            (tmp_path / f"x{suffix}").write_bytes(text.encode("utf-8", "surrogatepass"))
            load(tmp_path / f"x{suffix}")


def load(file: pathlib.Path) -> None:
    """A configuration, or ConfigError with a message that names the file or a key."""
    try:
        RunnerConfig.load(file)
    except ConfigError as error:
        assert str(error).strip()


KEYS = st.sampled_from([field.name for field in attrs.fields(RunnerConfig)])
numbers = st.integers(-2, 600) | st.sampled_from([0.5, 1, True, 1 << 40, 10**300, float("nan"), float("inf")])
keys = KEYS | KEYS.map(str.upper) | st.text(max_size=6)


@settings(max_examples=2 * settings().max_examples)
@example(options={"debug": []})  # none, whatever the environment says
@given(st.dictionaries(keys | leaves, values | numbers | st.lists(numbers, max_size=4), max_size=4))
def test_any_keys_and_values(options: dict[Any, Any]) -> None:
    """Random keys and values: a valid configuration, or ConfigError that names the fault."""
    try:
        config = RunnerConfig.of(options)
    except ConfigError as error:
        assert str(error).strip()
        return
    assert RunnerConfig.of(config.as_data()) == config
    assert config.ladder().largest <= MOST_ROWS


@settings(max_examples=2 * settings().max_examples)
@given(text=st.text() | st.binary(), suffix=st.sampled_from([".toml", ".json"]))
def test_any_file(tmp_path_factory: pytest.TempPathFactory, text: str | bytes, suffix: str) -> None:
    """Random bytes in a file."""
    file = tmp_path_factory.getbasetemp() / f"any{suffix}"
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    load(file)


NASTY_FILES = [
    ("x.toml", "buckets = " + "[" * DEEP, "nested too deeply|recursion depth"),
    ("x.json", '{"buckets": ' + "[" * DEEP, "nested too deeply|recursion depth"),
    ("x.json", '{"width": ' + "9" * 5000 + "}", "x.json: "),
    ("x.toml", "max_batch = 999999999999", "'max_batch': expected int between 1 and 16777216"),
    ("x.json", '{"buckets": [1, 99999999999]}', "'buckets': expected a list .* int between 1 and 16777216"),
    ("x.toml", "max_waste = nan", "'max_waste': expected float between 0 and 1, got nan"),
    ("x.json", '{"max_waste": Infinity}', "x.json: Infinity is not a number in JSON"),
    ("x.json", '{"backend": "../../x"', "x.json: "),
    ("x.toml", "\x00", "x.toml: "),
    *(("x.yaml", "width: 2", "a .toml or .json file"), ("x.toml", "width = = 2", "x.toml: ")),
    *(("x.json", "{", "x.json: "), ("x.json", '{"widht": 2}', "did you mean 'width'")),
    ("x.json", "[1]", r"expected keys and values, got \[1\]"),
]


def test_nasty_files(tmp_path: pathlib.Path) -> None:
    """Files that do not parse, hold something else, broke readers before, or cannot be read: refused, with why."""
    for name, text, says in NASTY_FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=says):
            RunnerConfig.load(tmp_path / name)
    (tmp_path / "folder.toml").mkdir()
    for name in ("folder.toml", "nowhere.json"):
        with pytest.raises(ConfigError, match=name):
            RunnerConfig.load(tmp_path / name)
