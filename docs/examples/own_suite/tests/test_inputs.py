"""What an engine's suite asks of its declaration and of its runner, on each backend that can run here."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import MAX_LEN, PAGES, DecodeInputs
from model import ADAPTERS, LOCATIONS, VOCAB, make_runner

import slotgraph
from slotgraph import BATCH, DecodeRunner
from slotgraph.backends import Backend
from slotgraph.testing import assert_fill_equals_oracle, batches

MOST = {BATCH: 8, PAGES: 4}


@pytest.fixture
def runner(slotgraph_backend: Backend) -> DecodeRunner[DecodeInputs]:
    """A captured runner on each backend."""
    return make_runner(slotgraph_backend)


def make_batch(rows: int, generator: torch.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch whose lengths fit its tables, which no declaration tells; some have adapters. Location 0 is no one's."""

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    pages = int(whole(1, MOST[PAGES]))
    batch = {
        "input_ids": whole(0, VOCAB - 1, rows),
        "positions": whole(0, MAX_LEN - 1, rows),
        "seq_lens": whole(1, pages, rows).int(),
        "out_cache_loc": 1 + torch.randperm(LOCATIONS - 1, generator=generator)[:rows],
        "tables": {"blocks": whole(1, LOCATIONS - 1, rows, pages).int()},
        "temperatures": 0.5 + torch.rand(rows, generator=generator),
    }
    return batch, {"lora": {"ids": whole(0, ADAPTERS - 1, rows)}} if whole(0, 1) else {}


def test_fills(slotgraph_backend: Backend) -> None:
    """Every lowering leaves the bytes that the plainest fill leaves, tails included."""
    assert_fill_equals_oracle(DecodeInputs, MOST, backend=slotgraph_backend, max_examples=20)


def test_checks(runner: DecodeRunner[DecodeInputs]) -> None:
    """Nothing that padded rows hold reaches a live one, and graphs do what the step does, in each bucket."""
    slotgraph.check(runner, make_batch, only=["poison", "parity"]).raise_if_failed()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_the_kernel_is_told(runner: DecodeRunner[DecodeInputs], data: st.DataObject) -> None:
    """A property of one's own, over drawn batches: counts are of live requests, however a batch is padded."""
    sample = data.draw(batches(DecodeInputs, MOST, backend=runner.stage.backend))
    view, rows = runner.fill(sample.batch, **sample.side), len(sample.batch["input_ids"])
    assert view.num_requests.item() == rows
    assert not view.positions[rows:].any()
