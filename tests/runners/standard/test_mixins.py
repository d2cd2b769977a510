"""Mixins combine as plain bases, in any order, and have slots of the model's dtype."""

import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Inputs, standard
from slotgraph.dataflow.axes import Step
from slotgraph.dataflow.bucket import Bucket
from slotgraph.dataflow.buffers import allocate
from slotgraph.dataflow.errors import DeclarationError, DeclarationErrors
from slotgraph.dataflow.oracle import fill_slot_by_slot
from tests.runners.standard.batches import NPU, batch_of, ranked, sizes_of
from tests.strategies import empty, same_bytes

BASES = (
    *(standard.DecodeInputs, standard.TargetVerifyInputs, standard.PrefillInputs, standard.BreakableInputs),
    *(standard.DraftInputs, standard.DraftExtendInputs, standard.MultiLayerDraftExtendInputs),
)
MIXINS = (
    *(standard.SlidingWindow, standard.Mrope, standard.InputEmbeds, standard.Mamba, standard.EncoderDecoder),
    *(standard.NgramEmbedding, standard.PipelineProxies, standard.PipelineIndices, standard.DraftSampling),
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
def test_any_base_with_any_mixins(
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
    ready = Bucket(declaration, padded, NPU, buffers[0]).fill(batch, sizes, side=beside)
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


def test_models_dtype() -> None:
    """The decorator settles the model's dtype, of inherited slots too, and keeps all else that they say."""

    @standard.model_dtype(torch.float32)
    class Mine(standard.DecodeInputs, standard.PipelineProxies, standard.InputEmbeds):
        """Mine."""

    slots = Mine.slotgraph.slots
    before = standard.PipelineProxies.slotgraph.slots["pp_residual"]
    assert {slots[name].dtype for name in ("pp_hidden_states", "pp_residual", "input_embeds")} == {torch.float32}
    assert (slots["pp_residual"].shape, slots["pp_residual"].optional) == (before.shape, True)
    assert slots["pp_residual"].rule() == before.rule()
    assert slots["next_token_logits"].dtype == torch.float32
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
