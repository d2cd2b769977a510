"""What debug modes cost: off beside a runner that was never told, and each by itself, all in one run, taking turns.

pytest tests/benchmarks/test_debug.py -s
"""

import contextlib
from typing import Any

import pytest
import torch

from serving.timing import Contestant, Race
from slotgraph import DecodeRunner, backends
from slotgraph.runners.modes import MODES, VARIABLE
from tests.benchmarks.shown import show, table_of
from tests.benchmarks.test_capture import LAYERS, Model, Step

LIVE, BUCKET = 5, 8
ROWS: dict[str, Any] = {"no option": None, "off": False, "True": True, **{mode: mode for mode in MODES}}


def runner_of(backend: Any, debug: Any) -> DecodeRunner[Step]:
    """A captured runner; without the option where it is None."""
    options: dict[str, Any] = {} if debug is None else {"debug": debug}
    model = Model()
    model.table = model.table.to(backend.device)
    model.weights = [weight.to(backend.device) for weight in model.weights]
    runner = DecodeRunner(Step, model, buckets=[BUCKET], backend=backend, progress=False, **options)
    runner.capture()
    return runner


def contestant(runner: DecodeRunner[Step], batches: list[Step]) -> Contestant:
    """Whole steps, with other values and other tensors each time."""
    return Contestant(lambda number: runner(batches[number % len(batches)]), contextlib.nullcontext)


@pytest.mark.parametrize("backend_name", ["cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_modes(backend_name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Off is the same code as without the option; the modes that run steps again cost some steps."""
    available = backends.load(backend_name).is_available()
    if not available:
        pytest.skip(f"{backend_name}: {available.reason}")
    monkeypatch.delenv(VARIABLE, raising=False)
    backend = backends.load(backend_name)()
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randint(1, 128, (2, LIVE), generator=draw).to(backend.device) for _ in range(4)]
    batches = [Step(input_ids=ids, positions=positions) for ids, positions in drawn]
    runners = {name: runner_of(backend, debug) for name, debug in ROWS.items()}
    contestants = [contestant(runner, batches) for runner in runners.values()]
    times = Race(rounds=25, steps=20, wait=backend.synchronize).run(contestants)
    rows = dict(zip(ROWS, times, strict=True))
    title = f"{backend_name}: a step of {LAYERS} layers, {LIVE} of {BUCKET} rows, under debug modes"
    with capsys.disabled():
        show(table_of(title, rows, "us"))
    none, off = runners["no option"], runners["off"]
    assert none.watch.watchers == off.watch.watchers == ()
    assert (none._shortcuts is None) == (off._shortcuts is None)
