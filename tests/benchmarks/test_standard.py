"""Fill and view of each runner's standard declaration at the sizes of a server, against the same by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from slotgraph import BATCH, TOKENS, standard

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")
SIZES = {
    standard.HIDDEN: 1024,
    standard.VOCAB: 4,
    standard.FILL: 1,
    standard.TOPK: 4,
    standard.STEPS: 3,
    standard.FRONT: 2,
}
WIDTHS = {
    standard.DecodeInputs: 1,
    standard.TargetVerifyInputs: 8,
    standard.EagerInputs: 1,
    standard.DraftInputs: 4,
    standard.DraftExtendInputs: 8,
    standard.MultiLayerDraftExtendInputs: 10,
}
"""Declarations of requests, and the tokens that a request has."""


@pytest.mark.parametrize("inputs", WIDTHS, ids=lambda inputs: inputs.__name__)
def test_requests(benchmark_fill: Callable[..., Any], inputs: Any) -> None:
    """200 of 256 requests."""
    sizes = {axis: size for axis, size in SIZES.items() if axis in inputs.slotgraph.axes}
    told: dict[str, Any] = {"settings": standard.Sharding(), "relations": {TOKENS: BATCH * WIDTHS[inputs]}}
    benchmark_fill(inputs, {**sizes, BATCH: 256}, {BATCH: 200}, **told)


def test_prefill(benchmark_fill: Callable[..., Any]) -> None:
    """1,800 of 2,048 tokens, of eight requests."""
    lengths = {"extend_seq_lens": (225, 225)}
    live = {BATCH: 8, TOKENS: 1800}
    benchmark_fill(
        standard.BreakableInputs, {BATCH: 8, TOKENS: 2048}, live, settings=standard.Sharding(), values=lengths
    )
