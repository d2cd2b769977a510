"""What agreeing costs of a tensor-parallel decode step: known to be equal, agreed before each step, and a step ahead.

And what ranks that exchange nothing cost a step on the host, beside one without ranks.

pytest tests/benchmarks/test_ranks.py -s
"""

import math
import pathlib
import statistics
import time
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied
from slotgraph.runners.ranks.group import HOST, Ranks
from tests.benchmarks.shown import show, table_of
from tests.ranks.processes import ranks

WAYS: Final[tuple[str, ...]] = ("known to be equal", "agreed", "agreed ahead", "agreed on the device", "both")
LIVE, BUCKET = 29, 32


class Decode(Inputs):
    """What this model reads."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)


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

    def __call__(self, view: Decode) -> torch.Tensor:
        """[TOKENS, hidden]."""
        hidden: torch.Tensor = self.table[view.input_ids + view.positions] * view.seq_lens[:, None]
        for parts in self.layers:
            for up, down in parts:
                part = torch.relu(hidden @ up) @ down
                dist.all_reduce(part)
                hidden = torch.nn.functional.layer_norm(hidden + part, hidden.shape[1:])
        return hidden


def timed(rank: int, backend: str, layers: int, hidden: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds of a step whose outputs the host waits for, by way: one number a round, ways in turn."""
    device = torch.device("cuda", rank) if backend == "cuda" else torch.device("cpu")
    model = Half(layers, hidden, device, torch.bfloat16 if backend == "cuda" else torch.float32)
    on_device, ways, runners = WAYS[3:], WAYS if backend == "cuda" else WAYS[:3], {}
    for way in ways:
        given: dict[str, Any] = {
            "backend": backend,
            "progress": False,
            "ranks": Ranks(equal=way == WAYS[0], on="cuda" if way in on_device else HOST),
        }
        runners[way] = DecodeRunner(Decode, model, buckets=[BUCKET], **given)
        runners[way].capture()
    draw = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(4):
        ids, positions = torch.randint(0, 256, (2, LIVE), generator=draw).to(device)
        batches.append(
            Decode(input_ids=ids, positions=positions, seq_lens=torch.ones(LIVE, dtype=torch.int32, device=device))
        )
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, runner in runners.items():
            ahead = way in {WAYS[2], WAYS[4]}
            if ahead:
                runner.agree_ahead(batches[0])
            dist.barrier()
            begin = time.perf_counter()
            for step in range(steps):
                outputs = runner(batches[step % 4])
                if ahead and step + 1 < steps:
                    runner.agree_ahead(batches[(step + 1) % 4])
                outputs[0, 0].item()
            if number:  # the first warms up
                found[way].append((time.perf_counter() - begin) / steps * 1e6)
    return found


@pytest.mark.parametrize(
    ("backend", "layers", "hidden", "rounds", "steps"),
    [("cpu", 2, 64, 5, 20), pytest.param("cuda", 16, 4096, 25, 40, marks=pytest.mark.cuda)],
    ids=["cpu", "cuda"],
)
def test_share_of_a_step(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    backend: str,
    layers: int,
    hidden: int,
    rounds: int,
    steps: int,
) -> None:
    """Each way gives a time for each round, of the slower rank."""
    if backend == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("cuda: two GPUs are needed, each for a rank of its own")
    with ranks(2, tmp_path, backend="cpu:gloo,cuda:nccl" if backend == "cuda" else "gloo") as made:
        first, second = made.run(timed, backend, layers, hidden, rounds, steps)
    rows = {way: [max(pair) for pair in zip(first[way], second[way], strict=True)] for way in first}
    with capsys.disabled():
        show(table_of(f"{backend}: a decode step of {layers} layers over 2 ranks, {LIVE} of {BUCKET} rows", rows, "us"))
    assert all(len(times) == rounds and statistics.median(times) > 0 for times in rows.values())


QUIET: Final[tuple[str, ...]] = ("without ranks", "quiet ranks", "the same by the general way")


def doubled(view: Decode) -> torch.Tensor:
    """Next to nothing, so that a step's time is the host's."""
    return view.input_ids * 2


def hosted(rank: int, backend: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds of a step on the host, by way: one number a round, ways in turn."""
    del rank
    device = torch.device("cuda") if backend == "cuda" else torch.device("cpu")
    given: dict[str, Any] = {"backend": backend, "lowering": "in_graph", "buckets": [BUCKET], "progress": False}
    runners = {way: DecodeRunner(Decode, doubled, ranks=None if way == QUIET[0] else Ranks(), **given) for way in QUIET}
    for runner in runners.values():
        runner.capture()
    runners[QUIET[2]]._watched(on=True)  # as while someone looks at its steps
    batches = [
        Decode(
            input_ids=torch.arange(1 + number, LIVE + 1 + number, device=device),
            positions=torch.arange(9 + number, LIVE + 9 + number, device=device),
            seq_lens=torch.ones(LIVE, dtype=torch.int32, device=device),
        )
        for number in range(4)
    ]
    found: dict[str, list[float]] = {way: [] for way in QUIET}
    for number in range(rounds + 1):
        for way, runner in runners.items():
            begin = time.perf_counter()
            for step in range(steps):
                runner(batches[step % 4])
            elapsed = time.perf_counter() - begin
            assert torch.equal(runner(batches[1]), batches[1].input_ids * 2)
            if number:  # the first warms up
                found[way].append(elapsed / steps * 1e6)
    short = [runner.parts.tally.by_shortcut() > 0 for runner in runners.values()]
    assert short == [True, True, False]
    return found


@pytest.mark.parametrize(
    ("backend", "rounds", "steps"),
    [("cpu-capture", 25, 100), pytest.param("cuda", 25, 400, marks=pytest.mark.cuda)],
    ids=["cpu-capture", "cuda"],
)
def test_quiet_ranks(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], backend: str, rounds: int, steps: int
) -> None:
    """Each way gives a time for each round, and shortcuts are taken where they should be."""
    if backend == "cuda" and not torch.cuda.is_available():
        pytest.skip("cuda: there is no GPU")
    with ranks(1, tmp_path) as made:
        (first,) = made.run(hosted, backend, rounds, steps)
    with capsys.disabled():
        show(table_of(f"{backend}: the host's part of a step, {LIVE} of {BUCKET} rows", first, "us"))
    assert all(len(times) == rounds and statistics.median(times) > 0 for times in first.values())
