"""A whole step under each habit of serving loops, beside the same step without it: host and device time, and ratios.

pytest tests/benchmarks/test_habits.py -m cuda -s
pytest tests/benchmarks/test_habits.py -m "not cuda" -s

With `--benchmark-enable` pytest-benchmark times each of them, too, one after the other.
"""

import functools

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from rich.console import Console

from slotgraph.backends import load
from slotgraph.backends.base import Backend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.runners.commands.bench_tables import show_habits
from slotgraph.runners.commands.figures import HabitFigure
from slotgraph.runners.commands.habit_races import HabitRun, run_habits, verify_habit
from slotgraph.runners.commands.habits import Habit, habits
from tests.benchmarks.races import one_after_another

EACH_BACKEND = ["cpu", "cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)]
ROUNDS, DEVICE_ROUNDS, STEPS = 30, 5, 20


def backend_of(name: str) -> Backend:
    """A backend; skips where it cannot run."""
    available = load(name).is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    return load(name)()


@functools.cache
def found_on(name: str) -> dict[str, Habit]:
    """The habits that a backend can show."""
    return {habit.name: habit for habit in habits(backend_of(name))}


@pytest.mark.parametrize("name", EACH_BACKEND)
def test_table(name: str, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config) -> None:
    """All habits by all lowerings, round by round in turn; none of them leaves its lowering."""
    backend, shown = backend_of(name), pytestconfig.getoption("capture") == "no"
    sizes = (ROUNDS, DEVICE_ROUNDS, STEPS) if shown else (1, 0, 2)
    figures: list[HabitFigure] = run_habits(list(found_on(name).values()), backend, *sizes, lambda: None)
    if shown:
        with capsys.disabled():
            show_habits(figures, Console(width=180))
    assert {(one.habit, one.lowering): one.detours for one in figures if one.detours} == {}


@pytest.mark.parametrize("lowering", [one for one in LADDER if one != "slot_by_slot"])
@pytest.mark.parametrize("habit", sorted({one.name for one in habits(load("cpu")())} | {"two streams in turn"}))
@pytest.mark.parametrize("name", EACH_BACKEND)
def test_step(benchmark: BenchmarkFixture, name: str, habit: str, lowering: str) -> None:
    """One habit by itself."""
    backend = backend_of(name)
    if habit not in found_on(name) or lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{name} has no {habit}, or no {lowering}")
    benchmark.group = f"{name}: whole step, {lowering}"
    chosen = found_on(name)[habit]
    run = HabitRun.of(chosen, backend, lowering)
    verify_habit(chosen, backend, [run])
    with run.around(), torch.no_grad():
        benchmark(one_after_another(run.way, run.batches))  # type: ignore[arg-type] # batches of its own
