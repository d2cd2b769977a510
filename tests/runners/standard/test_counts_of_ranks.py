"""The functions of counts over ranks against plain Python, over random sizes, ranks and shards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, Step, standard
from slotgraph.dataflow.errors import ComputeError, ConfigError
from slotgraph.runners.standard import counts
from tests.runners.standard.batches import ranked

Sizes = dict[Axis, int]
shards_of = st.integers(1, 5)
batches_of = st.lists(st.integers(0, 40), min_size=1, max_size=5)


def held(live: int, padded: int, place: int, shards: int) -> int:
    """Rows of one shard's part, counted one by one, that are live."""
    chunk = padded // shards
    return sum(row < live for row in range(chunk * place, chunk * (place + 1)))


def told(requests: list[int], width: int) -> list[Sizes]:
    """What each batch brings."""
    return [{BATCH: rows, TOKENS: rows * width} for rows in requests]


@given(requests=batches_of, width=st.integers(1, 4), shards=shards_of, spare=st.integers(0, 9), data=st.data())
def test_counts_of_every_batch(
    *, requests: list[int], width: int, shards: int, spare: int, data: st.DataObject
) -> None:
    """Each rank sees every batch's live tokens and requests once, whoever shares it, and however it is padded."""
    size = len(requests) * shards
    rank = data.draw(st.integers(0, size - 1))
    ranks = ranked(rank, size, shards, told(requests, width))
    fixed = {standard.DP: len(requests)}
    live = {BATCH: requests[rank // shards], TOKENS: requests[rank // shards] * width, **fixed}
    bucket = {BATCH: max(requests) + spare, TOKENS: (max(requests) + spare) * width, **fixed}
    for padded in (bucket, live):
        step = Step(live, padded)
        assert counts.agreed_tokens(step, ranks) == [rows * width for rows in requests]
        assert counts.agreed_requests(step, ranks) == requests


@given(requests=batches_of, shards=shards_of, chunk=st.integers(0, 12), rest=st.integers(0, 4))
def test_tokens_of_each_rank(requests: list[int], shards: int, chunk: int, rest: int) -> None:
    """A rank counts the live rows of its own part, as settings with its place do; all of a batch count it once."""
    padded = (max(requests) // shards + 1 + chunk) * shards + rest
    size = len(requests) * shards
    for batch, live in enumerate(requests):
        step, seen = Step({TOKENS: live}, {TOKENS: padded}), []
        for place in range(shards):
            ranks = ranked(batch * shards + place, size, shards, told(requests, 1))
            sharding = standard.Sharding(attn_tp_size=shards, attn_tp_rank=place, scattered=shards > 1)
            if padded % shards:
                said = rf"{padded} padded tokens do not divide among {shards} .* or name the slot in carry="
                with pytest.raises(ComputeError, match=said):
                    counts.own_tokens(step, ranks)
                continue
            seen.append(counts.own_tokens(step, ranks))
            assert seen[-1] == held(live, padded, place, shards) == counts.num_token_non_padded(step, sharding)
        assert sum(seen) == (0 if padded % shards else live)


@given(batches=st.integers(1, 4), shards=st.integers(2, 6), rest=st.integers(1, 5), rows=st.integers(0, 9))
def test_ranks_that_do_not_divide(batches: int, shards: int, rest: int, rows: int) -> None:
    """They cannot tell who shares a batch: every count refuses that, with the number of ranks and of shards."""
    size = batches * shards + min(rest, shards - 1)
    ranks = ranked(0, size, shards, told([rows], 1))
    sizes = {BATCH: rows, TOKENS: rows, standard.DP: batches}
    step = Step(sizes, sizes)
    assert ranks.batches == 0
    for count in (counts.own_tokens, counts.agreed_tokens, counts.agreed_requests):
        with pytest.raises(ConfigError, match=rf"{size} ranks do not divide so that each {shards} of them share"):
            count(step, ranks)


@given(requests=batches_of, shards=shards_of, asked=st.integers(1, 9))
def test_another_number_of_batches(requests: list[int], shards: int, asked: int) -> None:
    """DP has the size of what ranks bring; another is refused, and both are named."""
    size, right = len(requests) * shards, len(requests)
    sizes = {BATCH: requests[0], TOKENS: requests[0], standard.DP: asked + (asked >= right)}
    step, ranks = Step(sizes, sizes), ranked(0, size, shards, told(requests, 1))
    said = rf"DP = {sizes[standard.DP]}, and {size} ranks, .* each {shards} in a row .* bring {right}: give DP the size"
    with pytest.raises(ConfigError, match=said):
        counts.agreed_tokens(step, ranks)


def test_an_axis_that_nobody_tells() -> None:
    """Where no slot of the batch varies on it, ranks tell nothing of it, and zeros would pass for idle ranks."""
    sizes = {BATCH: 3, TOKENS: 4, standard.DP: 2}
    step, ranks = Step(sizes, sizes), ranked(1, 2, 1, [{BATCH: 2}, {BATCH: 3}])
    assert counts.agreed_requests(step, ranks) == [2, 3]
    with pytest.raises(ConfigError, match="ranks do not tell each other their live rows on TOKENS: declare"):
        counts.agreed_tokens(step, ranks)


def test_before_the_first_step() -> None:
    """Nobody has told anything yet."""
    sizes = {BATCH: 4, TOKENS: 4, standard.DP: 2}
    ranks = ranked(1, 4, 2, [{}, {}])
    assert counts.agreed_tokens(Step(sizes, sizes), ranks) == [0, 0]
