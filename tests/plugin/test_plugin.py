"""A third party's package, installed beside slotgraph, is found by its entry points and held to the same contract."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONTRACT = "tests/backends/test_contract.py"

SEEN = """
import sys
import slotgraph
from slotgraph.backends import choose, load, names
from slotgraph.dataflow.errors import BackendUnavailableError
assert "slotgraph_fake_device" not in sys.modules
assert {"fake-device", "fake-device-single", "fake-device-absent"} < set(names()), names()
assert "slotgraph_fake_device" not in sys.modules, "listing names loads nothing"
kind = type(choose("fake-device"))
assert (kind.__module__, kind.__name__) == ("slotgraph_fake_device", "FakeBackend")
assert choose("auto").name not in {"fake-device", "fake-device-single", "fake-device-absent"}
for wrong, says in (("fake-device-absent", "no fake device: modprobe fake"), ("fake-devise", "'fake-device'")):
    try:
        choose(wrong)
    except BackendUnavailableError as error:
        assert says in str(error), error
    else:
        raise AssertionError(wrong)
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


def run(arguments: list[str], paths: list[Path]) -> str:
    """What a new interpreter prints that finds `paths` and all that this one finds."""
    found = [*map(str, paths), str(ROOT / "src"), *filter(None, sys.path)]
    done = subprocess.run(  # noqa: S603 - this interpreter, with this test's arguments
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_found_by_its_entry_points(target: Path) -> None:
    """The package's backends are named, loaded on first use, refused with their reason, and not preferred by auto."""
    assert run(["-c", SEEN], [target]) == "found\n"


def test_contract(target: Path) -> None:
    """Both variants pass every test that slotgraph's own backends pass; the one that cannot run here is skipped."""
    chosen = ["-k", "fake-device", "-p", "no:cacheprovider", "-q", "-rs", "--no-header"]
    lines = run(["-m", "pytest", CONTRACT, *chosen], [target]).splitlines()
    passed, skipped = counts(lines[-1])
    assert passed >= 2 * 15
    assert skipped == 1  # of a backend that is not here one test is kept, to say why
    assert any("fake-device-absent: no fake device: modprobe fake" in line for line in lines)


def counts(summary: str) -> tuple[int, int]:
    """Tests that passed and that were skipped, from pytest's last line."""
    words = summary.replace(",", "").split()
    return int(words[words.index("passed") - 1]), int(words[words.index("skipped") - 1])
