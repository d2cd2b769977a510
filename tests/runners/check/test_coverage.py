"""Coverage: garbage that shows what is not written, and slots that nothing reads, in any of torch's modes."""

import contextlib
import pathlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import slotgraph
from slotgraph import BATCH, TOKENS, Inputs, computed, constant, copied, output
from slotgraph.extend import once
from slotgraph.runners.engine.bits import garbage
from slotgraph.runners.recording.records import RecordedFile
from slotgraph.runners.recording.replaying import replay_file
from tests.runners.check.test_planted import found_by, report_of, runner_of
from tests.runners.models import bytes_of, decoder, memory_of, plain_runner, random_batch
from tests.strategies import DTYPES, draw


@settings(max_examples=30)
@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 5), max_size=3), seed=st.integers(0, 99))
def test_garbage_differs_everywhere(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    """Two kinds of garbage have no element in common, so that one that is not written always shows."""
    like = torch.empty(shape, dtype=dtype)
    one, other = (garbage(like, torch.Generator().manual_seed(seed), flipped=flipped) for flipped in (False, True))
    assert one.shape == other.shape == like.shape
    assert one.dtype == other.dtype == dtype
    assert all(a != b for a, b in zip(bytes_of(one), bytes_of(other), strict=True))
    assert dtype != torch.bool or set(bytes_of(one)) <= {0, 1}


def test_garbage_is_taken_back(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a fill is refused over garbage, what lay there before lies there again."""
    runner = plain_runner(cpu)
    runner(random_batch(3, 2))
    before, during, fill = memory_of(runner), list[dict[str, bytes]](), type(runner).fill

    def refused(self: Any, *batch: Any, **side: Any) -> Any:
        during.append(memory_of(self))
        if len(during) > 1:
            raise ValueError("refused")
        return fill(self, *batch, **side)

    monkeypatch.setattr(type(runner), "fill", refused)
    with pytest.raises(ValueError, match="refused"):
        found_by("poison", runner, [random_batch(3, 2)], state=[])
    assert [one == before for one in during] == [True, False]
    assert memory_of(runner) == before


class Shapes(Inputs):  # slots that a step may read in many ways, or not at all
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    looked_at: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    sliced: torch.Tensor = copied(TOKENS, 2, dtype=torch.float32, pad=0)
    by_operator: torch.Tensor = copied(TOKENS, dtype=torch.float32, pad=0)
    needed: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    made: torch.Tensor = computed(lambda needed: needed + 1, shape=BATCH, dtype=torch.int64)
    maybe: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
    set_once: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=once(1))
    fixed: torch.Tensor = constant(3, shape=BATCH, dtype=torch.int64)
    on_host: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, placement="host", argument="lens")
    outside: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    result: torch.Tensor = output(TOKENS, dtype=torch.float32)


@torch.library.custom_op("slotgraph_tests::check_twice", mutates_args=())
def twice(values: torch.Tensor) -> torch.Tensor:
    """An operator of its own."""
    return values * 2


def reads_some(view: Shapes) -> torch.Tensor:
    """Reads a part of one slot, gives another to an operator of its own, and looks at the shape of a third."""
    rows = view.looked_at.view(-1, 1).shape[0]
    view.result.copy_(view.sliced.transpose(0, 1)[1, :rows] + twice(view.by_operator) + view.ids + view.made)
    return view.result


def test_unread_slots() -> None:
    """A finding for each if that can be known, else a note with the reason. None for what is read outside."""
    runner = decoder(Shapes, reads_some)
    report = report_of("coverage", runner, read_outside=["outside"])
    assert [finding.slot for finding in report.findings] == ["looked_at"]
    assert "drop=['looked_at']" in report.findings[0].message
    reasons = {
        "maybe": "it is optional",
        "set_once": "it is written once",
        "fixed": "it is constant",
        "on_host": "it is on the host, where it may be read before the replay",
    }
    assert list(report.notes) == [
        f"no operator of the step reads slot {name!r}: {why}" for name, why in reasons.items()
    ]


CONTEXTS: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    "outside": contextlib.nullcontext,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
ROWS: Final = 8
TABLE: Final = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
LAYER: Final = torch.nn.Linear(1, 4)


def _attended(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x)


READS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "long": lambda x: x.long(),
    "to a dtype": lambda x: x.to(torch.float64),
    "type": lambda x: x.type("torch.LongTensor"),
    "view of views": lambda x: x.unsqueeze(1).expand(-1, 3)[:, 1].view(-1).float(),
    "embedding module": torch.nn.Embedding(16, 4),
    "linear module": lambda x: LAYER(x.float()[:, None]),
    "softmax": lambda x: functional.softmax(x.float()[:, None].expand(-1, 4), dim=-1),
    "attention": lambda x: _attended(x.float()[:, None, None].expand(-1, 2, 4)),
    "product": lambda x: torch.einsum("b,d->bd", x.float(), TABLE[0]),
    "index": lambda x: TABLE[x],
    "compiled": torch.compile(lambda x: x.long() + 1, backend="eager"),
    "handed out": lambda x: x,
}
BY_HOST: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "list": lambda x: torch.tensor(x.tolist()),
    "array": lambda x: torch.as_tensor(x.numpy() * 2),
    "operator of functions": lambda x: torch.cond(x.sum() > 3, torch.mul, torch.add, (x, x + 1)),
}
"""Reads by the host, and by an operator that takes functions, of steps that run again instead of a graph."""


class Slots(Inputs):  # one that a step reads in many ways, and one that it reads in none
    ids: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, limit=15)
    forgotten: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, limit=15)


def step_of(read: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Slots], Any]:
    """A step that reads one slot, and looks at the shape of a part of the other."""
    return lambda view: (view.forgotten[:1].shape[1:], read(view.ids))


@pytest.mark.parametrize("context", CONTEXTS)
def test_check_accuses_the_unread_slot_alone(cpu: str, context: str) -> None:
    """However a step reads a slot, the check knows it; the slot that nothing reads, or only looks at, is told."""
    for name, read in {**READS, **(BY_HOST if (cpu, context) == ("cpu", "outside") else {})}.items():
        with CONTEXTS[context]():
            report = slotgraph.check(runner_of(step_of(read), cpu, Slots, buckets=[ROWS]), progress=False, rounds=1)
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
                    batch = {
                        name: draw(1, 15, (rows,), seed=7 * rows, dtype=torch.int32) for name in Slots.slotgraph.slots
                    }
                    assert torch.equal(watched(batch)[1].clone(), plain(batch)[1])
            again = replay_file(RecordedFile.read(recording.path), plain).steps
        assert [step.outcome for step in again] == ["equal"] * 3


def test_a_slot_that_is_read_where_it_is_absent() -> None:
    """A step that keeps a slot of an earlier view reads what another batch left there; it is named with its reader."""

    class Adapted(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        adapters: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=0, default=None)

    held = dict[int, torch.Tensor]()

    def step(view: Any) -> torch.Tensor:
        if view.adapters is not None:
            held[len(view.ids)] = view.adapters
        adapters: Any = held.get(len(view.ids), view.ids)
        return torch.add(view.ids, adapters)

    def right(view: Any) -> torch.Tensor:
        return torch.add(view.ids, view.ids if view.adapters is None else view.adapters)

    batches: list[dict[str, Any]] = [{"ids": [1, 2, 3], "adapters": [7, 8, 9]}, {"ids": [1, 2, 3]}]
    for taken, slots in {step: ["adapters"], right: []}.items():
        runner = decoder(Adapted, taken, backend="cpu-capture", buckets=[4], absent=[{"adapters"}])
        found = found_by("coverage", runner, batches)
        assert [one.slot for one in found] == slots
        assert all("is absent in this batch, and aten::add reads its memory" in one.message for one in found)
