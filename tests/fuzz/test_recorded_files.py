"""Recorded files out of anything: what was recorded, or RecordingError that names what is wrong; nothing else."""

import functools
import json
import os
import pathlib
import pickle
import re
import struct
import tempfile
import types
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import typer.testing
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import EagerRunner
from slotgraph.dataflow.errors import RecordingError, SlotGraphError
from slotgraph.runners.recording.records import RecordedFile
from slotgraph.runners.recording.replaying import batch_of, replay_file
from slotgraph_cli import app
from tests.fuzz.hostile import NASTY_TEXTS, spoilt
from tests.runners.recording.steps import Mixed, Scored, mixed_batch, mixed_side

LENGTH = struct.Struct("<Q")
MANY = 2 * settings().max_examples  # of a profile: 100, or 2,000 where one is thorough


def eager() -> EagerRunner[Mixed]:
    """A runner that the file is of."""
    return EagerRunner(Mixed, Scored(), backend="cpu")


@functools.cache
def recorded() -> bytes:
    """A file of two steps with every kind of value."""
    with tempfile.TemporaryDirectory() as folder:
        runner = eager()
        with slotgraph.record(runner, pathlib.Path(folder, "x.safetensors"), outputs=True) as recording:
            for rows in (2, 1):
                runner(mixed_batch(rows, rows), **mixed_side(rows, rows))
        return recording.path.read_bytes()


def taken_apart() -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The file's own header without its metadata, the steps in it, and the elements."""
    (length,) = LENGTH.unpack(recorded()[:8])
    header = json.loads(recorded()[8 : 8 + length])
    steps = json.loads(header.pop("__metadata__")["slotgraph"])
    return header, steps, recorded()[8 + length :]


def put_together(header: dict[str, Any], steps: Any, elements: bytes) -> bytes:
    """A file of these."""
    text = steps if isinstance(steps, str) else json.dumps(steps)
    data = json.dumps({**header, "__metadata__": {"slotgraph": text}}).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data + elements


@pytest.fixture(autouse=True)
def _no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would run code of a file fails."""

    def never(*_: Any, **__: Any) -> NoReturn:
        pytest.fail("something of a file is run")

    for holder, name in ((pickle, "loads"), (pickle, "load"), (torch, "load"), (os, "system")):
        monkeypatch.setattr(holder, name, never)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where each example's file is written."""
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


def check(file: pathlib.Path, content: bytes) -> bool:
    """Whether a file can be read; where it cannot, it is refused with its name, and where it can, it can be run."""
    file.write_bytes(content)
    try:
        read = RecordedFile.read(file)
    except RecordingError as error:
        assert str(error).startswith(f"{file.name}: ")
        assert len(str(error)) < 5000
        return False
    try:
        replay_file(read, eager())
    except SlotGraphError as error:
        assert str(error).strip()
    return True


def refused(file: pathlib.Path, content: bytes) -> str:
    """Why a file cannot be read, or the batches of its steps not be made again."""
    file.write_bytes(content)
    try:
        for step in RecordedFile.read(file).steps:
            batch_of(step, eager().stage)
    except RecordingError as error:
        return str(error)
    pytest.fail("it was read")


@settings(max_examples=MANY)
@given(st.data())
def test_corrupted(file: pathlib.Path, data: st.DataObject) -> None:
    """Cut off anywhere, or with something behind it; or one byte anywhere is another, in the length and header too."""
    content = bytearray(recorded())
    assert not check(file, bytes(content)[: data.draw(st.integers(0, len(content) - 1))])
    assert not check(file, bytes(content) + data.draw(st.binary(min_size=1)))
    (length,) = LENGTH.unpack(content[:8])
    place = data.draw(st.one_of(st.integers(0, 7), st.integers(8, 7 + length), st.integers(0, len(content) - 1)))
    content[place] = data.draw(st.integers(0, 255))
    check(file, bytes(content))


@settings(max_examples=2 * MANY)
@given(st.data())
def test_spoilt(file: pathlib.Path, data: st.DataObject) -> None:
    """Steps, or a header, of which some places hold something else: other names, offsets, dtypes and shapes."""
    header, steps, elements = taken_apart()
    if data.draw(st.booleans()):
        check(file, put_together(header, data.draw(spoilt(steps)), elements))
    else:
        found = data.draw(spoilt(header))
        check(file, put_together(found if isinstance(found, dict) else {"x": found}, steps, elements))


