"""The eager runner: unpadded views, buffers that grow, batches handed through, slots that are carried."""

from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from slotgraph import (
    BATCH,
    TOKENS,
    Axis,
    DecodeRunner,
    EagerRunner,
    Inputs,
    Step,
    computed,
    constant,
    copied,
    standard,
)
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, DeclarationError, MissingSourceError
from slotgraph.runners.eager import NO_COPY_VARIABLE
from tests.runners.models import PlainInputs, assert_right, bytes_of, plain_step, random_batch, snapshot
from tests.runners.prefilled import KINDS, Model, Prefill, runner_of
from tests.runners.prefilled import batch_of as prefill_batch

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
    """A batch that is handed through, and a slot that is carried, are checked as ever, before anything is copied."""
    runner = EagerRunner(PlainInputs, plain_step, backend=cpu, no_copy=True)
    for slot, bad in (("weights", torch.rand(4)), ("places", torch.rand(5)), ("pairs", None)):
        with pytest.raises(BatchError, match=f"'{slot}'"):
            runner({**random_batch(5, seed=6), slot: bad})
    runner = EagerRunner(PlainInputs, plain_step, backend=cpu, carry=("rows",))
    with pytest.raises(MissingSourceError, match="slot 'rows' is carried from the batch, which has none"):
        runner(random_batch(3, seed=9))
    for rows in ([1, 2, 3], torch.tensor([1, 2]), torch.rand(3)):
        with pytest.raises(BatchError, match="'rows'"):
            runner({**random_batch(3, seed=10), "rows": rows})
    assert runner.eager.buffers is None


CARRY = ("num_token_non_padded", "global_num_tokens")


RANKS = standard.Sharding(attn_tp_size=2, attn_tp_rank=1, scattered=True)


class CountedInputs(standard.ExpertParallel, standard.DataParallelGathered, drop=["global_num_tokens_for_logprob"]):
    """Counts of ranks, beside one slot that may be absent, and two that tell sizes."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=3)
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=0, default=None)


def counted_step(view: CountedInputs) -> torch.Tensor:
    """[TOKENS, 3] int64: each token with all counts."""
    counts = torch.cat([view.num_token_non_padded, view.global_num_tokens])
    return view.ids[:, None] * 100 + counts


def counted_batch(tokens: int, seed: int, device: torch.device, **more: Any) -> dict[str, Any]:
    """Tokens at random, and counts that no runner would compute."""
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(50, 99, (3,), generator=draw, dtype=torch.int32)
    batch = {
        "ids": torch.randint(1, 99, (tokens,), generator=draw),
        "lens": torch.randint(1, 9, (tokens,), generator=draw, dtype=torch.int32),
        "extra": torch.randint(1, 9, (tokens,), generator=draw),
        "num_token_non_padded": counts[:1],
        "global_num_tokens": counts[1:],
        **more,
    }
    return {name: value.to(device) for name, value in batch.items() if value is not None}


def carrying(backend: Backend | str, **options: Any) -> DecodeRunner[CountedInputs]:
    """A captured runner for 2 and 4 requests, on a rank that has the second half of padded tokens."""
    given: dict[str, Any] = {"settings": RANKS, "sizes": {standard.DP: 2}, "buckets": [2, 4], "carry": CARRY, **options}
    runner = DecodeRunner(CountedInputs, counted_step, backend=backend, **given)
    runner.capture()
    return runner


@pytest.mark.parametrize("lowering", LADDER)
def test_fallbacks_have_the_batchs_counts(backend: Backend, lowering: str) -> None:
    """Replays compute the padded bucket's counts, every kind of eager step has the batch's own; they take turns."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no {lowering}")
    runner = carrying(backend, lowering=lowering)
    turns: list[tuple[int, dict[str, Any]]] = [
        (3, {}),
        (5, {}),
        (2, {}),
        (3, {"extra": None}),
        (4, {}),
        (11, {}),
        (3, {}),
    ]
    for seed, (tokens, more) in enumerate(turns):
        batch = counted_batch(tokens, seed, backend.device, **more)
        given, why = snapshot(batch), runner.decide(batch).why
        padded = 2 if tokens <= 2 else 4
        own = [max(tokens - padded // 2, 0), padded, padded]
        counts = own if why == "fits" else [int(count) for name in CARRY for count in batch[name]]
        assert runner(batch).tolist() == [[100 * one + count for count in counts] for one in batch["ids"].tolist()]
        assert all(bytes_of(batch[name]) == bytes_of(given[name]) for name in batch)
    assert runner.stats()["steps"] == {"graph": 4, "eager": 3}
    assert set(runner.stats()["eager"]) == {"too_large", "absent"}


class CountedPrefill(Prefill):
    """A prefill with a count of its tokens."""

    count: torch.Tensor = computed(lambda step: step.padded(TOKENS), shape=1, dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_runners(backend: Backend, kind: str) -> None:
    """Eager steps of runners that capture by tokens have the batch's own count; a step with graphs has the bucket's."""
    model = Model(named=kind == "piecewise").to(backend.device)
    runner = runner_of(kind, model, backend, inputs=CountedPrefill, buckets=[8], carry=("count",))
    runner.capture()
    for lengths in ([2, 3], [4, 9], [1]):
        count = torch.tensor([90 + len(lengths)], dtype=torch.int32, device=backend.device)
        view: Any = runner.fill({**prefill_batch(lengths, 1, backend.device), "count": count})
        assert view.count.tolist() == ([8] if sum(lengths) <= 8 else count.tolist())
        runner.replay(view)
    with pytest.raises(MissingSourceError, match="slot 'count' is carried from the batch, which has none"):
        runner(prefill_batch([9], 1, backend.device))


class Switched(Inputs):
    """A slot that settings may switch off, and two that the step writes."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    count: torch.Tensor | None = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32, when="counted")
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, restored=True)
    moved: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, rewritten=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("count", r"carry names 'count', which the settings switch off in Switched: carry it only where they do not"),
        ("positions", r"carry names 'positions', which the step writes: .* let the slot be copied"),
        ("moved", r"carry names 'moved', which the step writes: .* let the slot be copied"),
        ("counts", r"carry names 'counts', which is no slot of Switched"),
    ],
)
def test_what_cannot_be_carried(cpu: str, name: str, said: str) -> None:
    """A slot that is off or unknown, or that the step would write in the caller's batch, is refused at once."""
    given: dict[str, Any] = {"settings": {"counted": False}, "carry": (name,), "backend": cpu}
    with pytest.raises(DeclarationError, match=said):
        EagerRunner(Switched, lambda view: view.ids, **given)
    with pytest.raises(DeclarationError, match=said):
        DecodeRunner(Switched, lambda view: view.ids, buckets=[2], **given)
