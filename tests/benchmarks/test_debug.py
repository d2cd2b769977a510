"""What debug modes cost: off beside a runner that was never told, and each by itself, all in one run, taking turns.

pytest tests/benchmarks/test_debug.py -s
"""

from typing import Any

import pytest

from slotgraph import DecodeRunner, backends
from slotgraph.runners.commands.bench import declare_decode, draw, plus_one
from slotgraph.runners.config import MODES, VARIABLE
from tests.benchmarks.shown import race

LIVE, BUCKET = 5, 8
WAYS: dict[str, Any] = {"no option": None, "off": False, "True": True, **{mode: mode for mode in MODES}}


@pytest.mark.parametrize("backend_name", ["cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_modes(backend_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off is the same code as without the option; the modes that run steps again cost some steps."""
    available = backends.load(backend_name).is_available()
    if not available:
        pytest.skip(f"{backend_name}: {available.reason}")
    monkeypatch.delenv(VARIABLE, raising=False)
    backend, inputs = backends.load(backend_name)(), declare_decode(9)
    runners: dict[str, Any] = {}
    for name, debug in WAYS.items():
        told: dict[str, Any] = {} if debug is None else {"debug": debug}
        runners[name] = DecodeRunner(inputs, plus_one, buckets=[BUCKET], backend=backend, progress=False, **told)
        runners[name].capture()
    batches = [draw(inputs, backend, LIVE, number) for number in range(4)]
    race(
        f"{backend_name}: a small step of 9 slots, {LIVE} of {BUCKET} rows, under debug modes",
        runners,
        batches,
        backend,
    )
    none, off = runners["no option"], runners["off"]
    assert none.watch.watchers == off.watch.watchers == ()
    assert (none._bound is None) == (off._bound is None)
