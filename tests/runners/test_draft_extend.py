"""The draft-extend runner: many tokens a request go in, one row a request comes out, for one width."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, Inputs, standard
from slotgraph.backends import load
from slotgraph.dataflow.errors import BatchError, CaptureError, ConfigError
from slotgraph.runners.watching import Watcher
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


def test_constants_follow_the_width(cpu: str) -> None:
    """Two runners of two widths have their own counts and indices, and each says which batches it takes."""
    for width in (2, 3):
        view = captured(cpu, width).fill(batch_of(3, width, 1))
        captured(cpu, width).replay(view)
        assert view.extend_seq_lens.tolist() == [width] * 5
        assert view.select_index.tolist()[3:] == [width * row + width - 1 for row in (3, 4)]
        with pytest.raises(BatchError, match=rf"have {5 - width} tokens each, .* captured for {width}|expected int64"):
            captured(cpu, width)(batch_of(3, 5 - width, 1))


def test_a_width_is_needed() -> None:
    """There is no width to assume, and none that contradicts itself."""
    with pytest.raises(ConfigError, match="DraftExtendRunner needs width=: how many tokens each request has in a step"):
        DraftExtendRunner(ExtendInputs, step, sizes={standard.HIDDEN: WIDE}, backend="cpu")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="sizes of WIDTH is 3, and width= is 2"):
        DraftExtendRunner(ExtendInputs, step, width=2, sizes={standard.HIDDEN: WIDE, WIDTH: 3}, backend="cpu")
    with pytest.raises(ConfigError, match="option 'width': expected int between 1 and 16777216, got 0"):
        DraftExtendRunner(ExtendInputs, step, width=0, sizes={standard.HIDDEN: WIDE}, backend="cpu")


def test_a_row_a_token_is_no_row_a_request(cpu: str) -> None:
    """A step that returns a row for each token is refused, unless that is what was asked for."""

    def whole(view: Any) -> Any:
        return view.input_ids + 1

    options: dict[str, Any] = {"width": 2, "sizes": {standard.HIDDEN: WIDE}, "buckets": [4], "backend": cpu}
    with pytest.raises(CaptureError, match="output_rows="):
        DraftExtendRunner(ExtendInputs, whole, **options).capture()
    runner = DraftExtendRunner(ExtendInputs, whole, **options, output_rows=None, absent=[{"seq_lens_cpu"}])
    runner.capture()
    batch = batch_of(3, 2, 1)
    assert torch.equal(runner(batch)[:6], batch["input_ids"] + 1)
    assert BATCH in runner.stage.declaration.varying


def test_watchers_are_told_once(cpu: str) -> None:
    """The runner is made of another one with the same watchers, which hear of each fill and replay once."""
    told: list[str] = []

    class Telling(Watcher):
        def filled(self, view: Inputs) -> None:
            told.append(f"filled {type(view).__name__}")

        def replayed(self, view: Inputs, outputs: Any) -> Any:
            told.append(f"replayed {type(view).__name__}")
            return outputs

    runner, watcher = captured(cpu, 3), Telling()
    runner.watch.add(watcher)
    runner(batch_of(2, 3, 1))
    runner.replay(runner.fill(batch_of(3, 3, 2)))
    runner.watch.remove(watcher)
    assert told == ["filled ExtendInputs", "replayed ExtendInputs"] * 2
