"""What the tests of steps in flight share: a place with streams or without, a declaration, fresh sources, answers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, computed, copied
from slotgraph.backends import Backend, load

BUCKETS: Final = (2, 8, 32)
PAD, WEIGHT = -3, 2.0
LONG: Final = 40_000_000
"""Cycles that take some twenty milliseconds."""


class Flow(Inputs):
    """Two slots that are copied, and one number that the host computes."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=PAD)
    weights: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=WEIGHT, strided=True)
    live: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)


class Wide(Flow):
    """The same with a slot whose rows are too many bytes to go along in a command."""

    table: torch.Tensor = copied(BATCH, 2048, dtype=torch.int32, pad=1)


def flow_step(view: Flow) -> torch.Tensor:
    """Whole numbers that hang on every slot and on every tail; exact in any order of addition."""
    rows = view.ids * 3 + view.live + view.ids.sum() + view.weights.sum().long()
    return rows + view.table.sum() if isinstance(view, Wide) else rows


@attrs.frozen
class Drawn:
    """One batch: its values on the host, which no step sees, and on the device, from which sources are made."""

    host: dict[str, torch.Tensor]
    device: dict[str, torch.Tensor]

    @classmethod
    def of(cls, backend: Backend, kind: type[Flow], rows: int, seed: int) -> "Drawn":
        """Random whole numbers, none of which is a tail's."""
        draw = torch.Generator().manual_seed(seed)
        host = {
            "ids": torch.randint(1, 1000, (rows,), generator=draw),
            "weights": torch.randint(3, 99, (rows, 2), generator=draw).float(),
        }
        if kind is Wide:
            host["table"] = torch.randint(2, 99, (rows, 2048), generator=draw, dtype=torch.int32)
        return cls(host, {name: one.to(backend.device) for name, one in host.items()})

    def fresh(self) -> dict[str, torch.Tensor]:
        """New tensors of the current stream, made by the device without any wait."""
        return {name: one.clone() for name, one in self.device.items()}

    @property
    def rows(self) -> int:
        """Its requests."""
        return len(self.host["ids"])

    def answer(self, *, padded: bool = True) -> torch.Tensor:
        """What the step must give, worked out on the host."""
        ids, rows = self.host["ids"], self.rows
        tail = next(size for size in BUCKETS if size >= rows) - rows if padded else 0
        whole = int(ids.sum()) + PAD * tail + int(self.host["weights"].sum()) + int(WEIGHT) * 2 * tail
        if "table" in self.host:
            whole += int(self.host["table"].sum()) + 2048 * tail
        return ids * 3 + rows + whole


@attrs.frozen
class Place:
    """A backend, with streams where it has them."""

    backend: Backend

    @property
    def has_streams(self) -> bool:
        """Whether work is done later."""
        return self.backend.name == "cuda"

    def stream(self) -> Any:
        """A new stream that waits for all that was done so far; None where there is none."""
        if not self.has_streams:
            return None
        stream = torch.cuda.Stream(self.backend.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.backend.device))
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Have a stream be the current one."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def busy(self, cycles: int = LONG) -> None:
        """Keep the current stream from going on for a while."""
        if self.has_streams:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def runner(self, kind: type[Flow], lowering: str, **options: Any) -> DecodeRunner[Any]:
        """A captured runner."""
        runner = DecodeRunner(kind, flow_step, buckets=BUCKETS, backend=self.backend, lowering=lowering, **options)
        runner.capture()
        return runner

    def pool(self, kind: type[Flow], count: int, seed: int) -> list[Drawn]:
        """Batches of every size, on the device already."""
        draw = torch.Generator().manual_seed(seed)
        sizes = torch.randint(0, BUCKETS[-1] + 1, (count,), generator=draw).tolist()
        pool = [Drawn.of(self.backend, kind, rows, seed + index) for index, rows in enumerate(sizes)]
        self.backend.synchronize()
        return pool

    @contextmanager
    def elsewhere(self) -> Iterator[Any]:
        """A new stream as the current one."""
        stream = self.stream()
        with self.on(stream):
            yield stream

    def garbage(self, batch: dict[str, torch.Tensor]) -> None:
        """Allocate as much again and again, and write over all of it."""
        kept = [torch.full_like(one, 77) for _ in range(3) for one in batch.values()]
        del kept


def place_of(name: str) -> Place:
    """A backend by name; skips, with the reason, where it cannot run."""
    available = load(name).is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    return Place(load(name)())


def assert_answers(got: list[torch.Tensor], drawn: list[Drawn], *, padded: bool = True) -> None:
    """Each step gave its answer; padded: by a graph."""
    assert len(got) == len(drawn)
    for index, (outputs, one) in enumerate(zip(got, drawn, strict=True)):
        assert torch.equal(outputs.cpu(), answer := one.answer(padded=padded)), (
            f"step {index}: {outputs} is not {answer}"
        )
