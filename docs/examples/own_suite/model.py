"""A step over the declaration: as much of a model as is needed to read every slot and to write a cache."""

import torch
from inputs import MAX_LEN, PAGES, DecodeInputs

from slotgraph import DecodeRunner
from slotgraph.backends import Backend, choose

VOCAB, HIDDEN, ADAPTERS, LOCATIONS = 100, 16, 4, 64


class Model:
    """Embeddings, positions, adapters, and a cache of one row a location.

    Weights are drawn with a seed, on the device that they are to run on.
    """

    def __init__(self, device: torch.device) -> None:
        seeded = torch.Generator().manual_seed(0)
        self.embeddings, self.positions, self.adapters, self.cache = (
            torch.randn(rows, HIDDEN, generator=seeded).to(device) for rows in (VOCAB, MAX_LEN, ADAPTERS, LOCATIONS)
        )

    def step(self, view: DecodeInputs) -> torch.Tensor:
        """Logits, one row a request; the keys of each go where the batch says."""
        hidden = self.embeddings[view.input_ids] + self.positions[view.positions]
        if view.adapters is not None:
            hidden = hidden + self.adapters[view.adapters]
        self.cache.index_copy_(0, view.out_cache_loc.long(), hidden)
        pages = torch.arange(view.block_tables.shape[1], device=hidden.device) < view.seq_lens[:, None]
        context = (self.cache[view.block_tables.long()] * pages[:, :, None]).sum(1) / view.seq_lens[:, None]
        return (hidden + context) @ self.embeddings.T / view.temperatures[:, None]


def make_runner(on: str | Backend = "auto") -> DecodeRunner[DecodeInputs]:
    """A captured runner, with graphs for batches with adapters and for those without."""
    backend = choose(on)
    runner = DecodeRunner(
        DecodeInputs,
        Model(backend.device).step,
        buckets=[1, 2, 4, 8],
        sizes={PAGES: 4},
        absent=[{"adapters"}],
        backend=backend,
        progress=False,
    )
    runner.capture()
    return runner
