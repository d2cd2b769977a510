"""Llamas with random weights, and the demo's decode step over a paged cache with batches for it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from serving.attention import paged
from serving.batch import decode_batch
from serving.cache import PagedCache
from serving.inputs import PAGES, DecodeInputs
from serving.request import Request
from serving.steps import Steps
from slotgraph import DecodeRunner
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import AUTO

PAGE_SIZE = 16
CONTEXT = 256
"""Tokens that each request's attention reaches over."""
SETS = 4
REACH = CONTEXT // PAGE_SIZE


@attrs.frozen(kw_only=True)
class Shape:
    """A model's sizes."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int

    def model(self, device: torch.device, dtype: torch.dtype, room: int) -> Any:
        """A model for contexts of so many tokens."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=room,
            tie_word_embeddings=True,
        )
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)
        return model.to(dtype=dtype).eval()


FOUR = Shape(
    name="4 layers, 1024 wide", layers=4, hidden=1024, heads=16, kv_heads=4, intermediate=2816, vocabulary=32000
)
HALF = Shape(name="24 layers, 0.5B", layers=24, hidden=896, heads=14, kv_heads=2, intermediate=4864, vocabulary=151936)
TINY = Shape(name="tiny", layers=2, hidden=32, heads=2, kv_heads=1, intermediate=32, vocabulary=64)


def steps_of(shape: Shape, device: torch.device, dtype: torch.dtype, requests: int) -> Steps:
    """A model over a cache that holds so many requests."""
    model = shape.model(device, dtype, CONTEXT)
    return Steps.over(model, PagedCache.empty(model, 1 + requests * REACH, PAGE_SIZE))


def runner_of(
    steps: Steps, backend: Backend, buckets: Sequence[int], lowering: str = AUTO
) -> DecodeRunner[DecodeInputs]:
    """A captured runner of the decode step."""
    given: dict[str, Any] = {"sizes": {PAGES: REACH}, "lowering": lowering, "progress": False}
    runner = DecodeRunner(DecodeInputs, steps.decode, buckets=list(buckets), backend=backend, **given)
    runner.capture()
    return runner


def batches_of(live: int, device: torch.device) -> list[DecodeInputs]:
    """Batches of so many requests near the end of their context that take turns, each with tensors of its own."""

    def request(number: int, row: int) -> Request:
        return Request(
            number=row,
            prompt="",
            prompt_ids=[1] * (CONTEXT - SETS + number - row),
            arrival=0,
            limit=SETS,
            generated=[2 + number + row],
            pages=list(range(1 + row * REACH, 1 + (row + 1) * REACH)),
        )

    return [decode_batch([request(number, row) for row in range(live)], PAGE_SIZE, device) for number in range(SETS)]


@contextlib.contextmanager
def served(steps: Steps) -> Iterator[None]:
    """As in an engine."""
    with paged(steps.model), torch.inference_mode():
        yield
