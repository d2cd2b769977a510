"""Attention from each set in replayed graphs: as each request by itself; and `slotgraph.check` on each declaration."""

import random
import types
import warnings
from typing import Any

import attrs
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import slotgraph
from slotgraph import BATCH, SEQ_LEN_FILL, TOKENS, copied
from slotgraph.backends import Backend
from slotgraph.backends.cpu import CpuBackend
from slotgraph.runners.check.checks import CheckReport
from tests.runners.attention import kinds
from tests.runners.attention.attended import ATTENTIONS, expected
from tests.runners.models import recording

PAGE = 4
EVEN = [name for name in ATTENTIONS if not kinds.is_ragged(name)]
RAGGED = [name for name in ATTENTIONS if kinds.is_ragged(name)]


def cache_on(device: torch.device, page: int = PAGE) -> torch.Tensor:
    """Keys, which are their own values, of every place of every page."""
    return torch.randn((1 + max(kinds.BUCKETS) * kinds.PAGES) * page, 4, generator=torch.Generator().manual_seed(2)).to(
        device
    )


@pytest.mark.parametrize(
    ("name", "width"), [(name, width) for name in EVEN for width in kinds.WIDTHS.get(name, (1, 3))]
)
def test_replayed_attention_is_each_requests_own(name: str, width: int, backend: Backend) -> None:
    """Of lengths and pages other than those of the capture, in buckets that are full and in padded ones."""
    cache = cache_on(backend.device)
    runner = kinds.decoder(name, lambda view: ATTENTIONS[name](view, cache, PAGE), backend, PAGE, width)
    for seed, (draw, rows) in enumerate(kinds.games(11, 25)):
        one = kinds.random_requests(draw, name, PAGE, width, rows, width)
        batch = kinds.batch_of(one, name, backend.device, seed)
        torch.testing.assert_close(runner(batch), expected(name, one, batch["queries"], cache), atol=1e-5, rtol=1e-5)
    assert not runner.stats()["eager"]


@pytest.mark.slow
def test_flex_attention_takes_the_block_mask() -> None:
    """Torch's own flex attention, compiled for the CPU, with the mask of a replayed step."""
    cache, backend = cache_on(torch.device("cpu"), 16), CpuBackend()
    runner = kinds.decoder("FlexDecode", lambda view: view.queries * 2, backend, 16, 1)
    pages = cache.shape[0] // 16
    for seed, (draw, _) in enumerate(kinds.games(13, 10)):
        one = kinds.random_requests(draw, "FlexDecode", 16, 1, 6, 1)
        batch = kinds.batch_of(one, "FlexDecode", backend.device, seed)
        view = runner.fill(batch)
        runner.replay(view)

        def sees(b: torch.Tensor, _h: Any, _q: Any, place: torch.Tensor, lens: torch.Tensor = view.seq_lens) -> Any:
            return place % 16 < lens[b] % 16

        # the kernel for CPUs alone asks for as many columns as the cache has pages
        part, full = (
            torch.nn.functional.pad(indices, (0, pages - kinds.PAGES))
            for indices in (view.kv_indices, view.page_table[:, None, None])
        )
        mask = BlockMask.from_kv_blocks(
            view.kv_num_blocks,
            part,
            view.full_kv_num_blocks,
            full,
            BLOCK_SIZE=(128, 16),
            mask_mod=sees,
            seq_lengths=(1, cache.shape[0]),
            compute_q_blocks=False,
        )
        with warnings.catch_warnings(action="ignore"):  # the compiler's own
            compiled: Any = torch.compile(flex_attention)
            keys = cache[None, None]
            found = compiled(view.queries[:, None, None], keys, keys, scale=1.0, block_mask=mask)
        right = expected("FlexDecode", one, batch["queries"], cache)
        torch.testing.assert_close(found[:6, 0, 0], right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", RAGGED)
def test_replayed_attention_of_a_prefill_is_each_requests_own(name: str, backend: Backend) -> None:
    """A whole prefill in one graph, of requests with query tokens of their own number."""
    cache = cache_on(backend.device)
    _ = torch.ones(1, 1, device=backend.device).mm(
        torch.ones(1, 1, device=backend.device)
    )  # libraries set themselves up
    buffers, padded = kinds.buffers_of(name, backend, PAGE, 1), {BATCH: 8, TOKENS: 48}
    bucket = buffers.at(padded)

    def captured() -> torch.Tensor:
        bucket.fill_in_graph()
        return ATTENTIONS[name](bucket.view(), cache, PAGE)

    graph: Any = None
    for seed, (draw, rows) in enumerate(kinds.games(12, 25)):
        one = kinds.random_requests(draw, name, PAGE, 1, rows, 1)
        batch = kinds.batch_of(one, name, backend.device, seed)
        bucket.fill(batch)
        graph = backend.capture(captured) if graph is None else graph
        graph.replay()
        found = graph.outputs[: sum(one.queries)]
        torch.testing.assert_close(found, expected(name, one, batch["queries"], cache), atol=1e-5, rtol=1e-5)


def accepted(name: str) -> Any:
    """A declaration for a user who accepts that all requests of a bucket decide how each is split."""
    given: Any = {"dtype": torch.int32, "pad": SEQ_LEN_FILL, "converts": (torch.int64,), "poison": ()}
    body = {"__annotations__": {"seq_lens": torch.Tensor}, "seq_lens": copied(BATCH, **given), "__module__": __name__}
    return types.new_class(f"Accepted{name}", (kinds.with_tokens(name),), {}, lambda space: space.update(body))


def checked(name: str, inputs: Any, backend: Backend, rounds: int) -> CheckReport:
    """The report on a runner of a declaration, with batches of random requests."""
    cache, width = cache_on(backend.device), kinds.WIDTHS.get(name, (2,))[0]
    runner = kinds.decoder(inputs, lambda view: ATTENTIONS[name](view, cache, PAGE), backend, PAGE, width)

    def draw(rows: int, generator: torch.Generator) -> Any:
        seed = int(torch.randint(1 << 30, (1,), generator=generator))
        one = kinds.random_requests(random.Random(seed), name, PAGE, width, rows, width)
        one = attrs.evolve(one, queries=[width] * rows)
        return kinds.batch_of(one, name, backend.device, seed)

    return slotgraph.check(runner, draw, rounds=rounds, progress=False)


@recording
@pytest.mark.parametrize("name", ATTENTIONS)
def test_check_finds_nothing(name: str, backend: Backend) -> None:
    """Poison in tails reaches no live row, and each graph does what its step does."""
    report = checked(name, accepted(name) if name in kinds.WHOLE_STEP else name, backend, 2)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds.WHOLE_STEP)
def test_check_finds_that_requests_decide_how_others_are_split(name: str, backend: Backend) -> None:
    """These spread a step's work over the device: padded rows change the last bits of live ones."""
    found = checked(name, name, backend, 8).findings
    assert [(one.check, one.slot) for one in found] == [("poison", "seq_lens")]
