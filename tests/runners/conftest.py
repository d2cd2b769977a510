"""What the runners' tests share: each of them runs on both backends that every machine has."""

from collections.abc import Iterator
from typing import cast

import pytest
import torch

from slotgraph import DecodeRunner
from tests.runners.models import PlainInputs, plain_runner


@pytest.fixture(params=["cpu", "cpu-capture"], scope="module")
def cpu(request: pytest.FixtureRequest) -> str:
    """The name of a backend on the CPU: steps run again, or operators recorded and replayed."""
    return cast("str", request.param)


@pytest.fixture(scope="module")
def runner(cpu: str) -> DecodeRunner[PlainInputs]:
    """A captured runner that a module's tests share, each of which must leave it as usable as it was."""
    return plain_runner(cpu)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and lose much where other programs want the processors too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
