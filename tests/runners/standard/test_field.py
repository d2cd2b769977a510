"""The inputs of the field, as a plain list: each is in its class with its shape, its dtype, its tail and its kind."""

from typing import Any, Final

import pytest
import torch

from slotgraph import Inputs, standard
from slotgraph.dataflow.capabilities import CACHE_LOC, resolve_dtype
from slotgraph.dataflow.explain import explain_declaration
from tests.runners.standard.batches import CLASSES, CUDA, NPU

FILL: Final = "pad=seq_len_fill"
Row = tuple[str, str, str, str, str, str]
"""Slot, shape, dtype on CUDA / on an NPU, placement, tail, kind. A tail that ends in `(` is kept for some reason."""

REQUESTS: Final[list[Row]] = [
    ("req_pool_indices", "BATCH", "int64", "device", "pad=0", "copied"),
    ("seq_lens", "BATCH", "int32", "device", FILL, "copied"),
    ("seq_lens_cpu", "BATCH", "int32", "host", FILL, "copied optional"),
]
MROPE: Final[list[Row]] = [("mrope_positions", "3 TOKENS", "int64", "device", "pad=0", "copied optional")]
DECODE: Final[list[Row]] = [
    *REQUESTS,
    ("input_ids", "TOKENS", "int64", "device", "keep (", "copied"),
    ("positions", "TOKENS", "int64", "device", "pad=0", "copied"),
    ("out_cache_loc", "TOKENS", "int64 / int32", "device", "pad=0", "copied"),
    ("next_token_logits", "TOKENS VOCAB", "float32", "device", "", "output"),
]
MAMBA: Final[list[Row]] = [
    ("mamba_track_indices", "BATCH", "int64", "device", "pad=0", "copied"),
    ("mamba_track_mask", "BATCH", "bool", "device", "pad=False", "copied"),
    ("mamba_track_seqlens", "BATCH", "int32", "device", "pad=0", "copied"),
]
PREFILL: Final[list[Row]] = [
    ("input_ids", "TOKENS", "int64", "device", "pad=0", "copied"),
    ("positions", "TOKENS", "int64", "device", "pad=0", "copied"),
    ("out_cache_loc", "TOKENS", "int64 / int32", "device", "pad=0", "copied"),
]
EXTEND: Final[list[Row]] = [
    *REQUESTS,
    ("input_ids", "TOKENS", "int64", "device", "keep (", "copied"),
    ("out_cache_loc", "TOKENS", "int64 / int32", "device", "pad=0, starts as 1", "copied"),
    ("positions", "TOKENS", "int64", "device", "pad=0", "copied"),
    ("extend_seq_lens", "BATCH", "int32", "device", "", "constant WIDTH"),
    ("select_index", "BATCH", "int64", "device", "", "computed device"),
    ("next_token_logits", "BATCH VOCAB", "float32", "device", "", "output"),
]


def proxies(tail: str) -> list[Row]:
    """What a pipeline's stages hand on."""
    return [
        ("pp_hidden_states", "TOKENS HIDDEN", "bfloat16", "device", tail, "copied optional side"),
        ("pp_residual", "TOKENS HIDDEN", "bfloat16", "device", tail, "copied optional side"),
    ]


def counts(kind: str) -> list[Row]:
    """What data-parallel ranks agree on."""
    return [
        ("global_num_tokens", "DP", "int32", "device", "", kind),
        ("global_num_tokens_for_logprob", "DP", "int32", "device", "", kind),
    ]


