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
    computed,
    constant,
    copied,
    standard,
)
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, DeclarationError, MissingSourceError
from slotgraph.runners.eager import NO_COPY_VARIABLE
from tests.runners.models import (
    PlainInputs,
    assert_right,
    batch_for,
    decoder,
    plain_step,
    random_batch,
    same_batch,
    snapshot,
)
from tests.runners.prefilled import KINDS, Model, Prefill, runner_of
from tests.runners.prefilled import batch_of as prefill_batch

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
    assert runner.parts.eager.buffers is None


CARRY = ("num_token_non_padded", "global_num_tokens")
RANKS = standard.Sharding(attn_tp_size=2, attn_tp_rank=1, scattered=True)


class CountedInputs(standard.ExpertParallel, standard.DataParallelGathered, drop=["global_num_tokens_for_logprob"]):
    """Counts of ranks, beside one slot that may be absent, and two that tell sizes."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=3)
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=0, default=None)


def counted_batch(tokens: int, seed: int, device: torch.device, *, extra: bool) -> dict[str, Any]:
    """Tokens at random, and counts that no runner would compute."""
    draw = torch.Generator().manual_seed(seed)
    ids, lens, more = torch.randint(1, 9, (3, tokens), generator=draw)
    counts = torch.randint(50, 99, (3,), generator=draw, dtype=torch.int32)
    batch = {"ids": ids, "lens": lens.int(), **({"extra": more} if extra else {})}
    batch |= {"num_token_non_padded": counts[:1], "global_num_tokens": counts[1:]}
    return {name: value.to(device) for name, value in batch.items()}


@pytest.mark.parametrize("lowering", LADDER)
def test_fallbacks_have_the_batchs_counts(backend: Backend, lowering: str) -> None:
    """Replays compute the padded bucket's counts, every kind of eager step has the batch's own; they take turns."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no {lowering}")

    def step(view: CountedInputs) -> torch.Tensor:
        return view.ids[:, None] * 100 + torch.cat([view.num_token_non_padded, view.global_num_tokens])

    options: dict[str, Any] = {"settings": RANKS, "sizes": {standard.DP: 2}, "buckets": [2, 4], "carry": CARRY}
    runner = decoder(CountedInputs, step, backend=backend, lowering=lowering, **options)
    for seed, (tokens, extra) in enumerate(((3, 1), (5, 1), (2, 1), (3, 0), (4, 1), (11, 1), (3, 1))):
        batch = counted_batch(tokens, seed, backend.device, extra=bool(extra))
        given, why = snapshot(batch), runner.decide(batch).why
        padded = 2 if tokens <= 2 else 4
        own = [max(tokens - padded // 2, 0), padded, padded]
        counts = own if why == "fits" else [int(count) for name in CARRY for count in batch[name]]
        assert runner(batch).tolist() == [[100 * one + count for count in counts] for one in batch["ids"].tolist()]
        assert same_batch(batch, given)
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


CARRIED = {
    "count": r"carry names 'count', which the settings switch off in Switched: carry it only where they do not",
    "positions": r"carry names 'positions', which the step writes: .* let the slot be copied",
    "moved": r"carry names 'moved', which the step writes: .* let the slot be copied",
    "counts": r"carry names 'counts', which is no slot of Switched",
}


def test_what_cannot_be_carried(cpu: str) -> None:
    """A slot that is off or unknown, or that the step would write in the caller's batch, is refused at once."""
    for name, said in CARRIED.items():
        given: dict[str, Any] = {"settings": {"counted": False}, "carry": (name,), "backend": cpu}
        kinds: tuple[Any, ...] = ((EagerRunner, {}), (DecodeRunner, {"buckets": [2]}))
        for kind, buckets in kinds:
            with pytest.raises(DeclarationError, match=said):
                kind(Switched, lambda view: view.ids, **buckets, **given)
