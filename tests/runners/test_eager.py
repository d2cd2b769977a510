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
    Step,
    computed,
    constant,
    copied,
)
from slotgraph.dataflow.errors import BatchError
from slotgraph.runners.eager import NO_COPY_VARIABLE
from tests.runners.models import PlainInputs, assert_right, plain_step, random_batch

PAGES = Axis("PAGES")


WIDTH = Axis("WIDTH", fixed=True)


def total_tokens(step: Step) -> int:
    """Computed on the host; padded and live must be the same here."""
    assert step.live(TOKENS) == step.padded(TOKENS)
    return step.padded(TOKENS)


class PrefillInputs(Inputs):
    """Requests of several tokens each: both axes vary by themselves."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1)
    tokens: torch.Tensor = computed(total_tokens, shape=1, dtype=torch.int32)
    squares: torch.Tensor = computed(lambda ids: ids * ids, shape=TOKENS, dtype=torch.int64)
    sevens: torch.Tensor = constant(7, shape=(BATCH, WIDTH), dtype=torch.int32)


def prefill(tokens: int, requests: int, pages: int) -> dict[str, Any]:
    """A random batch of any sizes."""
    return {
        "ids": torch.randint(1, 99, (tokens,)),
        "lens": torch.randint(1, 99, (requests,), dtype=torch.int32),
        "pages": torch.randint(1, 99, (requests, pages), dtype=torch.int32),
    }


def as_seen(view: PrefillInputs) -> dict[str, torch.Tensor]:
    """Copies of all that a step sees."""
    return {name: getattr(view, name).clone() for name in ("ids", "lens", "pages", "tokens", "squares", "sevens")}


@pytest.mark.parametrize("no_copy", [False, True])
def test_exact_views(cpu: str, *, no_copy: bool) -> None:
    """A step sees the live rows and nothing else, whatever sizes came before."""
    runner = EagerRunner(PrefillInputs, as_seen, backend=cpu, sizes={WIDTH: 3}, no_copy=no_copy)
    for sizes in ((5, 2, 3), (9, 1, 1), (1, 4, 2), (5, 2, 3), (0, 0, 0), (64, 33, 17), (2, 1, 0)):
        batch = prefill(*sizes)
        seen = runner(batch)
        assert {name: torch.equal(seen[name], batch[name]) for name in batch} == dict.fromkeys(batch, True)
        assert seen["tokens"].tolist() == [sizes[0]]
        assert torch.equal(seen["squares"], batch["ids"] ** 2)
        assert seen["sevens"].tolist() == [[7] * 3] * sizes[1]


def test_growth_to_the_next_power_of_two(cpu: str) -> None:
    """Each axis grows by itself to the next power of two, never shrinks, and says so once for each growth."""
    runner = EagerRunner(PrefillInputs, as_seen, backend=cpu, sizes={WIDTH: 3})
    grown = []
    with capture_logs() as events:
        for sizes in ((5, 2, 3), (8, 2, 4), (9, 1, 1), (1, 1, 1), (3, 3, 33), (17, 4, 64), (17, 4, 64)):
            events.clear()
            runner(prefill(*sizes))
            found = [event["sizes"] for event in events if event["event"] == "grown"]
            grown.append([(sizes["TOKENS"], sizes["BATCH"], sizes["PAGES"]) for sizes in found])
    assert grown == [[(8, 2, 4)], [], [(16, 2, 4)], [], [(16, 4, 64)], [(32, 4, 64)], []]


def test_no_copy(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step sees the batch's own tensors, by argument or by environment; the argument wins; else it sees copies."""

    def runner_of(*, no_copy: bool | None) -> EagerRunner[PlainInputs]:
        return EagerRunner(PlainInputs, lambda view: (view, plain_step(view)), backend=cpu, no_copy=no_copy)

    batch = random_batch(3, seed=5)
    for variable, argument, hands_through in (
        *((None, True, True), (None, None, False), ("1", None, True), ("1", False, False), ("0", None, False)),
    ):
        if variable is not None:
            monkeypatch.setenv(NO_COPY_VARIABLE, variable)
        runner = runner_of(no_copy=argument)
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
