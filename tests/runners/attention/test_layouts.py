"""Each declaration holds, byte for byte, what the library's own builder makes: live rows and tails."""

import itertools
import random
import types
from typing import Any

import attrs
import pytest
import torch

from slotgraph import (
    BATCH,
    SEQ_LEN_FILL,
    TOKENS,
    DecodeRunner,
    EagerRunner,
    Inputs,
    attention,
    copied,
    errors,
    extend,
    standard,
)
from slotgraph.backends import Backend
from slotgraph.backends.cpu import CpuBackend
from slotgraph.runners.engine.compiled import AS_ONE
from slotgraph.speculative import WIDTH, DraftRunner, DraftStep
from tests.runners.attention import kinds
from tests.runners.attention.builders import BUILDERS, STEPS, Requests, flashinfer, mla_schedule

EVEN = [name for name in BUILDERS if not kinds.is_ragged(name) and name != "FusedInferAttention"]
FILLED = [name for name in BUILDERS if name not in EVEN]
"""Prefills, and the kernel of NPUs: a capture refuses its host parameters if the step has no such operator."""
BATCHES = [25, pytest.param(250, marks=pytest.mark.slow)]
"""Random batches, for each of four pages' sizes."""


def test_every_declaration_has_a_builder() -> None:
    """The module exports no declaration that is not compared here, and has no test of its own elsewhere."""
    assert {*kinds.KINDS} - {"PagedCache", "PooledCache", "FlashInferPlanned"} == {*BUILDERS}


def assert_built(view: Any, name: str, one: Requests) -> None:
    """Each slot of a view holds what the builder makes of a step's requests, and has the dtype as declared."""
    for slot, expected in BUILDERS[name](one).items():
        got = getattr(view, slot)
        assert got.dtype == kinds.KINDS[name].slotgraph.slots[slot].dtype
        assert torch.equal(got.cpu(), torch.tensor(expected, dtype=got.dtype)), slot


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize(("page", "width"), [(1, 1), (3, 2), (16, 1), (4, 3)])
@pytest.mark.parametrize("name", EVEN)
def test_replayed_slots_are_the_builders(name: str, page: int, width: int, batches: int, backend: Backend) -> None:
    """Equal queries: random batches, a thousand for each declaration, most of a size that no earlier one had."""
    runner = kinds.decoder(name, lambda view: view.queries * 2, backend, page, width)
    for seed, (draw, rows) in enumerate(kinds.games(page, batches)):
        one = kinds.random_requests(draw, name, page, width, rows)
        view = runner.fill(kinds.batch_of(one, name, backend.device, seed))
        runner.replay(view)
        assert_built(view, name, kinds.padded(one, name, width, kinds.bucket_of(rows), backend))


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("page", [1, 3, 16, 4])
@pytest.mark.parametrize("name", FILLED)
def test_filled_slots_are_the_builders(name: str, page: int, batches: int, backend: Backend) -> None:
    """In buffers without a runner: random batches, a thousand for each declaration."""
    buffers = kinds.buffers_of(name, backend, page, 1)
    for seed, (draw, rows) in enumerate(kinds.games(page, batches)):
        one = kinds.random_requests(draw, name, page, 1, rows)
        bucket = kinds.bucket_of(rows)
        padded = {BATCH: bucket, TOKENS: bucket * (6 if kinds.is_ragged(name) else 1)}
        view = buffers.at(padded).fill(kinds.batch_of(one, name, backend.device, seed))
        assert_built(view, name, kinds.padded(one, name, 1, bucket, backend))


