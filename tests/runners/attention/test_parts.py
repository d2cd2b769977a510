"""Parts of a batch and of a cache: micro-batches of each declaration, in steps and prefills, and ranks of a group."""

import random
import types
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import BATCH, SEQ_LEN_FILL, TOKENS, DecodeRunner, attention, copied
from slotgraph.backends import Backend
from tests.runners.attention import builders, kinds
from tests.runners.attention.attended import expected, flashinfer_window
from tests.runners.attention.builders import BUILDERS, Requests
from tests.runners.attention.test_attention import cache_on
from tests.runners.attention.test_layouts import EVEN, FILLED

RAGGED: Final = [name for name in FILLED if kinds.is_ragged(name)]
PAGED: Final = [name for name in EVEN if name != "LinearAttentionVerify"]  # it has no lengths that advance
PARTS: Final = ((0, 3), (3, 8)), ((0, 1), (1, 8)), ((0, 7), (7, 8)), ((0, 4), (4, 8))
"""The requests of two micro-batches."""


def part_of(whole: Requests, rows: tuple[int, int]) -> Requests:
    """These requests of a step alone."""
    lists = ("lens", "table", "queries", "states", "accepted", "window_table")
    return attrs.evolve(whole, **{name: getattr(whole, name)[slice(*rows)] for name in lists})


def assert_equal(got: torch.Tensor, expected: Any, slot: str) -> None:
    """A slot holds these numbers."""
    assert torch.equal(got.cpu(), torch.tensor(expected, dtype=got.dtype)), slot


@pytest.mark.parametrize("halves", PARTS)
@pytest.mark.parametrize("name", RAGGED)
def test_micro_batches_of_a_prefill(name: str, halves: Any, backend: Backend) -> None:
    """Each has the requests that `narrow` names, and their tokens, of their own number."""
    one = kinds.random_requests(random.Random(7), name, 4, 1, 8, 2)
    buffers = kinds.buffers_of(name, backend, 4, 1)
    batch = kinds.batch_of(one, name, backend.device) | {"page_table": one.table}
    view = buffers.at({BATCH: 8, TOKENS: sum(one.queries)}).fill(batch)
    row = 0
    for rows in halves:
        own = part_of(one, rows)
        half = view.narrow(BATCH, *rows, tokens=(row, row + sum(own.queries)))
        row += sum(own.queries)
        for slot, values in BUILDERS[name](own).items():
            got = getattr(half, slot)
            assert_equal(got, values[: len(got)] if slot.startswith("cu_seqlen_k") else values, slot)


def growing(name: str) -> Any:
    """The declaration of that name, whose lengths are one more in each step."""
    given: Any = {"dtype": torch.int32, "pad": SEQ_LEN_FILL, "converts": (torch.int64,)}
    slot, length = "seq_lens", copied(BATCH, **given, then=lambda seq_lens: seq_lens + 1)
    if name == "ContextParallel":
        slot = "global_seq_lens"
        length = copied(BATCH, **given, source="seq_lens", then=lambda global_seq_lens: global_seq_lens + 1)
    body = {"__annotations__": {slot: torch.Tensor}, slot: length, "__module__": __name__}
    return types.new_class(f"Growing{name}", (kinds.with_tokens(name),), {}, lambda space: space.update(body))


@pytest.mark.parametrize("name", PAGED)
def test_micro_batches_in_steps(name: str, backend: Backend) -> None:
    """Two halves in one captured step, uneven ones: in each step each has what the builder makes of its requests."""
    halves, inputs = PARTS[0], growing(name)
    drawn = kinds.random_requests(random.Random(5), name, 4, 1, 8, 1)
    one = attrs.evolve(drawn, lens=[min(length, 4 * kinds.PAGES - 6) for length in drawn.lens])
    slots = [*BUILDERS[name](one)]

    def step(view: Any) -> list[torch.Tensor]:
        return [
            getattr(half, slot).clone() for half in (view.narrow(BATCH, *rows) for rows in halves) for slot in slots
        ]

    given: dict[str, Any] = {"buckets": [8], "output_rows": None, "progress": False}
    runner: DecodeRunner[Any] = DecodeRunner(
        inputs, step, width=1, sizes=kinds.sizes_of(inputs, 4), backend=backend, **given
    )
    runner.capture()
    batch = kinds.batch_of(one, name, backend.device) | {"page_table": one.table}
    for now in runner.steps(batch, ahead=1):
        found = iter(now.outputs)
        whole = attrs.evolve(one, lens=[length + now.number for length in one.lens])
        for rows in halves:
            for slot, values in BUILDERS[name](part_of(whole, rows)).items():
                assert_equal(next(found), values, slot)
        if now.number == 4:
            break


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kernel", ["FlashInferDecode", "FlashAttention"])
def test_ranks_of_a_group_have_the_whole_sequence_together(
    kernel: str, ranks: int, interleave: int, backend: Backend
) -> None:
    """Each attends to its part by a kernel's own set; put together by their logarithms of sums it is all attention."""
    page, width = 4, 1
    bases = (kinds.Tokens, attention.ContextParallel, kinds.KINDS[kernel])
    inputs: Any = types.new_class("Parted", bases, {})
    cache = cache_on(backend.device, page)
    runners = list[DecodeRunner[Any]]()
    caches = [torch.zeros_like(cache) for _ in range(ranks)]
    for rank in range(ranks):
        sizes = {
            **kinds.sizes_of(inputs, page),
            attention.CONTEXT_RANKS: ranks,
            attention.CONTEXT_RANK: rank,
            attention.INTERLEAVE: interleave,
        }

        def step(view: Any, own: torch.Tensor = caches[rank]) -> torch.Tensor:
            return with_sums(view, own, page)

        runner: DecodeRunner[Any] = DecodeRunner(
            inputs, step, buckets=kinds.BUCKETS, width=width, sizes=sizes, backend=backend, progress=False
        )
        runner.capture()
        runners.append(runner)
    for seed, (draw, rows) in enumerate(kinds.games(19, 12)):
        one = kinds.random_requests(draw, kernel, page, width, rows, 1)
        parts = list[torch.Tensor]()
        for rank, runner in enumerate(runners):
            own = parted(one, cache, caches[rank], rank, ranks, interleave)
            parts.append(runner(kinds.batch_of(own, kernel, backend.device, seed)).clone())
        found, logs = torch.stack(parts).split([4, 1], 2)
        weights = logs.softmax(0)
        queries = kinds.batch_of(one, kernel, backend.device, seed)["queries"]
        torch.testing.assert_close(
            (found * weights).sum(0), expected(kernel, one, queries, cache), atol=1e-5, rtol=1e-5
        )


