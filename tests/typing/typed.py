# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""Never run: mypy and pyright hold that declarations, batches, views, runners, options and statistics are typed.

A line that must be refused carries an ignore; each checker reports one that it does not need.
"""

from typing import Any, assert_type

import torch
from prometheus_client import REGISTRY

from slotgraph import (
    BATCH,
    CACHE_LOC,
    SEQ_LEN_FILL,
    TOKENS,
    Axis,
    BreakableRunner,
    DecodeRunner,
    EagerRunner,
    Inputs,
    PrefillRunner,
    Step,
    computed,
    constant,
    copied,
    keep,
    output,
    staged,
    standard,
)
from slotgraph.config import RunnerConfig
from slotgraph.extend import LaunchedStep, once, side
from slotgraph.runners.engine.runner import Runner
from slotgraph.runners.metrics import Collector, exposition
from slotgraph.speculative import DraftExtendRunner, DraftRunner, Drafts, DraftStep, MultiLayerDraftExtendRunner

HIDDEN = Axis("HIDDEN", fixed=True)
PAGES = Axis("PAGES")
VOCAB = Axis("VOCAB", fixed=True)


def live_tokens(step: Step) -> int:
    """Computed on the host."""
    return step.live(TOKENS)


class DecodeInputs(Inputs):
    """Each way to declare a slot, once."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=keep("rows past the live ones are never read"))
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=once(0))
    block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0, source=side("tables.decode"))
    mrope_positions: torch.Tensor | None = copied(3, TOKENS, dtype=torch.int64, pad=0, default=None, strided=True)
    num_token_non_padded: torch.Tensor = computed(live_tokens, shape=1, dtype=torch.int32)
    extend_seq_lens: torch.Tensor = constant(1, shape=BATCH, dtype=torch.int32)
    kv_lens: torch.Tensor = copied(
        BATCH, dtype=torch.int32, pad=1, source="lens", argument="context_lens", placement="host"
    )
    kv_ends: torch.Tensor = computed(live_tokens, dtype=torch.int64, placement="host", argument="actual_seq_lengths")
    input_embeds: torch.Tensor = staged(TOKENS, HIDDEN, dtype=torch.bfloat16, pad=0)
    next_token_logits: torch.Tensor = output(TOKENS, VOCAB, dtype=torch.float32)
    forward_mode: str = "decode"


class SlidingWindowInputs(DecodeInputs):
    """A declaration with one slot more than its base."""

    out_cache_loc_swa: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=0)


@standard.model_dtype(torch.float16)
class Mine(standard.DecodeInputs, standard.SlidingWindow, standard.ExpertParallel, standard.PipelineProxies):
    """A standard base, mixins, and a slot of one's own."""

    lora_ids: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)


def views_are_typed(view: SlidingWindowInputs, mine: Mine) -> None:
    """A view's slots have the types that the declaration gives them, inherited ones too; what may be absent, None."""
    assert_type(view.input_ids, torch.Tensor)
    assert_type(view.mrope_positions, torch.Tensor | None)
    assert_type(view.num_token_non_padded, torch.Tensor)
    assert_type(view.extend_seq_lens, torch.Tensor)
    assert_type(view.kv_lens, torch.Tensor)
    assert_type(view.kv_ends, torch.Tensor)
    assert_type(view.input_embeds, torch.Tensor)
    assert_type(view.next_token_logits, torch.Tensor)
    assert_type(view.forward_mode, str)
    assert_type(view.out_cache_loc_swa, torch.Tensor)
    assert_type(view.narrow(BATCH, 0, 1), SlidingWindowInputs)
    view.input_idz  # type: ignore[attr-defined]  # noqa: B018
    assert_type(mine.out_cache_loc_swa, torch.Tensor)
    assert_type(mine.num_token_non_padded, torch.Tensor)
    assert_type(mine.pp_residual, torch.Tensor | None)
    assert_type(mine.lora_ids, torch.Tensor)
    assert_type(mine.capture_hidden_mode, str)
    mine.lora_idz  # type: ignore[attr-defined]  # noqa: B018


def batches_are_typed(rows: torch.Tensor) -> None:
    """A batch is given what is copied; what is optional, computed, constant, staged or an output is not asked for."""
    batch = DecodeInputs(
        input_ids=rows, positions=rows, seq_lens=rows, out_cache_loc=rows, block_tables=rows, kv_lens=rows
    )
    assert_type(batch, DecodeInputs)
    DecodeInputs(input_ids=rows, mrope_positions=rows, forward_mode="target_verify")  # type: ignore[call-arg]
    DecodeInputs(
        input_ids=[1, 2],  # type: ignore[arg-type]
        positions=rows,
        seq_lens=rows,
        out_cache_loc=rows,
        block_tables=rows,
        kv_lens=rows,
        mrope_positions=rows,
        forward_mode="target_verify",
    )
    Mine(
        input_ids=rows,
        positions=rows,
        out_cache_loc=rows,
        out_cache_loc_swa=rows,
        req_pool_indices=rows,
        seq_lens=rows,
        lora_ids=rows,
    )
    Mine(input_ids=rows)  # type: ignore[call-arg]


def step(view: DecodeInputs) -> torch.Tensor:
    """A step that reads the declaration."""
    return view.input_ids


def own_step(view: Mine) -> torch.Tensor:
    """A step that reads a class made of standard ones."""
    return view.lora_ids