@pytest.mark.parametrize(
    "bases",
    [
        (standard.DecodeInputs, standard.Mamba, attention.FlashInferDecode),
        (standard.DecodeInputs, attention.PooledCache, attention.FlashAttention),
        (standard.TargetVerifyInputs, attention.LinearAttentionVerify, attention.FlashInferVerify),
        (standard.DraftExtendInputs, attention.SparseIndexer, attention.FlashAttention),
        (standard.BreakableInputs, attention.LinearAttention, attention.FlashAttentionPrefill),
        (standard.BreakableInputs, attention.FlashInferPrefill, attention.LinearAttention),
        (standard.DecodeInputs, standard.HostLengths, attention.FusedInferAttention),
        (standard.DecodeInputs, attention.FlashMLA, attention.FlexDecode, standard.Lora, standard.Sampling),
        (standard.DecodeInputs, attention.FlashInferPlanned, attention.FlashInferWindow),
        (standard.DecodeInputs, attention.TritonBalanced, standard.SlidingWindow),
        (standard.BreakableInputs, attention.SparseIndexerPrefill, standard.LoraPrefill),
        (standard.TargetVerifyInputs, attention.SparseIndexerSchedule, attention.FlashMLA),
        (standard.DraftInputs, attention.FlashInferDraft),
    ],
)
def test_they_mix_with_standard_declarations(bases: tuple[type[Inputs], ...]) -> None:
    """In any order, with the slots of all."""
    for order in itertools.permutations(bases):
        made: Any = types.new_class("Mixed", order, {})
        assert {*made.slotgraph.slots} == {slot for base in bases for slot in base.slotgraph.slots}


def test_a_rank_s_lengths_beside_a_standard_declaration() -> None:
    """A class says whose seq_lens it has; two bases that differ are refused."""
    bases: Any = (standard.DecodeInputs, attention.ContextParallel, attention.FlashAttention)
    with pytest.raises(errors.DeclarationErrors, match="breaks 1 rule"):
        types.new_class("Torn", bases, {})

    class Rank(*bases):  # type: ignore[misc]
        seq_lens: torch.Tensor = extend.slot(attention.ContextParallel.slotgraph.slots["seq_lens"])

    assert Rank.slotgraph.slots["seq_lens"].kind == "computed"


def test_layouts_that_differ_do_not_mix() -> None:
    """Pages and tokens have the same name in two libraries; one class cannot have both."""
    with pytest.raises(
        errors.DeclarationErrors, match="breaks 3 rules"
    ):  # kv_indptr, kv_indices, and a function without its slots
        types.new_class("Torn", (attention.FlashInferDecode, attention.TritonDecode), {})


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in kinds.WHOLE_STEP])
def test_a_step_of_no_requests_has_empty_sets(name: str) -> None:
    """An idle rank may run one, without a graph: offsets alone have a row."""
    inputs = kinds.with_tokens(name)
    sizes = kinds.sizes_of(inputs, 4) | ({WIDTH: 1} if WIDTH in inputs.slotgraph.axes else {})
    runner: EagerRunner[Any] = EagerRunner(inputs, lambda view: view, sizes=sizes, backend="cpu")
    none = {slot: torch.zeros(0, dtype=torch.int32) for slot in ("seq_lens", "extend_seq_lens", "extend_prefix_lens")}
    none |= {slot: torch.zeros(0, dtype=torch.int32) for slot in ("state_indices", "num_accepted_tokens")}
    none |= {name: torch.zeros(0, kinds.PAGES, dtype=torch.int32) for name in ("page_table", "window_page_table")}
    none["queries"] = torch.zeros(0, 4)
    if name == "LinearAttentionVerify":
        none["state_indices"] = none["state_indices"][:, None]
    view = runner(none)
    made = BUILDERS[name](kinds.random_requests(random.Random(1), name, 4, 1, 1))
    for slot in set(made) - {"chunk_indices", "schedule_metadata"}:
        found = getattr(view, slot)
        assert not found.any(), slot
        assert found.numel() in {0, 1, STEPS}, slot


@pytest.mark.parametrize("name", ["SparseIndexer", "TritonBalanced", "TritonDecode", "TritonWindow"])
def test_requests_of_different_lengths_are_refused_by_sets_for_equal_ones(name: str) -> None:
    """Three tokens of two requests: the set says what it is for."""
    inputs = kinds.with_tokens(name)
    runner: EagerRunner[Any] = EagerRunner(inputs, lambda view: view, sizes=kinds.sizes_of(inputs, 4), backend="cpu")
    one = kinds.random_requests(random.Random(1), name, 4, 1, 2)
    batch = kinds.batch_of(one, name, torch.device("cpu")) | {"queries": torch.ones(3, 4)}
    with pytest.raises(errors.ComputeError, match="3 padded tokens do not divide among 2 padded requests"):
        runner(batch)


