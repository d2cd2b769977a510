"""Draft-extend runners: many tokens a request go in and one row comes out, by one step, or by several in a chain."""

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
from slotgraph.speculative import WIDTH, DraftExtendRunner, MultiLayerDraftExtendRunner
from tests.runners.models import Batch, ready, same_batch, snapshot

WORDS, WIDE, ROWS, FRONT = 20, 4, 3, 1
BUCKETS = (2, 5)
_DRAW = torch.Generator().manual_seed(4)
LAYERS = [torch.randn(WIDE, WIDE, generator=_DRAW, dtype=torch.float64) for _ in range(3)]
TABLE = torch.randn(WORDS, WIDE, generator=_DRAW, dtype=torch.float64)
HEAD = torch.randn(WIDE, WORDS, generator=_DRAW, dtype=torch.float64)
OPTIONS: dict[str, Any] = {"buckets": BUCKETS, "absent": [{"seq_lens_cpu"}], "progress": False}
drawn_sizes = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 999)), min_size=1, max_size=4)


@standard.model_dtype(torch.float64)
class ExtendInputs(standard.DraftExtendInputs, drop=("next_token_logits",)):
    """The standard's; the step returns its rows."""


@standard.model_dtype(torch.float64)
class ChainInputs(standard.MultiLayerDraftExtendInputs, drop=("next_token_logits",)):
    """The standard's; the steps return their rows."""


@functools.cache
def on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Table, head and layers on a device; moved there in a warm-up, since a captured step could not."""
    return TABLE.to(device), HEAD.to(device), [layer.to(device) for layer in LAYERS]


def batch_of(requests: int, width: int, seed: int, device: Any = "cpu", *, whole: bool = False) -> Batch:
    """A random batch, of which each request has accepted 1 to `width` tokens, or all drafts behind the front."""
    draw = torch.Generator().manual_seed(seed)
    accepted = torch.randint(1, width + 1, (requests,), generator=draw, dtype=torch.int32)
    accepted = torch.full_like(accepted, width - FRONT) if whole else accepted
    batch = {
        "req_pool_indices": torch.arange(1, requests + 1),
        "seq_lens": torch.randint(width, 99, (requests,), generator=draw, dtype=torch.int32),
        "input_ids": torch.randint(1, WORDS, (requests * width,), generator=draw),
        "positions": torch.randint(1, 9, (requests * width,), generator=draw),
        "out_cache_loc": 1 + torch.randperm(requests * width, generator=draw),
        "hidden_states": torch.randn(requests * width, WIDE, generator=draw, dtype=torch.float64),
        "num_correct_drafts": accepted - 1,
        "num_accept_tokens": accepted,
    }
    return {name: value.to(device) for name, value in batch.items()}


def extend(view: Any) -> Any:
    """The row of each request's last accepted token, which depends on all of the request's tokens up to it."""
    rows = on(view.input_ids.device)[0][view.input_ids] * view.positions[:, None] + view.hidden_states
    sums = rows.view(view.seq_lens.shape[0], -1, WIDE).cumsum(1).flatten(0, 1)
    return sums[view.select_index] + view.extend_seq_lens[:, None]


def plain(batch: Batch, width: int) -> torch.Tensor:
    """The same, request by request."""
    found = [torch.empty(0, WIDE, dtype=torch.float64)]
    for request, count in enumerate(batch["num_accept_tokens"].tolist()):
        total = torch.full((1, WIDE), float(width), dtype=torch.float64)
        for row in range(request * width, request * width + count):
            total += TABLE[batch["input_ids"][row]] * batch["positions"][row] + batch["hidden_states"][row]
        found.append(total)
    return torch.cat(found)


@functools.cache
def captured(backend: str, width: int) -> DraftExtendRunner[ExtendInputs]:
    """A captured runner of one width."""
    sizes = {standard.HIDDEN: WIDE}
    return ready(DraftExtendRunner(ExtendInputs, extend, width=width, sizes=sizes, backend=backend, **OPTIONS))


@settings(max_examples=25)
@given(st.integers(1, 4), drawn_sizes)
def test_each_request_has_the_row_of_its_last_accepted_token(
    backend_name: str, width: int, drawn: list[tuple[int, int]]
) -> None:
    """Whatever the width, and how much was accepted, each request's row is that of its last accepted token."""
    for requests, seed in drawn:
        batch = batch_of(requests, width, seed, load(backend_name)().device)
        given, got = snapshot(batch), captured(backend_name, width)(batch)
        due = plain({name: value.cpu() for name, value in batch.items()}, width)
        torch.testing.assert_close(torch.as_tensor(got).cpu(), due)
        assert same_batch(batch, given)


def test_a_width_is_needed() -> None:
    """There is no width to assume, and none that contradicts itself."""
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'width'"):
        DraftExtendRunner(ExtendInputs, extend, sizes={standard.HIDDEN: WIDE}, backend="cpu")  # type: ignore[call-arg]
    for width, sizes, said in ((2, {WIDTH: 3}, "sizes of WIDTH is 3, and width= is 2"), (0, {}, "got 0")):
        with pytest.raises(ConfigError, match=said):
            DraftExtendRunner(ExtendInputs, extend, width=width, sizes={standard.HIDDEN: WIDE, **sizes}, backend="cpu")


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


