"""The model runner. It replaces an engine's own buffers, captures and replays."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paging.inputs import DecodeInputs, PrefillInputs, first_batch, prefill_batch
from paging.model import PagedModel
from paging.options import Options
from paging.request import PAGE, Request
from slotgraph import BATCH, BreakableRunner, DecodeRunner, attention
from slotgraph.backends import Backend
from slotgraph.extend import LaunchedStep


class ModelRunner:
    """Runs prompts and decode steps. width: the most pages that a request may have."""

    def __init__(self, model: PagedModel, options: Options, backend: Backend, width: int) -> None:
        self._ahead, self._chunk = options.ahead, options.chunk
        self._decode = DecodeRunner(
            DecodeInputs,
            model.decode,
            sizes={attention.PAGES: width, attention.PAGE_SIZE: PAGE},
            buckets=options.buckets,
            output_rows=BATCH,
            chunks=[options.chunk] if options.chunk > 1 else [],
            backend=backend,
        )
        self._prefill = BreakableRunner(
            PrefillInputs,
            model.prefill,
            stack=model.model.base_model,
            sizes={attention.PAGES: width},
            buckets=options.prefill_buckets,
            max_batch=options.buckets[-1],
            output_rows=BATCH,
            backend=backend,
        )

    def capture(self) -> None:
        """Capture all graphs."""
        self._prefill.capture()
        self._decode.capture()

    def prefill(self, requests: Sequence[Request]) -> torch.Tensor:
        """Run prompts; return the token after each, on the device."""
        tokens: torch.Tensor = self._prefill(prefill_batch(requests))
        return tokens

    def steps(self, requests: Sequence[Request], first: torch.Tensor) -> Iterator[LaunchedStep]:
        """Decode step after step, launched ahead of what the host reads, until no request is left."""
        options: Any = {"ahead": self._ahead, "chunk": self._chunk, "needs": ["page_table"]}
        return self._decode.steps(first_batch(requests, first), keys=requests, **options)

    def join(self, step: LaunchedStep, requests: Sequence[Request], first: torch.Tensor) -> None:
        """Say that requests join."""
        step.join(first_batch(requests, first), requests)
