"""The same loop by hand: buffers, copies, captures and replays as small engines write them, with the same scheduler."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from paging.engine import LLMEngine
from paging.inputs import place, prefill_batch
from paging.model import PagedModel
from paging.options import Options
from paging.request import Request, pages_for
from slotgraph.backends import Backend


class HandRunner:
    """Runs prompts eagerly, and decode steps from graphs of its own on CUDA; elsewhere the step itself."""

    def __init__(self, model: PagedModel, options: Options, backend: Backend, width: int) -> None:
        self._model, self._device, self._width = model, backend.device, width
        self._sizes = options.buckets
        self._buffers = self.allocate(self._sizes[-1])
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def allocate(self, rows: int) -> dict[str, torch.Tensor]:
        """Return a buffer for each input, which stays at its address."""
        device = self._device
        return {
            "input_ids": torch.zeros(rows, dtype=torch.int64, device=device),
            "positions": torch.zeros(rows, dtype=torch.int64, device=device),
            "seq_lens": torch.ones(rows, dtype=torch.int32, device=device),
            "page_table": torch.zeros(rows, self._width, dtype=torch.int32, device=device),
            "out_cache_loc": torch.zeros(rows, dtype=torch.int64, device=device),
            "next_ids": torch.zeros(rows, dtype=torch.int64, device=device),
        }

    def capture(self) -> None:
        """Capture a graph for each batch size, the largest first: the others find room in its pool."""
        if self._device.type != "cuda":
            return
        pool = None
        for size in reversed(self._sizes):
            view = self.view(size)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._model.decode(view)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._model.decode(view)
            pool = graph.pool()
            self._graphs[size] = graph

    def view(self, size: int) -> Any:
        """Return the first rows of all buffers."""
        return SimpleNamespace(**{name: buffer[:size] for name, buffer in self._buffers.items()})

    def fill(self, batch: dict[str, Any], rows: int, size: int) -> None:
        """Copy the batch to the front, and reset the padded rows behind it."""
        buffers = self._buffers
        columns = {name: self.on_device(column, buffers[name].dtype) for name, column in batch.items()}
        buffers["input_ids"][:rows] = columns["input_ids"]
        buffers["input_ids"][rows:size] = 0
        buffers["positions"][:rows] = columns["positions"]
        buffers["positions"][rows:size] = 0
        buffers["seq_lens"][:rows] = columns["seq_lens"]
        buffers["seq_lens"][rows:size] = 1
        buffers["page_table"][:rows] = columns["page_table"]
        buffers["page_table"][rows:size] = 0
        place(columns["page_table"], columns["positions"], buffers["out_cache_loc"][:rows])
        buffers["out_cache_loc"][rows:size] = 0

    def batch(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the newest token of each request, with its place."""
        return {
            "input_ids": [request.generated[-1] for request in requests],
            "positions": [len(request) - 1 for request in requests],
            "seq_lens": [len(request) for request in requests],
            "page_table": [request.pages for request in requests],
        }

    def padded(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with page 0 behind the pages of each request."""
        tables = [pages + [0] * (self._width - len(pages)) for pages in batch["page_table"]]
        return {**batch, "page_table": tables}

    def on_device(self, numbers: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor, through pinned memory where there is a device, so that the copy does not wait."""
        pinned = torch.tensor(numbers, dtype=dtype, pin_memory=self._device.type == "cuda")
        return pinned.to(self._device, non_blocking=True)

    def decode(self, requests: Sequence[Request]) -> list[int]:
        """Run one step; return the token of each request."""
        rows = len(requests)
        size = next(size for size in self._sizes if size >= rows)
        self.fill(self.padded(self.batch(requests)), rows, size)
        if self._graphs:
            self._graphs[size].replay()
        else:
            self._model.decode(self.view(size))
        tokens: list[int] = self._buffers["next_ids"][:rows].tolist()
        return tokens

    def prefill(self, requests: Sequence[Request]) -> torch.Tensor:
        """Run prompts without a graph; return the token after each."""
        batch = self.padded(prefill_batch(requests))
        host = {name: batch.pop(name) for name in ("new_tokens", "lengths")}
        columns = {name: self.on_device(column, torch.int64) for name, column in batch.items()}
        view: Any = SimpleNamespace(**columns, **host)
        return self._model.prefill(view)


class HandEngine(LLMEngine):
    """Reads the tokens of each step before it launches the next one."""

    runner: HandRunner

    def run(self) -> None:
        """Run until no request waits or decodes."""
        scheduler, preempted = self.scheduler, list[Request]()
        while scheduler.waiting or scheduler.running:
            admitted = [] if preempted else scheduler.admit()
            if admitted:
                scheduler.take(zip(admitted, self.runner.prefill(admitted).tolist(), strict=True))
            _, preempted = scheduler.grow(
                {request: pages_for(len(request)) - len(request.pages) for request in scheduler.running}
            )
            if running := list(scheduler.running):
                tokens = self.runner.decode(running)
                scheduler.take(zip(running, tokens, strict=True))
                self.done += 1
