"""Packages in a process of their own: a third party's backends, held to the contract, and our plugin of pytest."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slotgraph_pytest
from slotgraph.backends import load, names
from tests.programs import python

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONTRACT = "tests/backends/test_contract.py"

SEEN = """
import sys
import pytest
from slotgraph.backends import choose, load, names
from slotgraph.dataflow.errors import BackendUnavailableError
assert "slotgraph_fake_device" not in sys.modules
assert {"fake-device", "fake-device-single", "fake-device-absent"} < set(names()), names()
assert "slotgraph_fake_device" not in sys.modules, "listing names loads nothing"
kind = type(choose("fake-device"))
assert (kind.__module__, kind.__name__) == ("slotgraph_fake_device", "FakeBackend")
assert choose("auto").name not in {"fake-device", "fake-device-single", "fake-device-absent"}
for wrong, says in (("fake-device-absent", "no fake device: modprobe fake"), ("fake-devise", "'fake-device'")):
    with pytest.raises(BackendUnavailableError, match=says):
        choose(wrong)
print("found")
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an installation of the package consists of."""
    installed, source = tmp_path_factory.mktemp("plugin"), HERE / "fake_device"
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = installed / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    shutil.copy(source / "slotgraph_fake_device.py", installed)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    points = project["entry-points"]["slotgraph.backends"].items()
    lines = ["[slotgraph.backends]", *(f"{name} = {value}" for name, value in points), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return installed


def within(project: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a new Python in a folder, whose modules it finds, and those of this checkout."""
    return python(*words, paths=[project, ROOT / "src"], cwd=project, env={"PYTHONDONTWRITEBYTECODE": "1", **variables})


