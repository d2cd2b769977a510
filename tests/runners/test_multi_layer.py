"""The multi-layer draft-extend runner: steps that write what the next one reads."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Inputs, computed, copied, standard
from slotgraph.backends import load
from slotgraph.dataflow.errors import ConfigError
from slotgraph.speculative import MultiLayerDraftExtendRunner
from tests.runners.models import Batch, same_batch, snapshot

WORDS, WIDE, WIDTH, FRONT = 20, 4, 3, 1
BUCKETS = (2, 5)
_DRAW = torch.Generator().manual_seed(4)
LAYERS = [torch.randn(WIDE, WIDE, generator=_DRAW, dtype=torch.float64) for _ in range(3)]
TABLE = torch.randn(WORDS, WIDE, generator=_DRAW, dtype=torch.float64)
HEAD = torch.randn(WIDE, WORDS, generator=_DRAW, dtype=torch.float64)


@standard.model_dtype(torch.float64)
class ChainInputs(standard.MultiLayerDraftExtendInputs, drop=("next_token_logits",)):
    """The standard's; the steps return their rows."""


@functools.cache
def on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Table, head and layers on a device; moved there in a warm-up, since a captured step could not."""
    return TABLE.to(device), HEAD.to(device), [layer.to(device) for layer in LAYERS]


def answer(ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
    """What one layer makes of tokens."""
    table, _, layers = on(ids.device)
    return torch.tanh(table[ids] + 0.2 * positions[:, None] + hidden @ layers[layer])


def step_of(layer: int) -> Any:
    """A step that hands on its hidden states, and its tokens moved up by one with a new one at the chosen row."""

    def step(view: Any, after: Any) -> torch.Tensor:
        made = answer(view.input_ids, view.hidden_states, view.positions, layer)
        logits = made[view.select_index] @ on(made.device)[1]
        if after is not None:
            after.hidden_states.copy_(made)
            after.input_ids[:-1].copy_(view.input_ids[1:])
            after.input_ids[view.select_index] = logits.argmax(1)
        return logits

    return step


STEPS = [step_of(layer) for layer in range(len(LAYERS))]


def plain(batch: Batch) -> list[torch.Tensor]:
    """The same for each request by itself, without a buffer."""
    found: list[list[torch.Tensor]] = [[] for _ in LAYERS]
    for request, count in enumerate(batch["num_correct_drafts"].tolist()):
        rows = slice(request * WIDTH, (request + 1) * WIDTH)
        ids, hidden = batch["input_ids"][rows].tolist(), batch["hidden_states"][rows]
        for number in range(len(LAYERS)):
            hidden = answer(torch.tensor(ids), hidden, batch["positions"][rows], number)
            logits = hidden[FRONT + count] @ HEAD
            found[number].append(logits)
            ids = [*ids[1:], None]
            ids[FRONT + count] = int(logits.argmax())
            ids = [0 if token is None else token for token in ids]
    return [torch.stack(rows) if rows else torch.empty(0, WORDS, dtype=torch.float64) for rows in found]


def batch_of(requests: int, seed: int, device: Any = "cpu") -> Batch:
    """A random batch, all of whose requests had their last draft accepted: no row is read that no request owns."""
    draw = torch.Generator().manual_seed(seed)
    correct = torch.full((requests,), WIDTH - FRONT - 1, dtype=torch.int32)
    batch = {
        "req_pool_indices": torch.arange(1, requests + 1),
        "seq_lens": torch.randint(WIDTH, 99, (requests,), generator=draw, dtype=torch.int32),
        "input_ids": torch.randint(1, WORDS, (requests * WIDTH,), generator=draw),
        "positions": torch.randint(1, 9, (requests * WIDTH,), generator=draw),
        "out_cache_loc": 1 + torch.randperm(requests * WIDTH, generator=draw),
        "hidden_states": torch.randn(requests * WIDTH, WIDE, generator=draw, dtype=torch.float64),
        "num_correct_drafts": correct,
        "num_accept_tokens": correct + 1,
    }
    return {name: value.to(device) for name, value in batch.items()}


def made(backend: str, steps: Sequence[Any] = STEPS, **options: Any) -> MultiLayerDraftExtendRunner[ChainInputs]:
    """A captured runner."""
    given: dict[str, Any] = {"buckets": BUCKETS, "absent": [{"seq_lens_cpu"}], "width": WIDTH, **options}
    sizes = {standard.HIDDEN: WIDE, standard.FRONT: FRONT}
    runner = MultiLayerDraftExtendRunner(ChainInputs, steps, sizes=sizes, backend=backend, **given)
    runner.capture()
    return runner


@functools.cache
def captured(backend: str) -> MultiLayerDraftExtendRunner[ChainInputs]:
    """A captured runner, which all tests leave as usable as it was."""
    return made(backend)


def assert_right(got: tuple[torch.Tensor, ...], batch: Batch) -> None:
    """Each step's logits are the plain ones."""
    due = plain({name: value.cpu() for name, value in batch.items()})
    assert len(got) == len(due)
    for one, other in zip(got, due, strict=True):
        torch.testing.assert_close(torch.as_tensor(one).cpu(), other)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 999)), min_size=1, max_size=4))
