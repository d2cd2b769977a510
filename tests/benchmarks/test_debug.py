"""What debug modes cost: off beside a runner that was never told, and each by itself, all in one run, taking turns.

pytest tests/benchmarks/test_debug.py -s
"""

from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, backends, copied
from slotgraph.runners.modes import MODES, VARIABLE
from tests.benchmarks.shown import race
from tests.benchmarks.test_capture import LAYERS, Model, Step

LIVE, BUCKET = 5, 8
WAYS: dict[str, Any] = {"no option": None, "off": False, "True": True, **{mode: mode for mode in MODES}}


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


SUBJECTS: dict[str, Any] = {
    f"a step of {LAYERS} layers and 2 slots": (Step, Model),
    "a small step of 9 slots": (Nine, lambda _: summed),
}


def batch_of(inputs: Any, draw: torch.Generator, device: torch.device) -> Any:
    """A batch of tensors on the device."""
    shapes = {"mrope": (3, LIVE), "page_table": (LIVE, 8)}
    slots = inputs.slotgraph.slots.items()
    drawn = {name: torch.randint(1, 128, shapes.get(name, (LIVE,)), generator=draw) for name, _ in slots}
    return inputs(**{name: drawn[name].to(device, slot.dtype) for name, slot in slots})


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("backend_name", ["cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_modes(backend_name: str, subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off is the same code as without the option; the modes that run steps again cost some steps."""
    available = backends.load(backend_name).is_available()
    if not available:
        pytest.skip(f"{backend_name}: {available.reason}")
    monkeypatch.delenv(VARIABLE, raising=False)
    backend, (inputs, step_on) = backends.load(backend_name)(), SUBJECTS[subject]
    runners: dict[str, Any] = {}
    for name, debug in WAYS.items():
        told: dict[str, Any] = {} if debug is None else {"debug": debug}
        step = step_on(backend.device)
        runners[name] = DecodeRunner(inputs, step, buckets=[BUCKET], backend=backend, progress=False, **told)
        runners[name].capture()
    draw = torch.Generator().manual_seed(0)
    batches = [batch_of(inputs, draw, backend.device) for _ in range(4)]
    race(f"{backend_name}: {subject}, {LIVE} of {BUCKET} rows, under debug modes", runners, batches, backend)
    none, off = runners["no option"], runners["off"]
    assert none.watch.watchers == off.watch.watchers == ()
    assert (none._shortcuts is None) == (off._shortcuts is None)
