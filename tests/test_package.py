"""What is released: the sdist and the wheel hold what they should, and a fresh environment runs the quick start."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FOLDERS = ("dataflow", "backends", "runners")
MADE = shutil.ignore_patterns(".*", "_build", "build", "dist", "htmlcov", "__pycache__", "*.egg-info")
"""What git does not keep either: built, cached, installed."""


def run(*words: Path | str, cwd: Path) -> str:
    """Run a command in a folder, as for a user without variables of ours: what it printed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYT", "SLOTGRAPH_", "PIP_"))}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder: Path) -> set[str]:
    """The files of a folder, but those that a build leaves there; links to folders are not followed."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if ".egg-info/" not in name}


def contents(wheel: Path) -> dict[str, bytes]:
    """What is in a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A copy of the checkout, so that no build leaves anything in it; the sdist of it, and the wheel of that."""
    for tool in ("build.__main__", "twine"):
        pytest.importorskip(tool, reason="builds the package: pip install 'slotgraph[package]'")
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=MADE)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "tree", cwd=folder)
    sdist, wheel = sorted((folder / "dist").iterdir(), key=lambda path: path.suffix)
    return folder / "tree", sdist, wheel


def test_the_sdist_is_the_checkout(made: tuple[Path, Path, Path]) -> None:
    """It holds every file, and again those of the folders that src/ links to, as files of the package."""
    own = files(made[0])
    linked = {f"src/slotgraph/{name}" for name in own if name.startswith(FOLDERS)}
    assert {"docs/_static/book.css", "docs/pictures/timeline.svg", "tests/test_package.py", "LICENSE"} <= own
    with tarfile.open(made[1]) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert (own | linked) - held == set()


def test_the_wheel_is_the_package(made: tuple[Path, Path, Path]) -> None:
    """It holds every module, and is the same from the sdist and from the checkout; an index would take both files."""
    tree, sdist, wheel = made
    own = files(tree / "src") | {f"slotgraph/{folder}/{name}" for folder in FOLDERS for name in files(tree / folder)}
    assert {name for name in contents(wheel) if ".dist-info/" not in name} == own
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tree.parent, tree, cwd=tree)
    assert contents(tree.parent / wheel.name) == contents(wheel)
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=tree)


def test_the_quick_start_runs_from_the_wheel(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """In an environment where slotgraph is the wheel's, away from the checkout: the page's blocks, and the commands."""
    tree, _, wheel = made
    python = tmp_path / "home/bin/python"
    venv.create(tmp_path / "home")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    (packages,) = tmp_path.glob("home/lib/*/site-packages")
    theirs = [path for path in sys.path if path.endswith("-packages")]  # torch and the rest are too large to install
    (packages / "theirs.pth").write_text("\n".join(theirs), encoding="utf-8")
    shown = run(python, "-c", "import slotgraph.dataflow as inner; print(inner.__file__)", cwd=tmp_path)
    assert Path(shown.strip()).is_relative_to(packages / "slotgraph")
    for name in ("conftest.py", "quick-start.md"):
        shutil.copy(tree / "docs" / name, tmp_path)
    assert " passed in " in run(python, "-m", "pytest", "-p", "no:cacheprovider", "quick-start.md", cwd=tmp_path)
    assert run(python.parent / "slotgraph", "--version", cwd=tmp_path) == f"slotgraph {wheel.name.split('-')[1]}\n"
    assert "cpu-capture" in run(python.parent / "slotgraph", "backends", cwd=tmp_path)
