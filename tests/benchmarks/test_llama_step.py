"""What a real step's inputs cost: a Llama's decode step by the runner beside a bare replay, and captures beside a loop.

pytest tests/benchmarks/test_llama_step.py -m cuda
"""

import pytest
import torch

from serving.timing import Race
from slotgraph.backends import choose
from slotgraph.backends.cuda import CudaBackend
from tests.benchmarks.llama import (
    FOUR,
    HALF,
    Shape,
    by_hand,
    by_runner,
    capture_seconds,
    is_sane,
    ladder,
    step_times,
    steps_of,
)
from tests.benchmarks.shown import show, table_of

# This is about time: what other packages have to say about themselves is no failure.
pytestmark = pytest.mark.filterwarnings("default")

TINY = Shape(name="tiny", layers=1, hidden=32, heads=2, kv_heads=1, intermediate=32, vocabulary=64)
LIVE, BUCKET = 7, 8
BUCKETS = 20


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "goal"), [pytest.param(FOUR, "3 %", id="4-layers"), pytest.param(HALF, "1.5 %", id="24-layers")]
)
def test_step_over_bare_replay(shape: Shape, goal: str, cuda: CudaBackend, capsys: pytest.CaptureFixture[str]) -> None:
    """Many steps one behind another, then a wait: what `runner(batch)` takes beyond its graph's replay."""
    steps = steps_of(shape, cuda.device, torch.bfloat16, LIVE)
    bare, whole = step_times(steps, cuda, LIVE, BUCKET, Race(rounds=21, steps=100, wait=cuda.synchronize))
    title = f"{shape.name}, bfloat16, {LIVE} of {BUCKET} rows: a step; goal: at most {goal} over the bare replay"
    with capsys.disabled():
        show(table_of(title, {"bare replay": bare, "runner(batch)": whole}, "us"))
    assert is_sane([*bare, *whole])


@pytest.mark.cuda
@pytest.mark.slow
def test_capture_beside_a_bare_loop(cuda: CudaBackend, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty buckets of the larger model, a warm-up and a capture each."""
    steps = steps_of(HALF, cuda.device, torch.bfloat16, LIVE)
    loop, runner = capture_seconds((by_hand, by_runner), steps, cuda, ladder(BUCKETS), rounds=5)
    title = f"{HALF.name}, bfloat16: capture of {BUCKETS} buckets; goal: within 1.2 of the loop"
    with capsys.disabled():
        show(table_of(title, {"bare loop": loop, "runner.capture()": runner}, "s"))
    assert is_sane([*loop, *runner])


def test_a_tiny_step_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The same on a CPU, where the figures mean nothing: what is measured is right, and is shown."""
    backend = choose("cpu-capture")
    steps = steps_of(TINY, backend.device, torch.float32, LIVE)
    bare, whole = step_times(steps, backend, LIVE, BUCKET, Race(rounds=2, steps=2, wait=backend.synchronize))
    (runner,) = capture_seconds((by_runner,), steps, backend, [4, 8], rounds=1)
    show(table_of("tiny", {"bare replay": bare, "runner(batch)": whole}, "us"))
    assert "runner(batch)" in capsys.readouterr().out
    assert is_sane([*bare, *whole, *runner])
