"""What looks at a step sees the same inside inference mode, where engines live, as outside of it."""

import contextlib
import pathlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import pytest
import torch
from torch.nn import functional

import slotgraph
from slotgraph import BATCH, Inputs, copied
from slotgraph.runners.recording.records import RecordedFile
from slotgraph.runners.recording.replaying import replay_file
from tests.runners.check.planted import runner_of
from tests.strategies import draw

CONTEXTS: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    "outside": contextlib.nullcontext,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
ROWS: Final = 8
TABLE: Final = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
LAYER: Final = torch.nn.Linear(1, 4)
EMBEDDING: Final = torch.nn.Embedding(16, 4)
TO_TYPE: Final = "torch.LongTensor"


def attended(x: torch.Tensor) -> torch.Tensor:
    """Attention of rows to one another."""
    return functional.scaled_dot_product_attention(x, x, x)


READS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "long": lambda x: x.long(),
    "to a dtype": lambda x: x.to(torch.float64),
    "type": lambda x: x.type(TO_TYPE),
    "view of views": lambda x: x.unsqueeze(1).expand(-1, 3)[:, 1].view(-1).float(),
    "embedding module": EMBEDDING,
    "linear module": lambda x: LAYER(x.float()[:, None]),
    "softmax": lambda x: functional.softmax(x.float()[:, None].expand(-1, 4), dim=-1),
    "attention": lambda x: attended(x.float()[:, None, None].expand(-1, 2, 4)),
    "product": lambda x: torch.einsum("b,d->bd", x.float(), TABLE[0]),
    "index": lambda x: TABLE[x],
    "compiled": torch.compile(lambda x: x.long() + 1, backend="eager"),
}


class Slots(Inputs):
    """Two slots, one of which a step reads in many ways, and the other in none."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, limit=15)
    forgotten: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, limit=15)


def step_of(read: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Slots], Any]:
    """A step that reads one slot, and looks at the shape of a part of the other."""
    return lambda view: (view.forgotten[:1].shape[1:], read(view.ids))


def batch_of(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of so many rows."""
    ids, other = (draw(1, 15, (rows,), seed + part, torch.int32) for part in (0, 1))
    return {"ids": ids, "forgotten": other}


@pytest.mark.parametrize("context", CONTEXTS)
def test_check_accuses_the_unread_slot_alone(cpu: str, context: str) -> None:
    """However a step reads a slot, the check knows it; the slot that nothing reads, or only looks at, is told."""
    for name, read in READS.items():
        with CONTEXTS[context]():
            runner = runner_of(step_of(read), cpu, Slots, buckets=[ROWS])
            report = slotgraph.check(runner, progress=False, rounds=1)
        assert [finding.slot for finding in report.findings] == ["forgotten"], f"{name}: {report}"


@pytest.mark.parametrize("context", CONTEXTS)
def test_debug_modes_and_recordings(cpu: str, context: str, tmp_path: pathlib.Path) -> None:
    """Debug modes accuse no step and change none, and a recorded step is the same when it is run again."""
    for number, read in enumerate(READS.values()):
        with CONTEXTS[context]():
            plain = runner_of(step_of(read), cpu, Slots, buckets=[ROWS])
            watched = runner_of(step_of(read), cpu, Slots, buckets=[ROWS], debug="generations,addresses,poison,parity")
            with slotgraph.record(watched, tmp_path / f"{number}.safetensors", outputs=True) as recording:
                for rows in (3, ROWS, 1):
                    batch = batch_of(rows, 7 * rows)
                    assert torch.equal(watched(batch)[1].clone(), plain(batch)[1])
            again = replay_file(RecordedFile.read(recording.path), plain).steps
        assert [step.outcome for step in again] == ["equal"] * 3
