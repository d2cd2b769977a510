"""Class B: values derived from others are wrong for the padded bucket, or for the step."""

import pytest
import torch

from slotgraph import BATCH, TOKENS, Inputs, Step, computed, copied
from slotgraph.errors import BatchError
from tests.regressions.engines import ByHand, Views, captured, draw


def pages_of(lengths: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """How many pages each request's attention finds: those of its own that lie below the total that was planned."""
    ends = lengths.cumsum(0)
    starts = ends - lengths
    return torch.minimum(ends, total) - torch.minimum(starts, total)


def total_of(seq_lens: torch.Tensor) -> torch.Tensor:
    """The sum of all lengths, those of padded rows among them."""
    total: torch.Tensor = seq_lens.sum(0, keepdim=True)
    return total


class Lengths(Inputs):
    """A length of 2 in padded rows, so that their part of the sum is seen."""

    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=2)
    seq_lens_sum: torch.Tensor = computed(total_of, shape=1, dtype=torch.int64)


def test_sglang_1789_a_sum_that_forgets_padded_rows() -> None:
    """The sum of lengths is that of the batch, while the graph lays out pages for every row of the bucket."""
    engine = ByHand(
        lambda views: pages_of(views["lengths"], views["total"][0]),
        4,
        lengths=torch.full((4,), 2),
        total=torch.zeros(4, dtype=torch.int64),
    )
    lengths = draw(3, 9, (2,), 1)
    engine(lengths=lengths, total=lengths.sum().expand(2))
    assert engine.graph.outputs.tolist() != [*lengths.tolist(), 2, 2]  # padded rows find nothing

    runner = captured(Lengths, lambda view: pages_of(view.seq_lens, view.seq_lens_sum), output_rows=None)
    assert runner({"seq_lens": lengths}).tolist() == [*lengths.tolist(), 2, 2]
    assert runner.fill({"seq_lens": lengths}).seq_lens.tolist() == [*lengths.tolist(), 2, 2]


def test_sglang_26880_a_sum_of_the_step_before() -> None:
    """The draft's graph takes the sum that another runner's fill left, since its own fill does not pad it."""
    sums = torch.zeros(1, dtype=torch.int64)
    lengths = torch.full((4,), 2)
    engine = ByHand(lambda views: pages_of(views["lengths"], sums), 4, lengths=lengths)
    sums.fill_(9)  # by the target's fill, of its own batch
    found = engine(lengths=torch.tensor([7, 8]))
    assert found.tolist() != [7, 8]

    runner = captured(Lengths, lambda view: pages_of(view.seq_lens, view.seq_lens_sum))
    for batch in ([4, 5], [7, 8], [1]):
        assert runner({"seq_lens": batch}).tolist() == batch  # the sum is part of the graph: none can be older


def starts(step: Step) -> list[int]:
    """Where each request's queries begin: as many tokens apart as this runner's requests have."""
    width = step.padded(TOKENS) // step.padded(BATCH)
    return [width * row for row in range(step.padded(BATCH) + 1)]


class Queries(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)
    qo_indptr: torch.Tensor = computed(starts, shape=BATCH + 1, dtype=torch.int64)


def firsts(ids: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """The first token of each request."""
    return ids[indptr[:-1].clamp(max=len(ids) - 1)]


def test_sglang_27545_a_stride_of_another_width() -> None:
    """Queries are laid out by the number of drafted tokens, and looked for by the number of steps and one."""
    drafted, steps = 6, 3
    ids = draw(1, 99, (3 * drafted,), 3)

    def step(views: Views) -> torch.Tensor:
        return firsts(views["ids"], torch.arange(4) * (steps + 1)).repeat_interleave(drafted)

    engine = ByHand(step, 3 * drafted, ids=torch.zeros(3 * drafted, dtype=torch.int64))
    found = engine(ids=ids)[::drafted]
    assert found[0] == ids[0]  # one request alone is right
    assert found.tolist() != ids[::drafted].tolist()

    runner = captured(Queries, lambda view: firsts(view.ids, view.qo_indptr), width=drafted, output_rows=BATCH)
    lengths = torch.ones(3, dtype=torch.int32)
    assert runner({"ids": ids, "seq_lens": lengths}).tolist() == ids[::drafted].tolist()
    other = {"ids": ids[: 3 * (steps + 1)], "seq_lens": lengths}  # four tokens a request
    with pytest.raises(BatchError, match="expected"):
        runner(other)
