"""Attention from each set in replayed graphs: as each request by itself; and `slotgraph.check` on each declaration."""

from typing import Any

import pytest
import torch

import slotgraph
from slotgraph import BATCH, TOKENS
from slotgraph.backends import Backend
from tests.runners.attention import kinds
from tests.runners.attention.attended import ATTENTIONS, expected
from tests.runners.attention.builders import BUILDERS

PAGE = 4
EVEN = [name for name in BUILDERS if not kinds.is_ragged(name)]
RAGGED = [name for name in BUILDERS if kinds.is_ragged(name)]


def cache_on(device: torch.device, pages: int = 1 + max(kinds.BUCKETS) * kinds.PAGES) -> torch.Tensor:
    """Keys, which are their own values, of every place of every page."""
    return torch.randn(pages * PAGE, 4, generator=torch.Generator().manual_seed(2)).to(device)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", EVEN)
def test_replayed_attention_is_each_requests_own(name: str, width: int, backend: Backend) -> None:
    """Of lengths and pages other than those of the capture, in buckets that are full and in padded ones."""
    cache = cache_on(backend.device)
    runner = kinds.decoder(name, lambda view: ATTENTIONS[name](view, cache, PAGE), backend, PAGE, width)
    for seed, (draw, rows) in enumerate(kinds.games(11, 25)):
        one = kinds.random_requests(draw, name, PAGE, width, rows)
        batch = kinds.batch_of(one, name, backend.device, seed)
        torch.testing.assert_close(runner(batch), expected(one, batch["queries"], cache), atol=1e-5, rtol=1e-5)
    assert not runner.stats()["eager"]


@pytest.mark.parametrize("name", RAGGED)
def test_replayed_attention_of_a_prefill_is_each_requests_own(name: str, backend: Backend) -> None:
    """A whole prefill in one graph, of requests with query tokens of their own number."""
    cache = cache_on(backend.device)
    buffers, padded = kinds.buffers_of(name, backend, PAGE, 1), {BATCH: 8, TOKENS: 48}
    bucket = buffers.at(padded)

    def captured() -> torch.Tensor:
        bucket.fill_in_graph()
        return ATTENTIONS[name](bucket.view(), cache, PAGE)

    graph: Any = None
    for seed, (draw, rows) in enumerate(kinds.games(12, 25)):
        one = kinds.random_requests(draw, name, PAGE, 1, rows)
        batch = kinds.batch_of(one, name, backend.device, seed)
        bucket.fill(batch)
        graph = backend.capture(captured) if graph is None else graph
        graph.replay()
        found = graph.outputs[: sum(one.queries)]
        torch.testing.assert_close(found, expected(one, batch["queries"], cache), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", EVEN)
def test_check_finds_nothing(name: str, backend: Backend) -> None:
    """Poison in tails reaches no live row, and each graph does what its step does."""
    cache = cache_on(backend.device)
    runner = kinds.decoder(name, lambda view: ATTENTIONS[name](view, cache, PAGE), backend, PAGE, 2)

    def draw(rows: int, generator: torch.Generator) -> Any:
        seed = int(torch.randint(1 << 30, (1,), generator=generator))
        one = kinds.random_requests(next(kinds.games(seed, 1))[0], name, PAGE, 2, rows)
        return kinds.batch_of(one, name, backend.device, seed)

    report = slotgraph.check(runner, draw, progress=False)
    if name == "TritonDecodeBalanced":  # as it says
        [only] = report.findings
        assert (only.check, only.slot) == ("poison", "seq_lens")
    else:
        assert report.ok, str(report)