def runners_are_typed(batch: DecodeInputs) -> None:
    """A runner takes the declaration and a step that reads it; what it answers is plain data."""
    runner = DecodeRunner(DecodeInputs, step, buckets=[1, 2, 4, 8], backend="auto", sizes={PAGES: 64})
    assert_type(runner.capture().memory.inputs, int)
    assert_type(runner.decide(batch).bucket, Any | None)  # an int with one axis
    assert_type(runner.decide(batch).reason, str)
    EagerRunner(DecodeInputs, step, backend="cpu", sizes={PAGES: 64})(batch)
    DecodeRunner(Mine, own_step, sizes={standard.VOCAB: 8, standard.HIDDEN: 4}, settings=standard.Sharding())


def by_name(input_ids: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A step that names slots."""
    return input_ids, len(seq_lens)


def forward(view: DecodeInputs, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a draft calls."""
    return view.input_ids, step.hidden_states


def chained(view: DecodeInputs, after: DecodeInputs | None) -> torch.Tensor:
    """One of several steps."""
    return view.input_ids if after is None else after.input_ids


class Model(torch.nn.Module):
    """Calls of modules are Any to torch itself."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A row a token."""
        return input_ids + positions


def outputs_are_typed(batch: DecodeInputs, view: DecodeInputs, only_view: DecodeRunner[DecodeInputs]) -> None:
    """A runner returns what its step returns, by its annotations: in a call, a replay, and a loop of steps."""
    decode = DecodeRunner(DecodeInputs, step)
    assert_type(decode, DecodeRunner[DecodeInputs, torch.Tensor])
    assert_type(decode(batch), torch.Tensor)
    assert_type(decode.replay(decode.fill(batch)), torch.Tensor)
    assert_type(decode.idle(), torch.Tensor | None)
    assert_type(decode.remade(), DecodeRunner[DecodeInputs, torch.Tensor])
    for launched in decode.steps(batch):
        assert_type(launched, LaunchedStep[torch.Tensor])
        assert_type(launched.outputs, torch.Tensor)
    for chosen in DecodeRunner(DecodeInputs, by_name).steps(batch, read=lambda outputs: outputs[1]):
        assert_type(chosen.outputs, int)
    assert_type(DecodeRunner(DecodeInputs, by_name)(batch), tuple[torch.Tensor, int])
    assert_type(DecodeRunner(DecodeInputs, Model())(batch), Any)
    assert_type(EagerRunner(DecodeInputs, by_name)(batch), tuple[torch.Tensor, int])
    assert_type(PrefillRunner(DecodeInputs, step, splits=["own::attention"])(batch), torch.Tensor)
    assert_type(BreakableRunner(DecodeInputs, by_name).replay(view), tuple[torch.Tensor, int])
    assert_type(DraftRunner(DecodeInputs, forward, topk=2, steps=2)(batch), Drafts)
    assert_type(DraftExtendRunner(DecodeInputs, step, width=2)(batch), torch.Tensor)
    several = MultiLayerDraftExtendRunner(DecodeInputs, [chained, chained], width=2)
    assert_type(several(batch), tuple[torch.Tensor, ...])
    assert_type(only_view(batch), Any)
    DecodeRunner(DecodeInputs, own_step)  # type: ignore[arg-type]


def each_runner_has_its_options() -> None:
    """Those that it uses, of their types, and no others."""
    DecodeRunner(DecodeInputs, step, buckets=[1, 2], width=2, lowering="foreach", error_mode=None, lazy=True)
    DecodeRunner(DecodeInputs, step, max_tokens=7)  # type: ignore[call-arg]
    DecodeRunner(DecodeInputs, step, no_copy=True)  # type: ignore[call-arg]
    DecodeRunner(DecodeInputs, step, width="2")  # type: ignore[arg-type]
    EagerRunner(DecodeInputs, step, no_copy=True)
    EagerRunner(DecodeInputs, step, lowering="foreach")  # type: ignore[call-arg]
    EagerRunner(DecodeInputs, step, buckets=[1, 2])  # type: ignore[call-arg]
    PrefillRunner(DecodeInputs, step, splits=["own::attention"], max_tokens=64, max_batch=4)
    PrefillRunner(DecodeInputs, step, splits=["own::attention"], width=7)  # type: ignore[call-arg]
    BreakableRunner(DecodeInputs, step, max_tokens=64, width=1)  # type: ignore[call-arg]
    DraftExtendRunner(DecodeInputs, step, width=3, phase=None, ranks=None)
    DraftExtendRunner(DecodeInputs, step, buckets=[1])  # type: ignore[call-arg]
    EagerRunner(DecodeInputs, step, **RunnerConfig.load("runner.toml").as_data())
    EagerRunner(DecodeInputs, step, config=RunnerConfig.load("pyproject.toml", table="tool.slotgraph"))
    DraftExtendRunner(DecodeInputs, step, width=2, config=RunnerConfig(max_tokens=7))
    DecodeRunner(DecodeInputs, step, config="runner.toml")  # type: ignore[arg-type]


def statistics_are_typed(decode: DecodeRunner[Any], prefill: PrefillRunner[Any], anyone: Runner[Any]) -> None:
    """Every key of any runner has its type, and an unknown one is none; a collector takes runners alone."""
    assert_type(decode.stats()["buckets"][4]["waste"], float)
    assert_type(prefill.stats()["eager"]["too_large"]["live"], int)
    assert_type(anyone.stats()["fills"]["buckets"][8]["mean"], float | None)
    assert_type(anyone.stats()["capture"]["failed"], dict[Any, str])
    decode.stats()["bucketz"]  # type: ignore[typeddict-item]
    REGISTRY.register(Collector(decode=decode, extend=prefill))
    assert_type(exposition(decode=decode), str)
    Collector(decode="decode")  # type: ignore[arg-type]
