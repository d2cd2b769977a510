"""Whose stream a tensor's memory is of: told in little time, and right through whatever the allocator does."""

import random
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, backends, copied

_AVAILABLE = backends.load("cuda").is_available()
if not _AVAILABLE:
    pytest.skip(f"cuda: {_AVAILABLE.reason}", allow_module_level=True)
pytestmark = pytest.mark.cuda


class Ids(Inputs):
    """One slot."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def test_whatever_is_allocated_and_freed() -> None:
    """Memory goes from stream to stream by way of `empty_cache`; each tensor is told by the stream that made it."""
    backend, draw = backends.load("cuda")(), random.Random(5)  # noqa: S311 - no secret
    new_stream: Any = torch.cuda.Stream
    streams = [torch.cuda.current_stream(), *(new_stream() for _ in range(3))]
    held: list[tuple[torch.Tensor, int]] = []
    for turn in range(400):
        stream = draw.choice(streams)
        with torch.cuda.stream(stream):
            held.append((torch.empty(1 << draw.randint(0, 26), dtype=torch.uint8, device="cuda"), stream.cuda_stream))
        while len(held) > draw.randint(1, 30):
            held.pop(draw.randrange(len(held)))
        if turn % 7 == 0:
            torch.cuda.empty_cache()
        assert list(backend.streams_of([one for one, _ in held])) == [stream for _, stream in held]


@pytest.mark.parametrize("debug", [True, "streams"])
def test_steps_of_fresh_tensors_ask_for_no_snapshot(debug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of the allocator takes milliseconds: steps on fresh tensors do without, once memory is at hand."""
    snapshot: Any = torch.cuda.memory_snapshot
    taken = [0]

    def counted(*given: Any, **named: Any) -> Any:
        taken[0] += 1
        return snapshot(*given, **named)

    monkeypatch.setattr(torch.cuda, "memory_snapshot", counted)
    backend = backends.load("cuda")()
    runner = DecodeRunner(Ids, lambda view: view.ids * 2, buckets=[8], backend=backend, debug=debug, progress=False)
    runner.capture()
    for number in range(200):
        if number == 20:
            taken[0] = 0
        ids = torch.randint(1, 99, (1 + number % 8,), device="cuda")
        assert torch.equal(runner({"ids": ids}), ids * 2)
    assert taken[0] == 0
    assert runner.stats()["detours"] == {}
