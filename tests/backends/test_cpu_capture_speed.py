"""What a replay of cpu-capture costs beside eager, on a small transformer step.

pytest tests/backends/test_cpu_capture_speed.py --benchmark-enable
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph.backends.cpu_capture import Adapter
from tests.backends.test_cpu_capture import Transformer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Leave the threads' noise out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def eager(step: Transformer) -> Callable[[], object]:
    """The step as it is."""
    return step


def replayed(step: Transformer) -> Callable[[], object]:
    """The step captured."""
    return Adapter().capture(step).replay


@pytest.mark.benchmark(group="cpu-capture: a transformer step")
@pytest.mark.parametrize("way", [eager, replayed])
def test_step(benchmark: BenchmarkFixture, way: Callable[[Transformer], Callable[[], object]]) -> None:
    """One step, eager in inference mode and replayed."""
    call = way(Transformer())
    with torch.inference_mode():
        benchmark(call)


@pytest.mark.benchmark(group="cpu-capture: capturing")
def test_capture(benchmark: BenchmarkFixture) -> None:
    """One capture of the same step."""
    step = Transformer()
    benchmark(lambda: Adapter().capture(step))
