"""What is measured on, where that is CUDA alone."""

from collections.abc import Iterator

import pytest
import torch

from slotgraph.backends.cuda import CudaBackend


@pytest.fixture
def cuda() -> Iterator[CudaBackend]:
    """The backend on the current device, whose memory is free again afterwards; skips where there is none."""
    available = CudaBackend.is_available()
    if not available:
        pytest.skip(f"cuda: {available.reason}")
    yield CudaBackend()
    torch.cuda.empty_cache()