@settings(max_examples=MANY // 4)
@given(st.data())
def test_commands(file: pathlib.Path, data: st.DataObject) -> None:
    """The command shows a spoilt file, or says what is wrong with it, and commands no terminal."""
    header, steps, elements = taken_apart()
    check(file, put_together(header, data.draw(spoilt(steps)), elements))
    for form in ("table", "json"):
        done = typer.testing.CliRunner().invoke(app, ["replay", str(file), "--format", form])
        assert done.exit_code in (0, 2), done.exception
        assert done.stdout or done.stderr
        assert "\x1b" not in done.stdout + done.stderr


def test_texts_of_a_file_command_no_terminal(file: pathlib.Path) -> None:
    """Escapes, half letters and the like in names, reasons and errors are shown as text."""
    header, steps, elements = taken_apart()
    evil = "\x1b[2J\x07\ud800"
    raised = {"kind": evil, "message": evil, "traceback": evil}
    steps["steps"][1].update(notes=[evil], raised=raised)
    steps["steps"][1]["decision"].update(reason=evil)
    steps["notes"], steps["runner"]["facts"]["inputs"] = [evil], evil
    file.write_bytes(put_together(header, steps, elements))
    for options in ([], ["--step", "1"]):
        done = typer.testing.CliRunner().invoke(app, ["replay", str(file), *options])
        assert done.exit_code == 0, done.output
        assert "\\x1b[2J\\x07\\ud800" in done.stdout
        assert not {"\x1b", "\x07"} & set(done.stdout)
    file.write_bytes(put_together(header, json.dumps({**steps, evil: 1}), elements))
    done = typer.testing.CliRunner().invoke(app, ["replay", str(file)])
    assert done.exit_code == 2
    assert not {"\x1b", "\x07"} & set(done.output)


def changed(change: Callable[[Any], object]) -> bytes:
    """The file with its header (h), or its steps (s), changed."""
    header, steps, elements = taken_apart()
    change(types.SimpleNamespace(h=header, s=steps))
    return put_together(header, steps, elements)


def first(steps: dict[str, Any], part: str = "slots") -> dict[str, Any]:
    """The first value of the first step."""
    found: dict[str, Any] = steps["steps"][0][part][0]
    return found


NASTY: list[tuple[Callable[[Any], object], str]] = [
    (lambda f: f.s.update(format=1), "format 1, and this version reads 5"),
    (lambda f: f.s.pop("runner"), "'runner' is missing"),
    (lambda f: f.s.update(extra=1), "unknown key 'extra'"),
    (lambda f: f.s.update(steps={"0": {}}), "expected a list"),
    (lambda f: f.s["steps"].append(f.s["steps"][0]), "two of its steps, or two values of a step"),
    (lambda f: f.s["steps"][0].update(number=1 << 80), "do not both have '0.outputs.outputs'"),
    (lambda f: f.s["steps"].pop(), "do not both have '1.outputs.outputs'"),
    (lambda f: first(f.s).update(name="\ud800"), "do not both have '0.slots.ids'"),
    (lambda f: first(f.s).update(dtype="float32"), r"holds torch.int64 \[2\], and its header says float32 \[2\]"),
    (lambda f: first(f.s).update(dtype="complex64"), "its header says complex64"),
    (lambda f: first(f.s).update(kind="array", dtype="bfloat16"), "(?i)bfloat16"),
    (lambda f: first(f.s).update(kind="pickle"), "pickle"),
    (lambda f: first(f.s).update(shape=[1 << 62, 1 << 62]), r"its header says int64 \[4611686018427387904, "),
    (lambda f: first(f.s).update(shape=[10**2000]), "its header says int64"),
    (lambda f: first(f.s).update(shape=[-2]), "its header says int64"),
    (lambda f: first(f.s, "fields").update(data="[" * 99999), "plain data is nested too deeply"),
    (lambda f: f.s["runner"].update(facts={"a": [[1]]}), "expected str"),
    (lambda f: f.h.pop("0.slots.ids"), "not a recording that can be read"),
    (lambda f: f.h["0.slots.ids"].update(shape=[1 << 60]), "not a recording that can be read"),
    (lambda f: f.h["0.slots.ids"].update(dtype="F4"), "not a recording that can be read"),
    (lambda f: f.h.update({"../../x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}), "both have '../../x'"),
]


def test_nasty_steps(file: pathlib.Path) -> None:
    """What has broken readers of such files before: each is refused, and says what is wrong, in letters that print."""
    for change, says in NASTY:
        told = refused(file, changed(change))
        assert re.search(says, told)
        assert told.isprintable()


def test_nasty_files(file: pathlib.Path) -> None:
    """What is no such file at all, a pickle among it, and text that has broken readers where the steps should be."""
    pickled = b"\x80\x04\x95" + pickle.dumps({"a": 1})
    for content in (b"", b"1234567", LENGTH.pack(1 << 63) + b"{}", LENGTH.pack(3) + b"{}", LENGTH.pack(0), pickled):
        assert "not a recording that can be read" in refused(file, content)
    assert "no steps of slotgraph" in refused(file, LENGTH.pack(2) + b"{}")
    header, _, elements = taken_apart()
    for text in NASTY_TEXTS:
        assert not check(file, put_together(header, text, elements))


def test_values_that_a_step_cannot_bear(file: pathlib.Path) -> None:
    """Elements that a step cannot bear are an error of the step, not of the replay: rows that no table has."""
    header, steps, elements = taken_apart()
    start, stop = header["0.slots.ids"]["data_offsets"]
    content = elements[:start] + b"\x7f" * (stop - start) + elements[stop:]
    file.write_bytes(put_together(header, steps, content))
    done = replay_file(RecordedFile.read(file), eager()).steps
    assert [step.outcome for step in done] == ["raised", "equal"]
    assert "IndexError" in done[0].lines[0]