MASK: Final[Row] = ("custom_mask", "TOKENS * WIDTH + BATCH * FILL * WIDTH", "bool", "device", "pad=True", "staged")
FIELD: Final[dict[type[Inputs], list[Row]]] = {
    standard.DecodeInputs: DECODE,
    standard.EagerInputs: DECODE,
    standard.TargetVerifyInputs: [*DECODE, MASK],
    standard.SlidingWindow: [("out_cache_loc_swa", "TOKENS", "int32", "device", "pad=0", "copied")],
    standard.Mrope: MROPE,
    standard.DraftMrope: [(*MROPE[0][:-1], "copied optional restored")],
    standard.Mamba: MAMBA,
    standard.EncoderDecoder: [("encoder_lens", "BATCH", "int32", "device", "once=0", "copied")],
    standard.ExpertParallel: [("num_token_non_padded", "1", "int32", "device", "", "computed host")],
    standard.DataParallelGathered: counts("computed host"),
    standard.DataParallelGatheredExtend: counts("computed host"),
    standard.ExpertParallelSharded: [("num_token_non_padded", "1", "int32", "device", "", "computed host")],
    standard.DataParallelAgreed: counts("computed host"),
    standard.DataParallelAgreedExtend: counts("computed host"),
    standard.DataParallelCarried: counts("copied"),
    standard.NgramEmbedding: [
        ("ngram_column_starts", "BATCH", "int32", "device", "keep (", "copied nested"),
        ("ngram_req_lens", "BATCH", "int32", "device", "keep ( starts as 1", "copied nested"),
    ],
    standard.PipelineProxies: proxies("keep ("),
    standard.PrefillPipelineProxies: proxies("pad=0"),
    standard.PipelineIndices: [
        ("pp_topk_indices", "TOKENS INDEX_TOPK", "int32", "device", "keep (", "copied optional side")
    ],
    standard.PrefillPipelineIndices: [
        ("pp_topk_indices", "TOKENS INDEX_TOPK", "int32", "device", "pad=0", "copied optional side")
    ],
    standard.PrefillInputs: PREFILL,
    standard.DraftPrefillInputs: [
        *PREFILL,
        ("hidden_states", "TOKENS HIDDEN", "bfloat16", "device", "pad=0", "copied"),
    ],
    standard.InputEmbeds: [("input_embeds", "TOKENS HIDDEN", "bfloat16", "device", "pad=0", "staged")],
    standard.BreakableInputs: [
        *PREFILL,
        *REQUESTS[:2],
        ("extend_seq_lens", "BATCH", "int32", "device", "pad=0", "copied"),
        ("extend_prefix_lens", "BATCH", "int32", "device", "pad=0", "copied"),
        ("extend_start_loc", "BATCH", "int32", "device", "", "computed device"),
        ("orig_seq_lens", "BATCH", "int32", "device", FILL, "copied"),
    ],
    standard.DraftInputs: [
        *REQUESTS,
        ("input_ids", "TOKENS", "int64", "device", "keep (", "staged"),
        ("out_cache_loc", "STEPS * TOKENS", "int64 / int32", "device", "pad=0", "copied"),
        ("positions", "TOKENS", "int64", "device", "pad=0", "copied restored"),
        ("extend_seq_lens", "BATCH", "int32", "device", "", "constant 1"),
        ("topk_p", "BATCH TOPK", "float32", "device", "pad=0", "copied"),
        ("topk_index", "BATCH TOPK", "int64", "device", "pad=0", "copied"),
        ("hidden_states", "BATCH HIDDEN", "bfloat16", "device", "pad=0", "copied"),
    ],
    standard.DraftSampling: [
        ("draft_probs", "BATCH VOCAB", "float32", "device", "pad=0", "copied"),
        ("sampling_seed", "BATCH", "int64", "device", "pad=0", "copied"),
        ("temperatures", "BATCH 1", "float32", "device", "pad=1", "copied"),
        ("top_ks", "BATCH", "int32", "device", "pad=VOCAB", "copied"),
    ],
    standard.DraftExtendInputs: [
        *EXTEND,
        ("hidden_states", "TOKENS HIDDEN", "bfloat16", "device", "pad=0", "copied"),
        ("num_correct_drafts", "BATCH", "int32", "device", "pad=WIDTH", "copied"),
        ("num_accept_tokens", "BATCH", "int32", "device", "pad=WIDTH", "copied"),
    ],
    standard.MultiLayerDraftExtendInputs: [
        *EXTEND,
        ("hidden_states", "TOKENS HIDDEN", "bfloat16", "device", "pad=0", "copied rewritten"),
        ("num_correct_drafts", "BATCH", "int32", "device", "pad=-1, starts as 1", "copied"),
        ("num_accept_tokens", "BATCH", "int32", "device", "pad=-1, starts as 1", "copied"),
        ("extend_start_loc", "BATCH", "int32", "device", "", "constant even_starts"),
        ("front_tokens", "1", "int32", "device", "", "constant FRONT"),
    ],
    standard.Requests: REQUESTS,
    standard.BoundedContext: REQUESTS,
    standard.HostLengths: [("actual_seq_lengths_kv", "BATCH", "int32", "host", FILL, "parameter")],
    standard.ContextLengths: [("context_lens", "BATCH", "int32", "host", FILL, "parameter")],
}


def kind_of(slot: Any, facts: Any) -> str:
    """A slot's kind, and what else there is to say of where its value comes from."""
    words = [facts.kind]
    words += [word for word in ("optional", "restored") if getattr(slot, word)]
    words += ["rewritten"] * (slot.rewritten and facts.kind == "copied")
    words += ["side"] * (facts.argument is not None)
    words += ["nested"] * (facts.argument is None and str(facts.source).count(".") > 1)
    words += [one for one in (facts.runs_on, facts.value) if one is not None]
    return " ".join(words)


@pytest.mark.parametrize("inputs", FIELD, ids=lambda inputs: inputs.__name__)
def test_rows(inputs: type[Inputs]) -> None:
    """The class has the slots of the list, and no others."""
    slots = inputs.slotgraph.slots
    npu = {slot.name: slot for slot in explain_declaration(inputs.slotgraph, NPU, "npu").slots}
    found = {}
    for facts in explain_declaration(inputs.slotgraph, CUDA, "cuda").slots:
        other, tail = npu[facts.name].dtype, facts.tail or ""
        dtype = facts.dtype if facts.dtype == other else f"{facts.dtype} / {other}"
        tail = tail if not tail.startswith("keep (") else "keep (" + tail.partition("),")[2]
        shape = " ".join(facts.shape)
        found[facts.name] = (facts.name, shape, dtype, facts.placement, tail, kind_of(slots[facts.name], facts))
    assert found == {row[0]: row for row in FIELD[inputs]}


def test_every_class_is_listed() -> None:
    """No class is left out of the list."""
    assert set(FIELD) == set(CLASSES.values())


def test_what_an_npu_decides() -> None:
    """Of all slots, those with the role of cache locations are int32 there, and only these differ."""
    for inputs in CLASSES.values():
        for name, slot in inputs.slotgraph.slots.items():
            there, here = resolve_dtype(slot.dtype, NPU), resolve_dtype(slot.dtype, CUDA)
            assert (there != here) == (slot.dtype is CACHE_LOC) == (name == "out_cache_loc"), name
            assert slot.dtype is not CACHE_LOC or there == torch.int32
    window = standard.SlidingWindow.slotgraph.slots["out_cache_loc_swa"]
    assert resolve_dtype(window.dtype, NPU) == resolve_dtype(window.dtype, CUDA) == torch.int32
