"""The model runner. It replaces an engine's own buffers, captures and replays."""

from collections.abc import Iterator, Sequence

import torch

from paging.inputs import DecodeInputs, PrefillInputs, decode_batch, prefill_batch
from paging.model import PagedModel
from paging.options import Options
from paging.request import PAGE, Request
from slotgraph import BATCH, BreakableRunner, DecodeRunner, attention
from slotgraph.backends import Backend
from slotgraph.extend import LaunchedStep


class ModelRunner:
    """Runs prompts and decode steps. width: the most pages that a request may have."""

    def __init__(self, model: PagedModel, options: Options, backend: Backend, width: int) -> None:
        self._decode = DecodeRunner(
            DecodeInputs,
            model.decode,
            sizes={attention.PAGES: width, attention.PAGE_SIZE: PAGE},
            buckets=options.buckets,
            output_rows=BATCH,
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

    def prefill(self, requests: Sequence[Request]) -> list[int]:
        """Run prompts; return the token after each. This waits for the device."""
        tokens: torch.Tensor = self._prefill(prefill_batch(requests))
        first: list[int] = tokens.tolist()
        return first

    def steps(self, requests: Sequence[Request], ahead: int) -> Iterator[LaunchedStep]:
        """Decode step after step, launched ahead of what the host reads, until no request is left."""
        return self._decode.steps(decode_batch(requests), keys=requests, ahead=ahead, needs=["page_table"])

    def join(self, step: LaunchedStep, requests: Sequence[Request]) -> None:
        """Say that requests join."""
        step.join(decode_batch(requests), requests)
