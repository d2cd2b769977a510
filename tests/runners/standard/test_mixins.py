"""Mixins combine as plain bases, in any order; the counts that they compute, against plain Python."""

import types
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, Step, standard
from slotgraph.dataflow.buffers import allocate
from slotgraph.dataflow.errors import ComputeError, ConfigError, DeclarationError, DeclarationErrors
from slotgraph.dataflow.fill.bucket import Bucket
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.runners.standard import counts
from slotgraph.speculative import WIDTH
from tests.packing import filled
from tests.runners.standard.batches import NPU, batch_of, ranked, sizes_of
from tests.strategies import empty, same_bytes

BASES = (
    *(standard.DecodeInputs, standard.TargetVerifyInputs, standard.PrefillInputs, standard.BreakableInputs),
    *(standard.DraftInputs, standard.DraftExtendInputs, standard.MultiLayerDraftExtendInputs),
)
MIXINS = (
    *(standard.SlidingWindow, standard.Mrope, standard.InputEmbeds, standard.Mamba, standard.EncoderDecoder),
    *(standard.NgramEmbedding, standard.PipelineProxies, standard.PipelineIndices, standard.DraftSampling),
    *(standard.Sampling, standard.Lora),
    *(standard.BoundedContext, standard.HostLengths, standard.ContextLengths),
)
EXPERTS = (standard.ExpertParallel, standard.ExpertParallelSharded)
COUNTS = (standard.DataParallelGathered, standard.DataParallelAgreed, standard.DataParallelAgreedExtend)
"""At most one of each."""


@given(
    base=st.sampled_from(BASES),
    chosen=st.sets(st.sampled_from(MIXINS)),
    counted=st.tuples(*[st.sampled_from([None, *ways]) for ways in (EXPERTS, COUNTS)]),
    data=st.data(),
)
@settings(max_examples=25)
def test_any_base_takes_any_mixins(
    *, base: type[Inputs], chosen: set[type[Inputs]], counted: tuple[type[Inputs] | None, ...], data: st.DataObject
) -> None:
    """Whatever the order, the class has every slot of its bases, and is filled as the oracle fills it."""
    mixins = sorted(chosen.union(filter(None, counted)), key=lambda one: one.__name__)
    bases = data.draw(st.permutations([base, *mixins]))
    made: Any = types.new_class("Mixed", tuple(bases), {})
    names = {name for one in bases for name in one.slotgraph.slots} - {"seq_lens_cpu"}
    assert set(made.slotgraph.slots) - {"seq_lens_cpu"} == names
    live, padded = sizes_of(made, 2, 3), sizes_of(made, 4, 3)
    ranks = ranked(4, 6, 3, [{BATCH: 1, TOKENS: 3}, {BATCH: 2, TOKENS: 6}])
    sharding = standard.Sharding(attn_tp_size=3, attn_tp_rank=1, scattered=True)
    declaration = made.slotgraph.under(sharding, ranks=ranks)
    batch, beside = batch_of(declaration, live, 5)
    buffers = [allocate(declaration, padded, NPU, empty) for _ in range(2)]
    sizes = tuple(live[axis] for axis in declaration.varying)
    ready = filled(Bucket(declaration, padded, NPU, buffers[0]), batch, sizes, beside)
    ready.compute_on_device()
    right = fill_slot_by_slot(declaration, buffers[1], NPU, Step(live, padded), batch, beside)
    for name, expected in right.items():
        got = ready.views[name]
        assert got is not None
        assert expected is not None
        assert same_bytes(got, expected), name


def test_mixins_that_say_different_things_are_refused() -> None:
    """Counts are of buckets, told by ranks or carried: not both."""
    for bases in (
        (standard.DataParallelGathered, standard.DataParallelCarried),
        (standard.DataParallelGathered, standard.DataParallelAgreed),
        (standard.DataParallelCarried, standard.DataParallelAgreedExtend),
        (standard.ExpertParallel, standard.ExpertParallelSharded),
        (standard.DecodeInputs, standard.PrefillInputs),
    ):
        with pytest.raises(DeclarationErrors, match="breaks"):
            types.new_class("Torn", bases, {})


def test_the_decorator_settles_the_models_dtype() -> None:
    """The decorator settles the model's dtype, of inherited slots too, and keeps all else that they say."""

    @standard.model_dtype(torch.float32)
    class Mine(standard.DecodeInputs, standard.PipelineProxies, standard.InputEmbeds):
        """Mine."""

    slots, before = Mine.slotgraph.slots, standard.PipelineProxies.slotgraph.slots["pp_residual"]
    assert {slots[name].dtype for name in ("pp_hidden_states", "input_embeds", "next_token_logits")} == {torch.float32}
    assert slots["pp_residual"] == attrs.evolve(before, dtype=torch.float32)
    assert (Mine.__name__, Mine.__doc__, Mine.__module__) == ("Mine", "Mine.", __name__)
    ids = torch.arange(3)
    made = Mine(input_ids=ids, positions=ids, out_cache_loc=ids, req_pool_indices=ids, seq_lens=ids)
    assert made.pp_residual is None
    with pytest.raises(DeclarationError, match=r"Mamba: no slot has the model's dtype"):
        standard.model_dtype(torch.float16)(standard.Mamba)

    @standard.model_dtype(torch.float16)
    class Dropped(standard.DraftExtendInputs, standard.InputEmbeds, drop=["hidden_states"]):
        pass

    assert "hidden_states" not in Dropped.slotgraph.slots


ways = st.sampled_from(
    [lambda one: one, attrs.asdict, lambda one: types.SimpleNamespace(**attrs.asdict(one), other="name")]
)
"""Settings as the class for them, as a mapping, as an object of the user's own."""


