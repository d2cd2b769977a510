"""Whole steps, by hand and by each lowering: the rows of `slotgraph bench`; and steps that the host launches ahead."""

import collections
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotgraph import BATCH, TOKENS, copied, output
from slotgraph.backends import load
from slotgraph.extend import LaunchedStep
from slotgraph.runners.testing.bench import ANY, SIZES, cases, declare_decode, runner_of
from slotgraph.runners.testing.benchmarks import ORACLE, SETS
from slotgraph.runners.testing.by_hand import PER_SLOT, REGROUPED
from tests.benchmarks.decoding import draw
from tests.runners.models import decoder

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")


@functools.cache
def held(backend: str, slots: int, live: int, padded: int) -> tuple[list[Any], dict[str, Any]]:
    """Batches and ways, compared with the oracle; the one that counts is second."""
    runner = runner_of(declare_decode(slots), buckets=[padded], output_rows=TOKENS, backend=backend)
    found = {row["lowering"]: run for row, run in cases(runner, (live,), (PER_SLOT, REGROUPED))}
    first = [PER_SLOT, runner.stage.backend.capabilities.lowerings[0]]
    return [*found[PER_SLOT].batches], {name: found[name].way for name in [*first, *(found.keys() - {*first})]}


ROWS = [(live, padded) for padded, lives in SIZES.items() for live in lives if live != ANY]


@pytest.mark.parametrize(("live", "padded"), ROWS)
@pytest.mark.parametrize("slots", [4, 12, 48])
def test_row(benchmark_ways: Callable[..., Any], backend_name: str, slots: int, live: int, padded: int) -> None:
    """All ways in turn."""
    batches, ways = held(backend_name, slots, live, padded)
    benchmark_ways(ways, batches, f"{slots} slots, {live}/{padded} rows")


LIVE, PADDED, FEW = 240, 256, 8
ADVANCING: dict[str, Any] = {
    "input_ids": copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids),
    "positions": copied(TOKENS, dtype=torch.int64, pad=0, then=lambda positions: positions + 1),
    "seq_lens": copied(BATCH, dtype=torch.int32, pad=1, then=lambda seq_lens: seq_lens + 1),
    "tables": copied(BATCH, 64, dtype=torch.int32, pad=0),
    "next_ids": output(BATCH, dtype=torch.int64),
}


def add(view: Any) -> torch.Tensor:
    """A step as small as one can be that writes what the next one reads."""
    return torch.add(view.input_ids, view.positions, out=view.next_ids)


@functools.cache
def launched(backend: str) -> tuple[list[Any], dict[str, Any]]:
    """Batches of all requests and of a few, and ways to run the next step, each on a runner of its own."""
    on, inputs = load(backend)(), declare_decode(10, **ADVANCING)
    batches = [tuple(draw(inputs, on, rows, number) for rows in (LIVE, FEW)) for number in range(SETS)]

    def runner(**options: Any) -> Any:
        made = decoder(inputs, add, backend=on, buckets=[PADDED], output_rows=BATCH, **options)
        made(batches[0][0])
        return made

    def looped(say: Callable[[LaunchedStep, Any], object]) -> Callable[[Any], None]:
        steps = runner().steps(batches[0][0], ahead=1)
        last = next(steps)

        def go_on(pair: Any) -> None:
            nonlocal last
            say(last, pair[1])
            last = next(steps)

        return go_on

    keys, new = collections.deque(range(LIVE)), itertools.count(LIVE)

    def exchange(step: LaunchedStep, few: Any) -> None:
        step.leave([keys.popleft() for _ in range(FEW)])
        joining = [next(new) for _ in range(FEW)]
        step.join(few, joining)
        keys.extend(joining)

    def by_hand() -> Callable[[Any], Any]:
        """The loop that an engine writes: two graphs in turn, one copy and one event a step, tokens a step late."""
        first = batches[0][0]
        ids = [first.input_ids.clone(), first.input_ids.clone()]
        positions, seq_lens = first.positions.clone(), first.seq_lens.clone()

        def step(turn: int) -> torch.Tensor:
            positions.add_(1)
            seq_lens.add_(1)
            return torch.add(ids[turn], positions, out=ids[1 - turn])

        step(0)
        graphs = [on.capture(functools.partial(step, turn)) for turn in range(2)]
        host = [on.empty((LIVE,), torch.int64, "host") for _ in range(2)]
        events = [on.event() for _ in range(2)]
        turns, keys = itertools.cycle(range(2)), [*range(LIVE)]

        def go_on(_: Any) -> list[tuple[int, int]]:
            turn = next(turns)
            graphs[turn].replay()
            host[turn].copy_(ids[1 - turn], non_blocking=True)
            events[turn] = on.event(events[turn])
            events[1 - turn].synchronize()
            return [*zip(keys, host[1 - turn].tolist(), strict=True)]

        return go_on

    filled, graph = runner(), runner(lowering=ORACLE).graphs.captured[PADDED, frozenset(), ()].graph
    return batches, {
        "full fill": lambda pair: filled(pair[0]),
        "no news": looped(lambda *_: None),
        "tokens read": looped(lambda step, _: step.tokens()),
        "tokens read, by hand": by_hand(),
        f"{FEW} change": looped(lambda step, few: step.edit(range(FEW), tables=few.tables)),
        f"{FEW} leave, {FEW} join": looped(exchange),
        "bare": lambda _: graph.replay(),
    }


@pytest.mark.slotgraph_backends("cpu", "cpu-capture", "cuda")
def test_steps_ahead(benchmark_ways: Callable[..., Any], backend_name: str) -> None:
    """A step of `steps()` with its copy to the host, beside a full fill and the bare replay."""
    batches, ways = launched(backend_name)
    benchmark_ways(ways, batches, f"12 slots, {LIVE}/{PADDED} rows, steps ahead")
