"""What agreeing costs of a tensor-parallel decode step: known to be equal, agreed before each step, and a step ahead.

The same of steps that are launched ahead, by `runner.steps(ahead=1)`.

pytest tests/benchmarks/test_ranks.py -s
"""

import contextlib
import functools
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from slotgraph import BATCH, copied
from slotgraph.backends import choose
from slotgraph.extend import LaunchedStep
from slotgraph.runners.ranks.group import CallSite, Message, Ranks
from slotgraph.runners.testing.timing import Run, measure
from tests.benchmarks.shown import show
from tests.ranks.processes import ranks
from tests.ranks.staged import Tokens
from tests.ranks.stepping import OVER, soon
from tests.runners.models import decoder

WAYS: Final[tuple[str, ...]] = ("known to be equal", "agreed", "agreed ahead")
STEPS: Final[dict[str, bool]] = {"steps, known to be equal": True, "steps, agreed": False}
"""Steps launched ahead: whether ranks are known to be equal."""
LIVE, BUCKET = 29, 32


class Advancing(Tokens):
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda seq_lens: seq_lens + 1)


class Half:
    """One rank's half of some layers: two products of attention's size and two of the MLP's, reduced twice a layer."""

    def __init__(self, layers: int, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        draw = torch.Generator(device).manual_seed(3)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=draw, device=device, dtype=dtype) / math.sqrt(columns)

        half, inner = hidden // 2, 7 * hidden // 4
        self.table = weight(512, hidden)
        self.layers = [
            ((weight(hidden, half), weight(half, hidden)), (weight(hidden, inner), weight(inner, hidden)))
            for _ in range(layers)
        ]

    def __call__(self, view: Tokens) -> torch.Tensor:
        """[TOKENS, hidden]."""
        hidden: torch.Tensor = self.table[view.input_ids + view.positions] * view.seq_lens[:, None]
        for parts in self.layers:
            for up, down in parts:
                part = torch.relu(hidden @ up) @ down
                dist.all_reduce(part)
                hidden = torch.nn.functional.layer_norm(hidden + part, hidden.shape[1:])
        return hidden


def timed(rank: int, backend: str, layers: int, hidden: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds of each step whose outputs the host waits for, by way."""
    device = torch.device("cuda", rank) if backend == "cuda" else torch.device("cpu")
    model = Half(layers, hidden, device, torch.bfloat16 if backend == "cuda" else torch.float32)
    draw, ones, runs = torch.Generator().manual_seed(1), torch.ones(LIVE, dtype=torch.int32, device=device), {}
    drawn = [torch.randint(0, 256, (2, LIVE), generator=draw).to(device) for _ in range(4)]
    batches = [Tokens(input_ids=ids, positions=positions, seq_lens=ones.clone()) for ids, positions in drawn]
    for way in WAYS:
        given = Ranks(equal=way == WAYS[0])
        runner = decoder(Tokens, model, buckets=[BUCKET], backend=backend, ranks=given)

        def step(number: int, runner: Any = runner, ahead: bool = way == WAYS[2]) -> None:
            outputs = runner(batches[number])
            if ahead:
                runner.agree_ahead(batches[(number + 1) % len(batches)])
            outputs[0, 0].item()

        runs[way] = Run(step, range(len(batches)), around)
    for way, equal in STEPS.items():
        runner = decoder(Advancing, model, buckets=[BUCKET], backend=backend, ranks=Ranks(equal=equal))
        loop = runner.steps(batches[0], ahead=1, read=lambda outputs: outputs[:, 0])
        runs[way] = Run(functools.partial(follow, loop), [0], around)
    measure(list(runs.values()), choose(backend), rounds, steps)
    return {way: run.host for way, run in runs.items()}


def follow(loop: Iterator[LaunchedStep], _: int) -> None:
    """Wait for one step of a loop."""
    next(loop).outputs[0].item()


@contextlib.contextmanager
def around() -> Iterator[None]:
    """Ranks begin each round together."""
    dist.barrier()
    yield


@pytest.mark.parametrize(
    ("backend", "layers", "hidden", "rounds", "steps"),
    [("cpu", 2, 64, 5, 20), pytest.param("cuda", 16, 4096, 25, 40, marks=pytest.mark.cuda)],
    ids=["cpu", "cuda"],
)
def test_share_of_a_step(
    tmp_path: pathlib.Path, backend: str, layers: int, hidden: int, rounds: int, steps: int
) -> None:
    """Each way gives a time for each step, of the slower rank."""
    if backend == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("cuda: two GPUs are needed, each for a rank of its own")
    with ranks(2, tmp_path, backend="cpu:gloo,cuda:nccl" if backend == "cuda" else "gloo") as made:
        first, second = made.run(timed, backend, layers, hidden, rounds, steps)
    times = {way: [max(pair) for pair in zip(first[way], second[way], strict=True)] for way in first}
    show(f"{backend}: a decode step of {layers} layers over 2 ranks, {LIVE} of {BUCKET} rows", times)
    assert {len(one) for one in times.values()} == {rounds * steps}


def exchanged(_: int, rounds: int, each: int) -> dict[str, list[float]]:
    """Microseconds of exchanges through shared memory and over gloo, one after another, and after 1.5 ms of sleep."""
    both, runs, site = [soon(over) for over in OVER], dict[str, list[float]](), CallSite("a benchmark")
    for pause, when in ((0.0, "busy"), (0.0015, "after 1.5 ms of sleep")):
        for one in both:
            runs[f"{one.over}, {when}"] = times = list[float]()
            for _ in range(rounds):
                dist.barrier()
                for number in range(each):
                    time.sleep(pause) if pause else None
                    begin = time.perf_counter()
                    one.begin(Message(number, live=(3, 4)), site, 60.0)()
                    times.append((time.perf_counter() - begin) * 1e6)
    return runs


def test_an_exchange(tmp_path: pathlib.Path) -> None:
    """Of two ranks that do nothing else, in both ways that host memory has."""
    with ranks(2, tmp_path) as made:
        first, second = made.run(exchanged, 5, 100)
    times = {way: [max(pair) for pair in zip(first[way], second[way], strict=True)] for way in first}
    show("an exchange of 2 ranks of one host", times)
    assert [way.split(",")[0] for way in times] == [*OVER, *OVER]
