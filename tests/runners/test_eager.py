"""The eager runner: unpadded views, buffers that grow, batches handed through."""

from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from slotgraph import (
    BATCH,
    TOKENS,
    Axis,
    EagerRunner,
    Inputs,
    computed,
    constant,
    copied,
)
from slotgraph.dataflow.errors import BatchError
from slotgraph.runners.eager import NO_COPY_VARIABLE
from tests.runners.models import (
    PlainInputs,
    assert_right,
    batch_for,
    plain_step,
    random_batch,
)

PAGES, WIDTH = Axis("PAGES"), Axis("WIDTH", fixed=True)


class PrefillInputs(Inputs):
    """Requests of several tokens each: both axes vary by themselves."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1)
    tokens: torch.Tensor = computed(lambda step: [step.live(TOKENS), step.padded(TOKENS)], shape=2, dtype=torch.int32)
    squares: torch.Tensor = computed(lambda ids: ids * ids, shape=TOKENS, dtype=torch.int64)
    sevens: torch.Tensor = constant(7, shape=(BATCH, WIDTH), dtype=torch.int32)


def as_seen(view: PrefillInputs) -> dict[str, torch.Tensor]:
    """Copies of all that a step sees."""
    return {name: getattr(view, name).clone() for name in PrefillInputs.slotgraph.slots}


@pytest.mark.parametrize("no_copy", [False, True])
def test_exact_views(cpu: str, *, no_copy: bool) -> None:
    """A step sees the live rows alone; each axis grows by itself to the next power of two, and says so once."""
    runner = EagerRunner(PrefillInputs, as_seen, backend=cpu, sizes={WIDTH: 3}, no_copy=no_copy)
    turns: list[tuple[tuple[int, int, int], list[tuple[int, int, int]]]] = [
        ((5, 2, 3), [(8, 2, 4)]),
        ((8, 2, 4), []),
        ((9, 1, 1), [(16, 2, 4)]),
        ((0, 0, 0), []),
        ((2, 1, 0), []),
        ((3, 3, 33), [(16, 4, 64)]),
        ((17, 4, 64), [(32, 4, 64)]),
        ((17, 4, 64), []),
    ]
    for sizes, grown in turns:
        batch = batch_for(PrefillInputs, dict(zip((TOKENS, BATCH, PAGES), sizes, strict=True)), 1)
        with capture_logs() as events:
            seen = runner(batch)
        found = [event["sizes"] for event in events if event["event"] == "grown"]
        assert no_copy or [(one["TOKENS"], one["BATCH"], one["PAGES"]) for one in found] == grown
        assert {name: torch.equal(seen[name], batch[name]) for name in batch} == dict.fromkeys(batch, True)
        assert seen["tokens"].tolist() == [sizes[0]] * 2
        assert torch.equal(seen["squares"], batch["ids"] ** 2)
        assert seen["sevens"].tolist() == [[7] * 3] * sizes[1]


def test_no_copy(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step sees the batch's own tensors, by argument or by environment; the argument wins; else it sees copies."""
    for variable, argument, hands_through in (
        *((None, True, True), (None, None, False), ("1", None, True), ("1", False, False), ("0", None, False)),
    ):
        if variable is not None:
            monkeypatch.setenv(NO_COPY_VARIABLE, variable)
        runner: Any = EagerRunner(PlainInputs, lambda view: (view, plain_step(view)), backend=cpu, no_copy=argument)
        for requests in (5, 2, 17):
            batch = random_batch(requests, seed=requests)
            view, outputs = runner(batch)
            assert {getattr(view, name) is batch[name] for name in batch} == {hands_through}
            assert_right(outputs, batch)


def test_what_is_handed_through_is_checked(cpu: str) -> None:
    """A batch that is handed through is checked as ever."""
    runner = EagerRunner(PlainInputs, plain_step, backend=cpu, no_copy=True)
    for slot, bad in (("weights", torch.rand(4)), ("places", torch.rand(5)), ("pairs", None)):
        with pytest.raises(BatchError, match=f"'{slot}'"):
            runner({**random_batch(5, seed=6), slot: bad})