def sharded(live: int, padded: int, sharding: standard.Sharding) -> int:
    """Rows of this rank's part, counted one by one, that are live."""
    part = range(padded)
    if sharding.scattered:
        chunk = padded // sharding.attn_tp_size
        part = range(chunk * sharding.attn_tp_rank, chunk * (sharding.attn_tp_rank + 1))
    return sum(row < live for row in part)


shardings = st.tuples(st.integers(1, 8), st.integers(0, 7), st.booleans()).map(
    lambda one: standard.Sharding(attn_tp_size=one[0], attn_tp_rank=one[1] % one[0], scattered=one[2])
)
"""A rank among one to eight."""


@given(sharding=shardings, chunk=st.integers(0, 40), rest=st.integers(0, 7), way=ways, data=st.data())
def test_each_rank_counts_the_live_rows_of_its_part(
    *, sharding: standard.Sharding, chunk: int, rest: int, way: Any, data: st.DataObject
) -> None:
    """Each rank counts the live rows of its own part; a bucket that does not divide is refused where it is cut."""
    padded = chunk * sharding.attn_tp_size + rest
    live = data.draw(st.integers(0, padded))
    step = Step({TOKENS: live}, {TOKENS: padded})
    if sharding.scattered and padded % sharding.attn_tp_size:
        said = rf"slot 'num_token_non_padded': {padded} padded tokens do not divide among {sharding.attn_tp_size} "
        with pytest.raises(ComputeError, match=said):
            counts.num_token_non_padded(step, way(sharding))
        return
    assert counts.num_token_non_padded(step, way(sharding)) == sharded(live, padded, sharding)


@given(width=st.integers(1, 6), data=st.data())
def test_last_correct_rows_stay_within_their_request(width: int, data: st.DataObject) -> None:
    """Multi-layer: behind the front, and within a request's own rows where a padded one has -1."""
    front = data.draw(st.integers(0, width - 1))
    correct = data.draw(st.lists(st.integers(0, width - front - 1), max_size=8))
    padded = [*correct, *[-1] * data.draw(st.integers(0, 4))]
    step = Step({}, {BATCH: len(padded), WIDTH: width})
    starts = counts.even_starts(step)
    assert starts.tolist() == [i * width for i in range(len(padded))]
    found = counts.last_correct(torch.tensor(padded, dtype=torch.int32), starts, torch.tensor([front]).int())
    assert found.dtype == torch.int64
    assert found.tolist() == [i * width + max(front + count, 0) for i, count in enumerate(padded)]
    assert all(row // width == i for i, row in enumerate(found.tolist()))


@given(lens=st.lists(st.integers(1, 9), max_size=8), requests=st.integers(0, 4), tokens=st.integers(0, 9))
def test_first_tokens_are_where_requests_begin(lens: list[int], requests: int, tokens: int) -> None:
    """Prefill: where each request begins; padded requests begin at a row that is there, wherever there is one."""
    rows = sum(lens) + tokens
    padded = torch.tensor([*lens, *[0] * requests], dtype=torch.int32)
    found = counts.first_tokens(padded, torch.empty(rows)).tolist()
    assert found[: len(lens)] == [sum(lens[:i]) for i in range(len(lens))]
    assert all(0 <= row < max(rows, 1) for row in found)


def test_settings_that_make_no_sense_are_refused() -> None:
    """A wrong rank or a name that is not there is refused by its name, and missing settings when a runner is made."""
    step = Step({TOKENS: 1}, {TOKENS: 2})
    for rank in (-1, 2, 5):
        with pytest.raises(
            ConfigError, match=rf"attn_tp_rank: expected a rank from 0, below attn_tp_size, 2, got {rank}"
        ):
            counts.num_token_non_padded(step, {"attn_tp_size": 2, "attn_tp_rank": rank, "scattered": True})
    with pytest.raises(ConfigError, match="settings have no 'scattered'"):
        counts.num_token_non_padded(step, {"attn_tp_size": 2, "attn_tp_rank": 0})

    class Experts(standard.PrefillInputs, standard.ExpertParallel):
        pass

    with pytest.raises(DeclarationError, match=r"slot 'num_token_non_padded': .* asks for `settings`"):
        DecodeRunner(Experts, lambda view: view.positions, buckets=[2], backend="cpu")


shards_of = st.integers(1, 5)
batches_of = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@given(requests=batches_of, shards=shards_of, width=st.integers(1, 4), spare=st.integers(0, 12), rest=st.integers(0, 4))
def test_each_rank_counts_every_batch_once(
    *, requests: list[int], shards: int, width: int, spare: int, rest: int
) -> None:
    """Each rank sees every batch's tokens and requests once, and counts the live rows of its own part of the bucket."""
    padded, fixed = (max(requests) * width + spare) * shards + rest, {standard.DP: len(requests)}
    told = [{BATCH: rows, TOKENS: rows * width} for rows in requests]
    for batch, live in enumerate(told):
        step, seen = Step(live | fixed, {BATCH: padded, TOKENS: padded, **fixed}), 0
        for place in range(shards):
            ranks = ranked(batch * shards + place, len(requests) * shards, shards, told)
            assert counts.agreed_tokens(step, ranks) == [one[TOKENS] for one in told]
            assert counts.agreed_requests(step, ranks) == requests
            if padded % shards:
                with pytest.raises(ComputeError, match=f"{padded} padded tokens .* {shards} .* or drop the slot there"):
                    counts.own_tokens(step, ranks)
                continue
            sharding = standard.Sharding(attn_tp_size=shards, attn_tp_rank=place, scattered=shards > 1)
            own = counts.own_tokens(step, ranks)
            assert own == sharded(live[TOKENS], padded, sharding) == counts.num_token_non_padded(step, sharding)
            seen += own
        assert seen == (0 if padded % shards else live[TOKENS])
