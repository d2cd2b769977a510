"""Interruptions under the modes of torch: inference, and the user's own."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from slotgraph.backends import Backend
from tests.backends.interruptions import between
from tests.backends.test_contract import captured, random_on

pytestmark = pytest.mark.slotgraph_backends("every")


@pytest.mark.parametrize("where", ["capture", "replay"])
def test_inference_mode(interrupting: Backend, where: str) -> None:
    """A capture inside of inference mode is replayed outside of it, and the other way round."""
    x = random_on(interrupting, 2, seed=22)
    with torch.inference_mode(where == "capture"):
        graph = captured(interrupting, lambda: between(interrupting, lambda: x * float(x[0, 0])) + 1)
    x.copy_(random_on(interrupting, 2, seed=23))
    with torch.inference_mode(where == "replay"):
        graph.replay()
    torch.testing.assert_close(graph.outputs, x * x[0, 0] + 1)


class Functions(TorchFunctionMode):
    """Counts torch's functions."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        del types
        self.seen += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Counts operators."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        del types
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Functions, Operators])
def test_modes_of_the_user(interrupting: Backend, kind: type[Functions | Operators]) -> None:
    """A torch mode that is on sees what the call does at capture as it does in a replay, and is on afterwards."""
    x, counts = random_on(interrupting, 2, seed=24), list[int]()

    def body() -> torch.Tensor:
        before = mode.seen
        result = x * 2
        counts.append(mode.seen - before)
        return result

    with kind() as mode:
        graph = captured(interrupting, lambda: between(interrupting, body) + 1)
        graph.replay()
        before = mode.seen
        torch.testing.assert_close(graph.outputs, x * 2 + 1)
        assert mode.seen > before
    assert counts == [1, 1, 1]  # warm-up, capture, replay