@pytest.mark.parametrize("name", ["FlashAttention", "FlashInferVerify", "FlashMLA", "FlexDecode", "TritonDecode"])
def test_what_a_kernel_does_not_read_may_be_left_out(name: str) -> None:
    """Each computed slot alone is what it is among all; FlashMLA's need one that has its parts."""
    one = kinds.random_requests(random.Random(9), name, 4, 2, 3)
    batch = kinds.batch_of(one, name, torch.device("cpu"))
    computed = [slot for slot, kind in kinds.KINDS[name].slotgraph.slots.items() if kind.needs]
    views = dict[str, Any]()
    for alone in ("", *computed):
        dropped = [slot for slot in computed if alone and slot != alone]
        inputs: Any = types.new_class("Part", (kinds.with_tokens(name),), {"drop": dropped})
        sizes = kinds.sizes_of(inputs, 4) | ({WIDTH: 2} if WIDTH in inputs.slotgraph.axes else {})
        runner: EagerRunner[Any] = EagerRunner(inputs, lambda view: view, sizes=sizes, backend="cpu")
        if alone in ("cost_offsets", "num_splits"):
            with pytest.raises(errors.ComputeError, match="no slot has SM_PARTS"):
                runner(batch)
        else:
            views[alone] = runner(batch)
    whole = views.pop("")
    for slot, view in views.items():
        assert torch.equal(getattr(view, slot), getattr(whole, slot)), slot


HALVES = ((0, 3), (3, 8))
"""The requests of two micro-batches."""


@pytest.mark.parametrize("name", EVEN)
def test_micro_batches_have_sets_of_their_own(name: str, backend: Backend) -> None:
    """Two halves of a batch, in one captured step: each has what the builder makes of its own requests."""
    one = kinds.random_requests(random.Random(5), name, 4, 2, 8)
    slots = [*BUILDERS[name](one)]

    def halves(view: Any) -> list[torch.Tensor]:
        return [
            getattr(half, slot).clone() for half in (view.narrow(BATCH, *rows) for rows in HALVES) for slot in slots
        ]

    inputs = kinds.with_tokens(name)
    sizes = kinds.sizes_of(inputs, 4)
    given: dict[str, Any] = {"buckets": [8], "width": 2, "sizes": sizes, "output_rows": None, "progress": False}
    runner: DecodeRunner[Any] = DecodeRunner(inputs, halves, backend=backend, **given)
    runner.capture()
    found = iter(runner(kinds.batch_of(one, name, backend.device)))
    whole = kinds.padded(one, name, 2, 8, backend)
    for rows in HALVES:
        own = {part: getattr(whole, part)[slice(*rows)] for part in ("lens", "table", "queries", "states", "accepted")}
        own["window_table"] = whole.window_table[slice(*rows)]
        for slot, expected in BUILDERS[name](attrs.evolve(whole, **own)).items():
            got = next(found)
            assert torch.equal(got.cpu(), torch.tensor(expected, dtype=got.dtype)), slot


def test_the_builders_make_the_libraries_values() -> None:
    """Values that the libraries' own sources gave: FlashInfer's documentation, and FlashMLA's kernel on a CPU."""
    one = Requests(
        lens=[17 * 16 + 1, 12 * 16 + 7, 5 * 16], table=[[*range(i, i + 20)] for i in (1, 30, 60)], queries=[], page=16,
        pages=20,
    )  # fmt: skip
    built = flashinfer(one)
    assert built["kv_indptr"] == [0, 18, 31, 36]
    assert built["kv_last_page_len"] == [1, 7, 16]
    assert built["kv_indices"][16:20] == [17, 18, 30, 31]
    assert built["kv_indices"][34:38] == [63, 64, 0, 0]
    rows, splits = mla_schedule([300, 1, 900], 64, 4)
    assert rows[1:3] == [[1, 2, 0, 3, 0, 0, 1, 0], [2, 2, 3, 12, 1, 1, 1, 0]]
    assert (rows[0], rows[3], splits) == ([0, 0, 0, 5, 0, 0, 0, 0], [2, 2, 12, 15, 2, 1, 1, 0], [0, 1, 2, 5])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVEN if name != "TritonBalanced"])  # a logarithm