def test_steps_are_chained(backend_name: str, drawn: list[tuple[int, int]]) -> None:
    """Batches of any size after one another: each step reads what the one before wrote, in one graph a bucket."""
    runner, device = captured(backend_name), load(backend_name)().device
    for requests, seed in drawn:
        batch = batch_of(requests, seed, device)
        given = snapshot(batch)
        assert_right(runner(batch), batch)
        assert same_batch(batch, given)
    assert len(runner.graphs._captured) == 2 * len(BUCKETS)


class Switched(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    extra: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7, when="extra")
    rare: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=3, default=None)


def test_slots_that_are_not_there(cpu: str) -> None:
    """A chained slot that is switched off or absent is None for every step."""

    def step(view: Any, after: Any) -> Any:
        assert view.extra is None
        if after is not None:
            assert (after.extra, after.rare is None) == (None, view.rare is None)
            after.ids.copy_(view.ids + 1)
        return view.ids * 2

    runner = MultiLayerDraftExtendRunner(
        Switched,
        [step, step],
        chained=("ids", "extra", "rare"),
        settings={"extra": False},
        width=1,
        absent=[{"rare"}],
        buckets=[4],
        backend=cpu,
    )
    runner.capture()
    ids = torch.tensor([3, 9, 4])
    for batch in ({"ids": ids}, {"ids": ids, "rare": ids}):
        assert [one.tolist() for one in runner(batch)] == [(ids * 2).tolist(), (ids * 2 + 2).tolist()]


def doubled(ids: torch.Tensor) -> torch.Tensor:
    """Computed once, before the steps."""
    return ids * 2


class Derived(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    twice: torch.Tensor = computed(doubled, shape=TOKENS, dtype=torch.int64)


def nothing(view: Any, after: Any) -> None:
    """A step."""
    del view, after


def test_rows_that_no_step_writes(backend_name: str) -> None:
    """Each replay finds a later step's slots as a tail is, also where the step before wrote other rows last time."""

    def step(view: Any, after: Any) -> torch.Tensor:
        if after is not None:  # the first request's rows, where it says so
            after.input_ids[:WIDTH] += view.seq_lens[0]
        return torch.sum(view.input_ids.view(-1, WIDTH), 1)

    runner = made(backend_name, [step] * 2)
    for requests in (5, 1, 3, 2):
        batch = batch_of(requests, requests, load(backend_name)().device)
        first, later = (rows.tolist() for rows in runner(batch))
        assert first == batch["input_ids"].view(-1, WIDTH).sum(1).tolist()
        assert later == [int(batch["seq_lens"][0]) * WIDTH, *[0] * (requests - 1)]


def test_what_cannot_be_chained() -> None:
    """Nothing to run, slots that no batch brings, and values that would be stale in later steps are refused."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"steps": []}, r"steps= is a list of functions .* at least one; got \[\]"),
        ({"steps": [3]}, r"steps= is a list of functions"),
        ({"chained": ["idss"]}, r"chained names 'idss', which is no copied slot of Derived"),
        ({"chained": ["twice"]}, r"chained names 'twice', which is no copied slot of Derived"),
        ({"chained": ["ids"]}, r"slot 'twice' is computed once, from 'ids', of which each step has its own"),
    ]
    known: dict[str, Any] = {"steps": [nothing] * 2, "chained": ["lens"], "width": 1, "buckets": [2], "backend": "cpu"}
    for options, message in wrong:
        given = {**known, **options}
        with pytest.raises(ConfigError, match=message):
            MultiLayerDraftExtendRunner(Derived, given.pop("steps"), **given)
    with pytest.raises(ConfigError, match=r"ChainInputs needs sizes= for its fixed axes FRONT, HIDDEN"):
        MultiLayerDraftExtendRunner(ChainInputs, STEPS, width=WIDTH, buckets=[2], backend="cpu")
