"""What is measured on: the backend that every machine has, and CUDA where there is a device."""

from collections.abc import Iterator

import pytest
import torch

from slotgraph import backends
from slotgraph.backends.cuda import CudaBackend


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def backend_name(request: pytest.FixtureRequest) -> str:
    """The name of a backend; skips with the reason where it cannot run."""
    name = str(request.param)
    available = backends.load(name).is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    return name


@pytest.fixture
def cuda() -> Iterator[CudaBackend]:
    """The backend on the current device, whose memory is free again afterwards; skips where there is none."""
    available = CudaBackend.is_available()
    if not available:
        pytest.skip(f"cuda: {available.reason}")
    yield CudaBackend()
    torch.cuda.empty_cache()
