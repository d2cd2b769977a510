"""The draft-extend runner: many tokens a request go in, one row a request comes out, for one width."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import standard
from slotgraph.backends import load
from slotgraph.dataflow.errors import ConfigError
from slotgraph.speculative import WIDTH, DraftExtendRunner
from tests.runners.models import Batch, same_batch, snapshot

WORDS, WIDE = 20, 4
_DRAW = torch.Generator().manual_seed(9)
TABLE = torch.randn(WORDS, WIDE, generator=_DRAW, dtype=torch.float64)


@standard.model_dtype(torch.float64)
class ExtendInputs(standard.DraftExtendInputs, drop=("next_token_logits",)):
    """The standard's; the step returns its rows."""


@functools.cache
def table_on(device: torch.device) -> torch.Tensor:
    """The table on a device; moved there in a warm-up, since a captured step could not."""
    return TABLE.to(device)


def step(view: Any) -> Any:
    """The row of each request's last accepted token, which hangs on all of the request's tokens up to it."""
    requests = view.seq_lens.shape[0]
    rows = table_on(view.input_ids.device)[view.input_ids] * view.positions[:, None] + view.hidden_states
    sums = rows.view(requests, -1, WIDE).cumsum(1).flatten(0, 1)
    return sums[view.select_index] + view.extend_seq_lens[:, None]


def plain(batch: Batch, width: int) -> torch.Tensor:
    """The same, request by request."""
    found = []
    for request, count in enumerate(batch["num_accept_tokens"].tolist()):
        total = torch.full((WIDE,), float(width), dtype=torch.float64)
        for row in range(request * width, request * width + count):
            total += TABLE[batch["input_ids"][row]] * batch["positions"][row] + batch["hidden_states"][row]
        found.append(total)
    return torch.stack(found) if found else torch.empty(0, WIDE, dtype=torch.float64)


def batch_of(requests: int, width: int, seed: int, device: Any = "cpu") -> Batch:
    """A random batch, of which each request has accepted 1 to `width` tokens."""
    draw = torch.Generator().manual_seed(seed)
    accepted = torch.randint(1, width + 1, (requests,), generator=draw, dtype=torch.int32)
    batch = {
        "req_pool_indices": torch.arange(1, requests + 1),
        "seq_lens": torch.randint(width, 99, (requests,), generator=draw, dtype=torch.int32),
        "input_ids": torch.randint(1, WORDS, (requests * width,), generator=draw),
        "positions": torch.randint(1, 99, (requests * width,), generator=draw),
        "out_cache_loc": 1 + torch.randperm(requests * width, generator=draw),
        "hidden_states": torch.randn(requests * width, WIDE, generator=draw, dtype=torch.float64),
        "num_correct_drafts": accepted - 1,
        "num_accept_tokens": accepted,
    }
    return {name: value.to(device) for name, value in batch.items()}


@functools.cache
def captured(backend: str, width: int) -> DraftExtendRunner[ExtendInputs]:
    """A captured runner of one width."""
    runner = DraftExtendRunner(
        ExtendInputs,
        step,
        width=width,
        sizes={standard.HIDDEN: WIDE},
        absent=[{"seq_lens_cpu"}],
        buckets=[2, 5],
        backend=backend,
    )
    runner.capture()
    return runner


@settings(max_examples=25)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 999)), min_size=1, max_size=4))
def test_one_row_a_request(backend_name: str, width: int, drawn: list[tuple[int, int]]) -> None:
    """Whatever the width, and how much was accepted, each request's row is that of its last accepted token."""
    device = load(backend_name)().device
    for requests, seed in drawn:
        batch = batch_of(requests, width, seed, device)
        given, got = snapshot(batch), captured(backend_name, width)(batch)
        due = plain({name: value.cpu() for name, value in batch.items()}, width)
        torch.testing.assert_close(torch.as_tensor(got).cpu(), due)
        assert same_batch(batch, given)


def test_a_width_is_needed() -> None:
    """There is no width to assume, and none that contradicts itself."""
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'width'"):
        DraftExtendRunner(ExtendInputs, step, sizes={standard.HIDDEN: WIDE}, backend="cpu")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="sizes of WIDTH is 3, and width= is 2"):
        DraftExtendRunner(ExtendInputs, step, width=2, sizes={standard.HIDDEN: WIDE, WIDTH: 3}, backend="cpu")
    with pytest.raises(ConfigError, match="option 'width': expected int between 1 and 16777216, got 0"):
        DraftExtendRunner(ExtendInputs, step, width=0, sizes={standard.HIDDEN: WIDE}, backend="cpu")