def test_all_functions_are_compiled_as_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being asked to, on a device that compiles: they make whole numbers only, and the same bytes."""
    monkeypatch.setattr(CpuBackend, "capabilities", attrs.evolve(CpuBackend().capabilities, compiles=True))
    backend = CpuBackend()
    runner = kinds.decoder(name, lambda view: view.queries * 2, backend, 4, 2)
    computed = [slot for slot, one in kinds.KINDS[name].slotgraph.slots.items() if one.needs]
    assert runner.stats()["capture"]["functions"] == dict.fromkeys(computed, AS_ONE)
    for seed, (draw, rows) in enumerate(kinds.games(6, 40)):
        one = kinds.random_requests(draw, name, 4, 2, rows)
        view = runner.fill(kinds.batch_of(one, name, backend.device, seed))
        runner.replay(view)
        assert_built(view, name, kinds.padded(one, name, 2, kinds.bucket_of(rows), backend))


class Roots(attention.TritonDraft):
    """What a draft begins with, and the lists of its attention."""

    topk_p: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.float32, pad=0)
    topk_index: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.int64, pad=0)


def test_a_draft_runner_has_lists_for_each_step(backend: Backend) -> None:
    """Each call of the model reads those of its step in a graph: here it drafts the place of its newest token."""
    page, topk, steps = 4, 2, 3

    def forward(view: Roots, step: DraftStep) -> tuple[torch.Tensor, None]:
        ends = view.kv_indptr[step.index][1:]
        newest = view.kv_indices[step.index][ends.long() - 1]
        return torch.nn.functional.one_hot(newest, 50).float(), None

    sizes = {attention.PAGES: kinds.PAGES, attention.PAGE_SIZE: page}
    runner: DraftRunner[Any] = DraftRunner(
        Roots, forward, topk=topk, steps=steps, sizes=sizes, buckets=[3], backend=backend, progress=False
    )
    runner.capture()
    lens, table = [5, 9], [[*range(1, 6)], [*range(6, 11)]]
    batch = {"seq_lens": lens, "page_table": table, "topk_p": [[0.6, 0.4]] * 2, "topk_index": [[1, 2]] * 2}
    view = runner.fill(batch)
    drafts = runner.replay(view)
    assert view.kv_indptr.shape == (steps, 3 * topk + 1)
    first = [
        table[row][place // page] * page + place % page
        for row, length in enumerate(lens)
        for place in range(length, length + topk * steps, steps)
    ]
    assert view.kv_indices[0][view.kv_indptr[0][1 : 1 + 2 * topk].long() - 1].tolist() == first
    children = drafts.tokens[:, topk : topk + topk * topk].view(2, topk, topk)
    assert children[:, :, 0].flatten().tolist() == first  # the likeliest of each


def test_page_tables_of_a_pool(backend: Backend) -> None:
    """A page table that is gathered from an engine's table of tokens has each page of each request, live or not."""
    rows, page = 7, 3
    inputs: Any = types.new_class("Pooled", (kinds.Tokens, attention.PooledCache, attention.FlashInferDecode), {})
    draw = torch.Generator().manual_seed(5)
    pages = torch.randint(1, 90, (rows, kinds.PAGES), generator=draw)
    tokens = (pages[:, :, None] * page + torch.arange(page)).flatten(1).to(backend.device, torch.int32)
    runner: DecodeRunner[Any] = DecodeRunner(
        inputs,
        lambda view: view.queries * 2,
        buckets=kinds.BUCKETS,
        sizes={**kinds.sizes_of(inputs, page), attention.POOL: rows},
        bind={"req_to_token": tokens},
        keep_bound=True,
        backend=backend,
        progress=False,
    )
    runner.capture()
    for rows_of_pool in ([4], [1, 6, 2], [5, 5, 3, 1, 2, 6]):
        lens = [page * kinds.PAGES - i for i in range(len(rows_of_pool))]
        batch = {"queries": torch.ones(len(lens), 4, device=backend.device), "seq_lens": lens}
        view = runner.fill({**batch, "req_pool_indices": rows_of_pool})
        runner.replay(view)
        bucket = kinds.bucket_of(len(lens))
        table = [pages[row].tolist() for row in [*rows_of_pool, *[0] * (bucket - len(lens))]]
        one = Requests(lens=lens, table=table, queries=[], page=page, pages=kinds.PAGES)
        assert view.page_table.tolist() == table
        fill = int(SEQ_LEN_FILL.on(backend.capabilities))
        assert_built(view, "FlashInferDecode", attrs.evolve(one, lens=lens + [fill] * (bucket - len(lens))))
