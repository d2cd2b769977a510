"""What debug modes cost: off beside a runner that was never told, and each by itself, all in one run, taking turns.

pytest tests/benchmarks/test_debug.py -s
"""

from typing import Any

import pytest

from slotgraph.backends import Backend
from slotgraph.dataflow import environment
from slotgraph.runners.engine.config import MODES
from slotgraph.runners.testing.bench import declare_decode, smallest_step
from tests.benchmarks.decoding import draw
from tests.benchmarks.shown import race
from tests.runners.models import decoder

LIVE, BUCKET = 5, 8
WAYS: dict[str, Any] = {"no option": None, "off": False, "True": True, **{mode: mode for mode in MODES}}


@pytest.mark.slotgraph_backends("cpu-capture", "cuda")
def test_modes(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off is the same code as without the option; the modes that run steps again cost some steps."""
    monkeypatch.delenv(environment.DEBUG, raising=False)
    inputs, runners = declare_decode(9), dict[str, Any]()
    for name, debug in WAYS.items():
        told: dict[str, Any] = {} if debug is None else {"debug": debug}
        runners[name] = decoder(inputs, smallest_step, buckets=[BUCKET], backend=backend, **told)
    batches = [draw(inputs, backend, LIVE, number) for number in range(4)]
    title = f"{backend.name}: a small step of 9 slots, {LIVE} of {BUCKET} rows, under debug modes"
    race(title, runners, batches, backend)
    none, off = runners["no option"], runners["off"]
    assert none.watch.watchers == off.watch.watchers == ()
