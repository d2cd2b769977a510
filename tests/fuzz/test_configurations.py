"""Configuration out of anything: a runner's configuration, or ConfigError that names what is wrong; nothing else."""

import json
import pathlib
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import RunnerConfig
from slotgraph.dataflow.errors import ConfigError
from slotgraph.runners.config import MOST
from tests.fuzz.hostile import DEEP, NASTY_TEXTS, leaves, values

KEYS = [field.name for field in attrs.fields(RunnerConfig)]
numbers = st.integers(-2, 600) | st.sampled_from([0.5, 1, True, 1 << 40, 10**300, float("nan"), float("inf")])
keys = st.sampled_from(KEYS) | st.sampled_from(KEYS).map(str.upper) | st.text(max_size=6)


def check(options: Any) -> None:
    """A configuration that is as good as any, or ConfigError with a message that names a key or a type."""
    try:
        config = RunnerConfig.of(options)
    except ConfigError as error:
        assert str(error).strip()  # noqa: PT017 - what is raised is allowed, not asked for
        return
    assert RunnerConfig.of(config.as_data()) == config
    assert config.ladder().largest <= MOST


def load(file: pathlib.Path) -> None:
    """A configuration, or ConfigError with a message that names the file or a key."""
    try:
        RunnerConfig.load(file)
    except ConfigError as error:
        assert str(error).strip()  # noqa: PT017 - as above


@settings(max_examples=4 * settings().max_examples)
@given(st.dictionaries(keys, values | numbers | st.lists(numbers, max_size=4), max_size=4))
def test_any_keys_and_values(options: dict[str, Any]) -> None:
    """Random keys, those of the configuration among them, with random values."""
    check(options)


@given(st.dictionaries(leaves, values, max_size=2))
def test_keys_that_are_no_text(options: dict[Any, Any]) -> None:
    """Keys that only Python has."""
    check(options)


@settings(max_examples=2 * settings().max_examples)
@given(text=st.text() | st.binary(), suffix=st.sampled_from([".toml", ".json"]))
def test_any_file(tmp_path_factory: pytest.TempPathFactory, text: str | bytes, suffix: str) -> None:
    """Random bytes in a file."""
    file = tmp_path_factory.getbasetemp() / f"any{suffix}"
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    load(file)


@pytest.mark.parametrize("text", NASTY_TEXTS, ids=range(len(NASTY_TEXTS)))
def test_nasty_texts(tmp_path: pathlib.Path, text: str) -> None:
    """Text that has broken readers before."""
    for suffix in (".toml", ".json"):
        (tmp_path / f"x{suffix}").write_bytes(text.encode("utf-8", "surrogatepass"))
        load(tmp_path / f"x{suffix}")


@given(options=st.dictionaries(st.sampled_from(KEYS), values, max_size=3))
def test_any_json(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
    """JSON files with known keys and random values."""
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_text(json.dumps(options), encoding="utf-8")
    load(file)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.toml", "buckets = " + "[" * DEEP, "nested too deeply"),
        ("x.json", '{"buckets": ' + "[" * DEEP, "nested too deeply"),
        ("x.json", '{"width": ' + "9" * 5000 + "}", "x.json: "),
        ("x.toml", "max_batch = 999999999999", "'max_batch': expected between 1 and 16777216"),
        ("x.json", '{"buckets": [1, 99999999999]}', "'buckets': expected between 1 and 16777216"),
        ("x.toml", "max_waste = nan", "'max_waste': expected between 0 and 1, got nan"),
        ("x.json", '{"max_waste": Infinity}', "x.json: Infinity is no number in JSON"),
        ("x.json", '{"backend": "../../x"', "x.json: "),
        ("x.toml", "\x00", "x.toml: "),
    ],
    ids=lambda value: value[:20],
)
def test_nasty_files(tmp_path: pathlib.Path, name: str, text: str, says: str) -> None:
    """Files that have broken readers before: each is refused with what is wrong."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        RunnerConfig.load(tmp_path / name)


def test_file_that_is_a_folder(tmp_path: pathlib.Path) -> None:
    """What cannot be read at all says so, too."""
    (tmp_path / "folder.toml").mkdir()
    for name in ("folder.toml", "nowhere.json"):
        with pytest.raises(ConfigError, match=name):
            RunnerConfig.load(tmp_path / name)
