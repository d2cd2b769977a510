"""What a prefill step takes by each path: a Llama's, eagerly, breakable and piecewise, and each break by itself.

pytest tests/benchmarks/test_prefill_step.py -m cuda
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from serving.timing import Contestant, Race
from slotgraph import TOKENS, BreakableRunner, Inputs, copied, graph_break
from slotgraph.backends import Backend, choose
from slotgraph.backends.cuda import CudaBackend
from tests.benchmarks.llama import HALF, Shape, is_sane
from tests.benchmarks.prefilling import Prefill, batch_of
from tests.benchmarks.shown import show, table_of

# This is about time: what other packages have to say about themselves is no failure.
pytestmark = pytest.mark.filterwarnings("default")

TINY = Shape(name="tiny", layers=2, hidden=32, heads=2, kv_heads=1, intermediate=32, vocabulary=64)
SETS = 3
BREAKS = 24


def path_times(
    prefill: Prefill, backend: Backend, lengths: list[int], race: Race, tolerance: float
) -> Mapping[str, list[float]]:
    """Microseconds a step for each path, over batches of requests of these lengths, one token in ten padding."""
    total = sum(lengths)
    runners = prefill.runners(backend, [total], len(lengths))
    less = [lengths[0] - max(1, total // 10), *lengths[1:]] if lengths[0] > total // 10 else lengths
    batches = [batch_of(less, prefill.model.config.vocab_size, seed, backend.device) for seed in range(SETS)]
    with torch.no_grad():
        for name, runner in runners.items():
            torch.testing.assert_close(
                runner(batches[0]).clone(), runners["eager"](batches[0]), rtol=tolerance, atol=tolerance
            )
            if name != "eager":
                assert runner.decide(batches[0]).path == name
        ways = [Contestant(functools.partial(_step, runner, batches), torch.no_grad) for runner in runners.values()]
        return dict(zip(runners, race.run(ways), strict=True))


def _step(runner: Callable[[Any], object], batches: Sequence[Any], number: int) -> object:
    return runner(batches[number % len(batches)])


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths",
    [pytest.param([tokens // 8] * 8, id=f"8-requests-{tokens}-tokens") for tokens in (128, 512, 2048, 8192)],
)
def test_prefill_by_path(lengths: list[int], cuda: CudaBackend, capsys: pytest.CaptureFixture[str]) -> None:
    """A 24-layer model in bfloat16: each path, the host waiting for each step, as it must for the first token."""
    prefill = Prefill.of(HALF, cuda.device, torch.bfloat16)
    with prefill.marked("broken"):
        times = path_times(prefill, cuda, lengths, Race(rounds=11, steps=20, wait=cuda.synchronize, each=True), 0.1)
    title = f"{HALF.name}, bfloat16, {len(lengths)} requests, {sum(lengths)} tokens: a prefill step"
    with capsys.disabled():
        show(table_of(title, times, "us"))
    assert is_sane([time for one in times.values() for time in one])


class Rows(Inputs):
    """One value a token."""

    values: torch.Tensor = copied(TOKENS, 64, dtype=torch.float32, pad=0.0)


class Chain(nn.Module):
    """As many small kernels as breaks, one before each. between: what is called there, if anything."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor | None] | None) -> None:
        super().__init__()
        self.between = between

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Count up."""
        for _ in range(BREAKS):
            values = values + 1
            if self.between is not None:
                answer = self.between(values)
                values = values if answer is None else answer
        return values


@graph_break
def silent(values: torch.Tensor) -> None:
    """A break that writes in place, or nothing: there is nothing to move."""
    del values


@graph_break
def answering(values: torch.Tensor) -> torch.Tensor:
    """A break whose answer is moved to where the next graph reads it."""
    return values


class Around(nn.Module):
    """A step that is nothing but its stack."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor | None] | None) -> None:
        super().__init__()
        self.chain = Chain(between)

    def forward(self, view: Rows) -> torch.Tensor:
        """The stack."""
        out: torch.Tensor = self.chain(view.values)
        return out


def segment_times(backend: Backend, race: Race) -> Mapping[str, list[float]]:
    """Microseconds of a step in one graph, and of the same in as many as there are breaks, and one."""
    batches = [{"values": torch.randn(16, 64, device=backend.device)} for _ in range(SETS)]
    ways = {"one graph": None, "breaks, silent": silent, "breaks, answering": answering}
    runners = {
        name: BreakableRunner(
            Rows, Around(way), stack="chain", buckets=[16], output_rows=TOKENS, backend=backend, progress=False
        )
        for name, way in ways.items()
    }
    for runner in runners.values():
        runner.capture()
        torch.testing.assert_close(runner(batches[0]).clone(), batches[0]["values"] + BREAKS)
    racing = [Contestant(functools.partial(_step, runner, batches), torch.no_grad) for runner in runners.values()]
    return dict(zip(runners, race.run(racing), strict=True))


@pytest.mark.cuda
@pytest.mark.slow
def test_cost_of_a_segment(cuda: CudaBackend, capsys: pytest.CaptureFixture[str]) -> None:
    """Host time: what each break adds is one launch, and the call of a function that does nothing."""
    times = segment_times(cuda, Race(rounds=21, steps=50, wait=cuda.synchronize))
    whole, *broken = times.items()
    each = {name: [(many - one) / BREAKS for one, many in zip(whole[1], parts, strict=True)] for name, parts in broken}
    with capsys.disabled():
        show(table_of(f"{BREAKS} small kernels, with no break and with one after each", times, "us"))
        show(table_of("what one break adds, and the graph after it", each, "us"))
    assert is_sane([time for one in times.values() for time in one])


def test_tiny_prefill_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The same on a CPU, where the figures mean nothing: what is measured is right, and is shown."""
    backend = choose("cpu-capture")
    prefill = Prefill.of(TINY, backend.device, torch.float32)
    race = Race(rounds=2, steps=2, wait=backend.synchronize)
    with prefill.marked("broken"):
        times = {**path_times(prefill, backend, [8, 5, 3], race, 1e-4), **segment_times(backend, race)}
    show(table_of("tiny", times, "us"))
    assert "piecewise" in capsys.readouterr().out
    assert is_sane([time for one in times.values() for time in one])
