"""What debug modes cost: off beside a runner that was never told, and each by itself, all in one run, taking turns.

pytest tests/benchmarks/test_debug.py -s
"""

import contextlib
from typing import Any

import pytest
import torch

from serving.timing import Contestant, Race
from slotgraph import BATCH, DecodeRunner, Inputs, backends, copied
from slotgraph.runners.modes import MODES, VARIABLE
from tests.benchmarks.shown import show, table_of
from tests.benchmarks.test_capture import LAYERS, Model, Step

LIVE, BUCKET = 5, 8
ROWS: dict[str, Any] = {"no option": None, "off": False, "True": True, **{mode: mode for mode in MODES}}


class Nine(Inputs):
    """As many slots as a decode step of an engine has, all of them on the device."""

    input_ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    req_pool_indices: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)
    lora_ids: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    temperatures: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1)
    mrope: torch.Tensor = copied(3, BATCH, dtype=torch.int64, pad=0)
    page_table: torch.Tensor = copied(BATCH, 8, dtype=torch.int32, pad=0)


def summed(view: Nine) -> torch.Tensor:
    """Little work on every slot, so that what is beside it is seen."""
    whole = view.input_ids + view.positions + view.out_cache_loc + view.req_pool_indices + view.mrope.sum(0)
    return whole * view.temperatures + view.seq_lens + view.lora_ids + view.page_table.sum(1)


def nine_of(draw: torch.Generator, device: torch.device) -> Nine:
    """A batch of tensors on the device."""
    slots: Any = Nine.slotgraph.slots
    shapes = {"mrope": (3, LIVE), "page_table": (LIVE, 8)}
    drawn = {
        name: torch.randint(1, 128, shapes.get(name, (LIVE,)), generator=draw).to(device, slot.dtype)
        for name, slot in slots.items()
    }
    return Nine(**drawn)


def two_of(draw: torch.Generator, device: torch.device) -> Step:
    """A batch for the model."""
    ids, positions = torch.randint(1, 128, (2, LIVE), generator=draw).to(device)
    return Step(input_ids=ids, positions=positions)


def model_on(device: torch.device) -> Model:
    """A model of some layers."""
    model = Model()
    model.table = model.table.to(device)
    model.weights = [weight.to(device) for weight in model.weights]
    return model


SUBJECTS: dict[str, Any] = {
    f"a step of {LAYERS} layers and 2 slots": (Step, model_on, two_of),
    "a small step of 9 slots": (Nine, lambda _: summed, nine_of),
}


def runner_of(backend: Any, debug: Any, inputs: Any, step: Any) -> DecodeRunner[Any]:
    """A captured runner; without the option where it is None."""
    options: dict[str, Any] = {} if debug is None else {"debug": debug}
    runner = DecodeRunner(inputs, step, buckets=[BUCKET], backend=backend, progress=False, **options)
    runner.capture()
    return runner


def contestant(runner: DecodeRunner[Any], batches: list[Any]) -> Contestant:
    """Whole steps, with other values and other tensors each time."""
    return Contestant(lambda number: runner(batches[number % len(batches)]), contextlib.nullcontext)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("backend_name", ["cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_modes(
    backend_name: str, subject: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off is the same code as without the option; the modes that run steps again cost some steps."""
    available = backends.load(backend_name).is_available()
    if not available:
        pytest.skip(f"{backend_name}: {available.reason}")
    monkeypatch.delenv(VARIABLE, raising=False)
    backend, (inputs, step_on, batch_of) = backends.load(backend_name)(), SUBJECTS[subject]
    draw = torch.Generator().manual_seed(0)
    batches = [batch_of(draw, backend.device) for _ in range(4)]
    runners = {name: runner_of(backend, debug, inputs, step_on(backend.device)) for name, debug in ROWS.items()}
    contestants = [contestant(runner, batches) for runner in runners.values()]
    times = Race(rounds=25, steps=20, wait=backend.synchronize).run(contestants)
    rows = dict(zip(ROWS, times, strict=True))
    title = f"{backend_name}: {subject}, {LIVE} of {BUCKET} rows, under debug modes"
    with capsys.disabled():
        show(table_of(title, rows, "us"))
    none, off = runners["no option"], runners["off"]
    assert none.watch.watchers == off.watch.watchers == ()
    assert (none._shortcuts is None) == (off._shortcuts is None)
