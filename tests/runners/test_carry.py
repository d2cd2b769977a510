"""Carried slots: an eager step has what the batch brought, a replay has what was computed for its bucket."""

from typing import Any

import pytest
import torch

from slotgraph import (
    BATCH,
    TOKENS,
    DecodeRunner,
    DraftExtendRunner,
    DraftRunner,
    EagerRunner,
    Inputs,
    MultiLayerDraftExtendRunner,
    computed,
    copied,
    standard,
)
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import DeclarationError, MissingSourceError
from tests.runners.models import bytes_of, memory_of, snapshot
from tests.runners.prefilled import KINDS, Model, Prefill, runner_of
from tests.runners.prefilled import batch_of as prefill_batch
from tests.runners.standard.batches import batch_of as standard_batch
from tests.runners.standard.batches import fixed_of, sizes_of

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


def batch_of(tokens: int, seed: int, device: torch.device, width: int = 1, **more: Any) -> dict[str, Any]:
    """Tokens at random, and counts that no runner would compute."""
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(50, 99, (3,), generator=draw, dtype=torch.int32)
    batch = {
        "ids": torch.randint(1, 99, (tokens,), generator=draw),
        "lens": torch.randint(1, 9, (tokens // width,), generator=draw, dtype=torch.int32),
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
    turns: list[tuple[int, int, dict[str, Any]]] = [(3, 1, {}), (5, 1, {}), (2, 1, {}), (3, 1, {"extra": None})]
    turns += [(9, 3, {}), (4, 1, {}), (11, 1, {}), (3, 1, {})]
    for seed, (tokens, width, more) in enumerate(turns):
        batch = batch_of(tokens, seed, backend.device, width, **more)
        given, why = snapshot(batch), runner.decide(batch).why
        padded = 2 if tokens <= 2 else 4
        own = [max(tokens - padded // 2, 0), padded, padded]
        counts = own if why == "fits" else [int(count) for name in CARRY for count in batch[name]]
        assert runner(batch).tolist() == [[100 * one + count for count in counts] for one in batch["ids"].tolist()]
        assert all(bytes_of(batch[name]) == bytes_of(given[name]) for name in batch)
    assert runner.stats()["steps"] == {"graph": 4, "eager": 4}
    assert set(runner.stats()["eager"]) == {"too_large", "absent", "width_differs"}


@pytest.mark.parametrize(("tokens", "width"), [(5, 1), (9, 3)])
def test_a_batch_without_them(cpu: str, tokens: int, width: int) -> None:
    """An eager step without a carried slot is refused by the slot's name, and changes nothing; a replay needs none."""
    runner = carrying(cpu)
    runner(batch_of(20, 1, torch.device("cpu")))  # so that there is nothing to grow
    good = batch_of(3, 2, torch.device("cpu"), global_num_tokens=None, num_token_non_padded=None)
    view = runner.fill(good)
    before, counted, right = memory_of(runner), runner.stats(), runner.replay(view).tolist()
    with pytest.raises(
        MissingSourceError, match=r"^slot 'global_num_tokens' is carried from the batch, which has none"
    ):
        runner(batch_of(tokens, 3, torch.device("cpu"), width, global_num_tokens=None))
    assert memory_of(runner) == before
    assert runner.stats()["eager"] == counted["eager"]
    assert runner.replay(view).tolist() == right


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


class DraftCounted(standard.DraftInputs, standard.DataParallelGathered):
    """A draft whose ranks gather."""


class ExtendCounted(standard.DraftExtendInputs, standard.DataParallelGatheredExtend):
    """A draft-extend whose ranks gather."""


class LayersCounted(standard.MultiLayerDraftExtendInputs, standard.DataParallelGatheredExtend):
    """The same, a layer a step."""


@pytest.mark.parametrize("inputs", [DraftCounted, ExtendCounted, LayersCounted])
def test_runners_of_speculation(backend: Backend, inputs: type[Inputs]) -> None:
    """Each runner that is made of a decode runner hands `carry` on."""
    sizes, carry = fixed_of(inputs), ("global_num_tokens", "global_num_tokens_for_logprob")
    given: dict[str, Any] = {"sizes": sizes, "carry": carry, "buckets": [4], "graphs": False, "backend": backend}
    runner: Any
    if inputs is DraftCounted:
        runner = DraftRunner(inputs, lambda *_: None, topk=2, steps=3, **given)  # type: ignore[arg-type]
    elif inputs is ExtendCounted:
        runner = DraftExtendRunner(inputs, lambda view: view, width=2, **given)
    else:
        runner = MultiLayerDraftExtendRunner(inputs, [lambda view, _: view], width=2, **given)
    runner.capture()
    batch, _ = standard_batch(inputs.slotgraph, sizes_of(inputs, 3, 2), 5, device=str(backend.device))
    counts = torch.tensor([41, 43], dtype=torch.int32, device=backend.device)
    view = runner.fill({**batch, carry[0]: counts, carry[1]: counts + 1})
    assert (view.global_num_tokens.tolist(), view.global_num_tokens_for_logprob.tolist()) == ([41, 43], [42, 44])


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