def parted(one: Requests, cache: torch.Tensor, own: torch.Tensor, rank: int, ranks: int, interleave: int) -> Requests:
    """Move the keys of a rank's tokens into its cache, one behind the other. Return the requests with its pages."""
    table = list[list[int]]()
    for request, row in enumerate(one.table):
        places = one.places_of(request)
        mine = [place for token, place in enumerate(places) if token // interleave % ranks == rank]
        for number, place in enumerate(mine):
            own[row[number // one.page] * one.page + number % one.page] = cache[place]
        table.append(list(row))
    return attrs.evolve(one, table=table)


def with_sums(view: Any, cache: torch.Tensor, page: int) -> torch.Tensor:
    """Attention of a rank's part, and its logarithm of the sum: one number a token, -inf if the part has no token."""
    lens = view.seq_lens
    if hasattr(view, "kv_indptr"):
        counts = view.kv_indptr.diff()
        lens = (counts - 1).clamp(min=0) * page + view.kv_last_page_len
    places = (view.page_table.long()[:, :, None] * page + torch.arange(page, device=cache.device)).flatten(1)
    keys = cache[places]
    scores = (keys @ view.queries[:, :, None])[:, :, 0]
    seen = torch.arange(places.shape[1], device=cache.device) < lens[:, None]
    masked = scores.masked_fill(~seen, -1e9)
    logs = masked.logsumexp(1, keepdim=True)
    return torch.cat([(masked.softmax(1)[:, :, None] * keys).sum(1), torch.where(lens[:, None] > 0, logs, -1e9)], 1)


@pytest.mark.parametrize("batches", [40, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", ["SparseIndexerSchedule", "TritonBalanced"])
def test_long_sequences(name: str, width: int, batches: int, backend: Backend) -> None:
    """Of many splits each, and of lengths whose logarithm counts."""
    page = 700
    runner = kinds.decoder(name, lambda view: view.queries * 2, backend, page, width)
    for seed, (draw, rows) in enumerate(kinds.games(23, batches)):
        one = kinds.random_requests(draw, name, page, width, rows)
        view = runner.fill(kinds.batch_of(one, name, backend.device, seed))
        runner.replay(view)
        made = builders.BUILDERS[name](kinds.padded(one, name, width, kinds.bucket_of(rows), backend))
        slot = "num_kv_splits" if name == "TritonBalanced" else "schedule_metadata"
        assert_equal(getattr(view, slot), made[slot], slot)


@pytest.mark.parametrize("bases", [("FlashInferVerify", "FlashInferWindow"), ("FlashInferWindow", "FlashInferVerify")])
def test_windows_of_several_tokens(bases: tuple[str, ...], backend: Backend) -> None:
    """In a verify step a set has the tokens of all windows of a request, and the kernel each token's own."""
    page, width = 4, 3
    inputs: Any = types.new_class("VerifyWindow", (kinds.Tokens, *(kinds.KINDS[name] for name in bases)), {})
    covered = builders.WINDOW + width - 1
    sizes = kinds.sizes_of(inputs, page)
    sizes[attention.WINDOW] = covered
    cache = cache_on(backend.device, page)
    given: dict[str, Any] = {"buckets": kinds.BUCKETS, "width": width, "output_rows": TOKENS, "progress": False}
    runner: DecodeRunner[Any] = DecodeRunner(
        inputs, lambda view: flashinfer_window(view, cache, page), sizes=sizes, backend=backend, **given
    )
    runner.capture()
    for seed, (draw, rows) in enumerate(kinds.games(29, 25)):
        one = kinds.random_requests(draw, "FlashInferWindow", page, width, rows, width)
        batch = kinds.batch_of(one, "FlashInferWindow", backend.device, seed)
        whole = expected("FlashInferWindow", one, batch["queries"], cache)
        torch.testing.assert_close(runner(batch), whole, atol=1e-5, rtol=1e-5)
    assert not runner.stats()["eager"]