def beside(package: Path, *arguments: str) -> str:
    """What a new Python prints that finds a package and all that this one finds."""
    paths = [package, ROOT / "src", *sys.path]
    done = python(*arguments, paths=paths, cwd=ROOT, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_found_by_its_entry_points(target: Path) -> None:
    """The package's backends are named, loaded on first use, refused with their reason, and not preferred by auto."""
    assert beside(target, "-c", SEEN) == "found\n"


def test_contract(target: Path) -> None:
    """Both variants pass every test that slotgraph's own backends pass; the one that cannot run here is skipped."""
    chosen = ["-k", "fake-device", "-p", "no:cacheprovider", "-q", "-rs", "--no-header"]
    said = beside(target, "-m", "pytest", CONTRACT, *chosen)
    count = re.search(r"(\d+) passed, 1 skipped", said)  # of a backend that is not here one test is kept, to say why
    assert count is not None, said
    assert int(count[1]) >= 2 * 15
    assert "fake-device-absent: no fake device: modprobe fake" in said


INPUTS = """
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, computed, copied


class Mine(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    places: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0)
    count: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)
"""
SUITE = """
from mine import BATCH, DecodeRunner, Mine, torch


def test_fill(benchmark_fill):
    benchmark_fill(Mine, {BATCH: 64}, rounds=5, steps=10)


def test_ways(benchmark_ways, slotgraph_backend):
    runner = DecodeRunner(Mine, lambda view: view.ids + 1, buckets=[64], backend=slotgraph_backend, progress=False)
    runner.capture()
    dtypes = {"ids": torch.int64, "places": torch.int32, "weights": torch.float32}
    batch = {name: torch.ones(48, dtype=dtype) for name, dtype in dtypes.items()}
    ways = {"fill": runner.fill, "runner": runner}
    benchmark_ways(ways, [batch, {**batch}], "a step", rounds=5, steps=10)
"""
BACKENDS = """
import pytest


def test_each(slotgraph_backend):
    print("ran on", slotgraph_backend.name)


@pytest.mark.slotgraph_backends("cpu-capture", "cpu")
def test_own(slotgraph_backend):
    print("own on", slotgraph_backend.name)


@pytest.mark.slotgraph_backends()
def test_every(slotgraph_backend):
    print("every on", slotgraph_backend.name)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of its own, with a strict pytest."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")
    return tmp_path


def passed(project: Path, *arguments: str, **variables: str) -> str:
    """What a run of pytest prints in which nothing fails."""
    done = within(project, "-m", "pytest", *arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_costs_nothing_where_no_one_asks(project: Path) -> None:
    """Pytest in a folder of others loads the plugin, and by it neither torch nor slotgraph."""
    (project / "test_else.py").write_text("def test_else(): pass\n")
    done = within(project, "-X", "importtime", "-m", "pytest", "--collect-only", "--trace-config")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "slotgraph_pytest.py" in done.stdout
    assert "pytest_benchmark.storage" in loaded
    assert loaded & {"torch", "slotgraph", "numpy"} == set()


OWN = pytest.mark.slotgraph_backends("cuda", "cpu").mark
EVERY = pytest.mark.slotgraph_backends().mark

CHOICES: list[tuple[str | None, str, tuple[str, ...], pytest.Mark | None, list[str]]] = [
    ("cpu, cuda", "npu", ("warp",), None, ["cpu", "cuda"]),
    (None, "npu,cpu", ("warp",), None, ["npu", "cpu"]),
    (None, "", ("warp", "cpu"), None, ["warp", "cpu"]),
    (None, "", ("warp",), OWN, ["cuda", "cpu"]),
    ("npu cpu", "", ("warp",), OWN, ["cpu"]),
    (None, "npu", (), OWN, []),
    (None, "npu", (), EVERY, ["npu"]),
    (None, "", (), EVERY, list(names())),
    (None, "", (), None, [name for name in names() if load(name).is_available()]),
]


def test_which_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the option, else of the variable, else a test's own or the project's, else each that can run here."""
    for option, variable, setting, marker, chosen in CHOICES:
        monkeypatch.setenv("SLOTGRAPH_TEST_BACKENDS", variable)
        config: Any = SimpleNamespace(getoption=lambda _, given=option: given, getini=lambda _, given=setting: given)
        assert slotgraph_pytest._chosen(config, marker) == chosen


def test_backends(project: Path) -> None:
    """A test runs on each; one that is not there is skipped, and said; its marker, where there is one, is put on it."""
    (project / "test_backends.py").write_text(BACKENDS)
    (project / "pytest.ini").write_text("[pytest]\nmarkers =\n    cpu: the host\n    warp: a device\n")
    said = passed(project, "-rs", "-s", "-m", "cpu or warp", SLOTGRAPH_TEST_BACKENDS="cpu,cpu-capture,warp")
    assert "3 passed, 1 skipped, 3 deselected" in said
    assert "ran on cpu\n" in said
    assert "own on cpu\n" in said
    assert "there is no backend 'warp' here, only cpu, cpu-capture" in said


@pytest.mark.slow
def test_fixtures(project: Path) -> None:
    """Each way has a row in pytest-benchmark's table, in one group a test, with its ratio; the figures are saved."""
    (project / "mine.py").write_text(INPUTS)
    (project / "test_mine.py").write_text(SUITE)
    said = passed(project, "--slotgraph-backends=cpu-capture", "--benchmark-autosave", "--benchmark-only")
    assert "2 passed" in said
    assert "benchmark 'cpu-capture: fill of Mine (test_fill[cpu-capture])': 5 tests" in said
    assert "benchmark 'cpu-capture: a step (test_ways[cpu-capture])': 2 tests" in said
    ways = {"per_slot", "regrouped", "direct", "foreach", "fused", "fill", "runner"}
    rows = [line.split("  ")[0] for line in said.splitlines() if line.startswith(tuple(ways))]
    assert {row.partition(",")[0] for row in rows} == ways
    assert all(re.fullmatch(r"\w+(, \d+\.\d\d of the first)?", row) for row in rows), rows
    assert said.count(" (1.0) ") >= 2
    (file,) = (project / ".benchmarks").rglob("0001_*.json")
    saved = json.loads(file.read_text())["benchmarks"]
    assert len({one["fullname"] for one in saved}) == len(saved) == 7
    for one in saved:
        told = one["extra_info"]["slotgraph"]
        assert one["stats"]["rounds"] == 50
        assert one["stats"]["median"] * 1e6 == pytest.approx(told["microseconds"][told["way"]]["median"])
    assert {way for one in saved for way in one["extra_info"]["slotgraph"]["ratios"]} >= {"foreach", "runner"}
    assert "2 passed" in passed(project, "--slotgraph-backends=cpu-capture", "--benchmark-compare")


@pytest.mark.slow
def test_fixtures_where_nothing_is_measured(project: Path) -> None:
    """Disabled, each way runs and no ratio is checked; skipped, nothing runs."""
    (project / "mine.py").write_text(INPUTS)
    (project / "test_mine.py").write_text(SUITE.replace("rounds=5", "most=0.001, rounds=5"))
    assert "2 passed" in passed(project, "--slotgraph-backends=cpu", "--benchmark-disable")
    assert "2 skipped" in passed(project, "--slotgraph-backends=cpu", "--benchmark-skip")


FAILING = """
import torch
from mine import BATCH, Inputs, Mine, copied, counted
from slotgraph import computed
from slotgraph.testing import assert_fill_equals_oracle

class Wrong(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    count: torch.Tensor = computed(lambda step: next(counted), shape=1, dtype=torch.int32)

def test_limit(benchmark_fill):
    benchmark_fill(Mine, {BATCH: 64}, most=0.001, rounds=2, steps=5)  # the user's

def test_bytes(benchmark_fill):
    benchmark_fill(Wrong, {BATCH: 64})  # the user's

def test_ways(benchmark_ways):
    benchmark_ways({"one": print}, [1], "a step")  # the user's

def test_oracle():
    assert_fill_equals_oracle(Wrong, backend="cpu", max_examples=3)  # the user's
"""


@pytest.mark.slow
def test_a_failure_shows_the_users_line(project: Path) -> None:
    """Tracebacks end at the test's own line, with the message below it; no frame of the library is shown."""
    (project / "mine.py").write_text("import itertools\ncounted = itertools.count()\n" + INPUTS)
    (project / "test_failing.py").write_text(FAILING)
    done = within(project, "-m", "pytest", "--slotgraph-backends=cpu", "--benchmark-warmup=off")
    said = re.split(r"\n_+ (test_\w+).*? _+\n", done.stdout.partition("short test summary")[0])
    shown = dict(zip(said[1::2], said[2::2], strict=True))
    errors = {
        "test_limit": "RegressionError: cpu",
        "test_bytes": "WrongBytesError: Wrong filled by",
        "test_ways": "ConfigError: ways: ",
    }
    for name, error in {**errors, "test_oracle": "WrongBytesError: Wrong filled by"}.items():
        assert re.search(r">       (benchmark|assert)_.*# the user's", shown[name]), shown[name]
        assert error in shown[name]
        assert "runners/testing" not in shown[name], shown[name]


@pytest.mark.slow
def test_without_pytest_benchmark(project: Path) -> None:
    """The fixtures say what to install."""
    (project / "mine.py").write_text(INPUTS)
    (project / "test_mine.py").write_text(SUITE)
    done = within(project, "-m", "pytest", "-p", "no:benchmark", "--slotgraph-backends=cpu")
    assert done.returncode == 1
    for name in ("benchmark_fill", "benchmark_ways"):
        assert f"{name} needs pytest-benchmark, which is not there: pip install 'slotgraph[testing]'" in done.stdout


@pytest.mark.slow
def test_without_hypothesis(project: Path) -> None:
    """So does slotgraph.testing; the face of slotgraph needs nothing of it."""
    hidden = "import sys; sys.modules['hypothesis'] = None; import slotgraph; import slotgraph.testing"
    said = within(project, "-c", hidden).stderr
    assert "ModuleNotFoundError: slotgraph.testing needs hypothesis, which is not installed: pip install" in said
