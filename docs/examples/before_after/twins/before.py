"""Before: a model runner as small engines write it, in the manner of nano-vllm's; correct, and all by hand."""

import functools
from collections.abc import Mapping
from collections.abc import Sequence as Several

import torch

from slotgraph.backends import Graph  # stands for torch.cuda.CUDAGraph, so that this runs on a CPU too
from twins.attention import DecodeAttention, PrefillAttention
from twins.engine import Runner, Setting
from twins.sequences import Sequence, decode_numbers, prefill_numbers

WARMUPS = 2


class HandWritten(Runner):
    """Buffers for the largest batch, a graph for each bucket over slices of them, and a fill before each replay."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.graphs: dict[int, Graph] = {}
        self.buckets = sorted(setting.buckets)
        self.buffers = self.allocate(self.buckets[-1], setting.max_pages)

    def allocate(self, rows: int, max_pages: int) -> dict[str, torch.Tensor]:
        """Every input at a fixed address."""
        device = self.setting.backend.device
        return {
            "input_ids": torch.zeros(rows, dtype=torch.int64, device=device),
            "positions": torch.zeros(rows, dtype=torch.int64, device=device),
            "slot_mapping": torch.zeros(rows, dtype=torch.int64, device=device),
            "context_lens": torch.ones(rows, dtype=torch.int32, device=device),
            "block_tables": torch.zeros(rows, max_pages, dtype=torch.int32, device=device),
        }

    def capture(self) -> None:
        """The largest bucket first, so that the others find room in its pool."""
        backend = self.setting.backend
        pool = backend.pool()
        for size in reversed(self.buckets):
            inputs = {name: buffer[:size] for name, buffer in self.buffers.items()}
            with backend.stream():
                for _ in range(WARMUPS):
                    self.forward(inputs)
                backend.synchronize()
                self.graphs[size] = backend.capture(functools.partial(self.forward, inputs), pool=pool)

    def prefill(self, sequences: Several[Sequence]) -> torch.Tensor:
        """Eagerly, without padding."""
        numbers = prefill_numbers(sequences, self.setting.cache.page_size)
        batch = {name: self.on_device(column, torch.int64) for name, column in numbers.items()}
        attention = PrefillAttention(
            self.setting.cache, batch["slot_mapping"], batch["positions"], batch["sequence_rows"]
        )
        hidden = self.setting.model(batch["input_ids"], batch["positions"], attention)
        return self.setting.model.logits(hidden[batch["last_rows"]])

    def decode(self, sequences: Several[Sequence]) -> torch.Tensor:
        """From the smallest graph that holds the batch; eagerly where none does."""
        numbers = decode_numbers(sequences, self.setting.cache.page_size)
        batch = {name: self.on_device(column, self.buffers[name].dtype) for name, column in numbers.items()}
        rows = len(sequences)
        size = next((size for size in self.buckets if size >= rows), None)
        if size is None:
            return self.forward(batch)
        self.fill(batch, rows, size)
        self.graphs[size].replay()
        logits: torch.Tensor = self.graphs[size].outputs[:rows]
        return logits

    def fill(self, batch: dict[str, torch.Tensor], rows: int, size: int) -> None:
        """The batch into the head of each buffer; the tail, up to the bucket's size, must do no harm."""
        buffers = self.buffers
        buffers["input_ids"][:rows] = batch["input_ids"]
        buffers["input_ids"][rows:size] = 0
        buffers["positions"][:rows] = batch["positions"]
        buffers["positions"][rows:size] = 0
        buffers["slot_mapping"][:rows] = batch["slot_mapping"]
        buffers["slot_mapping"][rows:size] = 0
        buffers["context_lens"][:rows] = batch["context_lens"]
        buffers["context_lens"][rows:size] = 1
        width = batch["block_tables"].size(1)
        buffers["block_tables"][:rows, :width] = batch["block_tables"]
        buffers["block_tables"][:rows, width:] = 0
        buffers["block_tables"][rows:size] = 0

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The decode step."""
        places = (inputs[name] for name in ("slot_mapping", "context_lens", "block_tables"))
        attention = DecodeAttention(self.setting.cache, *places)
        return self.setting.model.logits(self.setting.model(inputs["input_ids"], inputs["positions"], attention))

    def on_device(self, numbers: Several[object], dtype: torch.dtype) -> torch.Tensor:
        """Through pinned memory where there is a device, so that the copy does not wait."""
        device = self.setting.backend.device
        pinned = torch.tensor(numbers, dtype=dtype, pin_memory=device.type != "cpu")
        return pinned.to(device, non_blocking=True)