def plain_chain(batch: Batch) -> list[torch.Tensor]:
    """The same for each request by itself, without a buffer."""
    found = [[torch.empty(0, WORDS, dtype=torch.float64)] for _ in LAYERS]
    for request, count in enumerate(batch["num_correct_drafts"].tolist()):
        rows = slice(request * ROWS, (request + 1) * ROWS)
        ids, hidden = batch["input_ids"][rows].tolist(), batch["hidden_states"][rows]
        for number in range(len(LAYERS)):
            hidden = answer(torch.tensor(ids), hidden, batch["positions"][rows], number)
            logits = hidden[FRONT + count] @ HEAD
            found[number].append(logits[None])
            ids = [*ids[1:], 0]
            ids[FRONT + count] = int(logits.argmax())
    return [torch.cat(rows) for rows in found]


def made(backend: str, steps: Sequence[Any] = STEPS) -> MultiLayerDraftExtendRunner[ChainInputs]:
    """A captured runner."""
    sizes = {standard.HIDDEN: WIDE, standard.FRONT: FRONT}
    return ready(MultiLayerDraftExtendRunner(ChainInputs, steps, width=ROWS, sizes=sizes, backend=backend, **OPTIONS))


chained = functools.cache(made)  # which all tests leave as usable as it was


@settings(max_examples=25)
@given(drawn_sizes)
def test_steps_are_chained(backend_name: str, drawn: list[tuple[int, int]]) -> None:
    """Batches of any size after one another: each step reads what the one before wrote, in one graph a bucket."""
    runner = chained(backend_name)
    for requests, seed in drawn:
        batch = batch_of(requests, ROWS, seed, load(backend_name)().device, whole=True)
        given, got = snapshot(batch), runner(batch)
        due = plain_chain({name: value.cpu() for name, value in batch.items()})
        for one, other in zip(got, due, strict=True):
            torch.testing.assert_close(torch.as_tensor(one).cpu(), other)
        assert same_batch(batch, given)
    assert len(runner.graphs.captured) == 2 * len(BUCKETS)


class Switched(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    extra: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7, when="extra")
    rare: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=3, default=None)


def test_a_chained_slot_that_is_off_is_none(cpu: str) -> None:
    """A chained slot that is switched off or absent is None for every step."""

    def step(view: Any, after: Any) -> Any:
        assert view.extra is None
        if after is not None:
            assert (after.extra, after.rare is None) == (None, view.rare is None)
            after.ids.copy_(view.ids + 1)
        return view.ids * 2

    options: dict[str, Any] = {"settings": {"extra": False}, "width": 1, "absent": [{"rare"}], "buckets": [4]}
    chain = ("ids", "extra", "rare")
    runner = ready(MultiLayerDraftExtendRunner(Switched, [step, step], chained=chain, backend=cpu, **options))
    ids = torch.tensor([3, 9, 4])
    for batch in ({"ids": ids}, {"ids": ids, "rare": ids}):
        assert [one.tolist() for one in runner(batch)] == [(ids * 2).tolist(), (ids * 2 + 2).tolist()]


class Derived(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=TOKENS, dtype=torch.int64)


def test_rows_that_no_step_writes_hold_the_tail(backend_name: str) -> None:
    """Each replay finds a later step's slots as a tail is, also where the step before wrote other rows last time."""

    def step(view: Any, after: Any) -> torch.Tensor:
        if after is not None:  # the first request's rows, where it says so
            after.input_ids[:ROWS] += view.seq_lens[0]
        return torch.sum(view.input_ids.view(-1, ROWS), 1)

    runner = made(backend_name, [step] * 2)
    for requests in (5, 1, 3, 2):
        batch = batch_of(requests, ROWS, requests, load(backend_name)().device, whole=True)
        first, later = (rows.tolist() for rows in runner(batch))
        assert first == batch["input_ids"].view(-1, ROWS).sum(1).tolist()
        assert later == [int(batch["seq_lens"][0]) * ROWS, *[0] * (requests - 1)]


def test_what_cannot_be_chained_is_refused() -> None:
    """Nothing to run, slots that no batch brings, and values that would be stale in later steps are refused."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"steps": []}, r"steps= is a list of functions .* at least one; got \[\]"),
        ({"steps": [3]}, r"steps= is a list of functions"),
        *(({"chained": [n]}, f"chained names '{n}', which is not a copied slot of Derived") for n in ("idss", "twice")),
        ({"chained": ["ids"]}, r"slot 'twice' is computed once, from 'ids', of which each step has a copy"),
    ]
    for options, message in wrong:
        given = {"steps": [lambda *_: None] * 2, "chained": ["lens"], "width": 1, **options}
        with pytest.raises(ConfigError, match=message):
            MultiLayerDraftExtendRunner(Derived, given.pop("steps"), buckets=[2], backend="cpu", **given)
    with pytest.raises(ConfigError, match=r"ChainInputs needs sizes= for its fixed axes FRONT, HIDDEN"):
        MultiLayerDraftExtendRunner(ChainInputs, STEPS, width=ROWS, buckets=[2], backend="cpu")
