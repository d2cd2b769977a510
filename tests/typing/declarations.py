# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Never run: mypy and pyright hold that declarations, batches, views and runners are typed.

A line that must be refused carries an ignore; each checker reports one that it does not need.
"""

from typing import assert_type

import torch

from slotgraph import (
    BATCH,
    CACHE_LOC,
    SEQ_LEN_FILL,
    TOKENS,
    Axis,
    DecodeRunner,
    EagerRunner,
    Inputs,
    Step,
    computed,
    constant,
    copied,
    keep,
    output,
    staged,
)
from slotgraph.extend import once, side

HIDDEN = Axis("HIDDEN", fixed=True)
PAGES = Axis("PAGES")
VOCAB = Axis("VOCAB", fixed=True)


def live_tokens(step: Step) -> int:
    """Computed on the host."""
    return step.live(TOKENS)


def request_rows(seq_lens: torch.Tensor) -> torch.Tensor:
    """Computed on the device."""
    return torch.arange(seq_lens.shape[0], device=seq_lens.device)


class DecodeInputs(Inputs):
    """Each way to declare a slot, once."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=keep("rows past the live ones are never read"))
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=once(0))
    block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0, source=side("tables.decode"))
    mrope_positions: torch.Tensor | None = copied(3, TOKENS, dtype=torch.int64, pad=0, default=None, strided=True)
    num_token_non_padded: torch.Tensor = computed(live_tokens, shape=1, dtype=torch.int32)
    rows: torch.Tensor = computed(request_rows, shape=BATCH, dtype=torch.int64)
    extend_seq_lens: torch.Tensor = constant(1, shape=BATCH, dtype=torch.int32)
    kv_lens: torch.Tensor = copied(
        BATCH, dtype=torch.int32, pad=1, source="lens", argument="context_lens", placement="host"
    )
    windows: torch.Tensor | None = copied(
        BATCH, dtype=torch.int64, pad=0, default=None, placement="host", argument="windows"
    )
    kv_ends: torch.Tensor = computed(live_tokens, dtype=torch.int64, placement="host", argument="actual_seq_lengths")
    input_embeds: torch.Tensor = staged(TOKENS, HIDDEN, dtype=torch.bfloat16, pad=0)
    next_token_logits: torch.Tensor = output(TOKENS, VOCAB, dtype=torch.float32)
    forward_mode: str = "decode"


class SlidingWindowInputs(DecodeInputs):
    """A declaration with one slot more than its base."""

    out_cache_loc_swa: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=0)


def views_are_typed(view: SlidingWindowInputs) -> None:
    """A view's slots have the types that the declaration gives them, inherited ones too."""
    assert_type(view.input_ids, torch.Tensor)
    assert_type(view.mrope_positions, torch.Tensor | None)
    assert_type(view.num_token_non_padded, torch.Tensor)
    assert_type(view.rows, torch.Tensor)
    assert_type(view.extend_seq_lens, torch.Tensor)
    assert_type(view.kv_lens, torch.Tensor)
    assert_type(view.windows, torch.Tensor | None)
    assert_type(view.kv_ends, torch.Tensor)
    assert_type(view.input_embeds, torch.Tensor)
    assert_type(view.next_token_logits, torch.Tensor)
    assert_type(view.forward_mode, str)
    assert_type(view.out_cache_loc_swa, torch.Tensor)
    assert_type(view.narrow(BATCH, 0, 1), SlidingWindowInputs)
    view.input_idz  # type: ignore[attr-defined]  # noqa: B018


def batches_are_typed(rows: torch.Tensor) -> None:
    """A batch is given what is copied; what is optional, computed, constant, staged or an output is not asked for."""
    batch = DecodeInputs(
        input_ids=rows, positions=rows, seq_lens=rows, out_cache_loc=rows, block_tables=rows, kv_lens=rows
    )
    assert_type(batch, DecodeInputs)
    DecodeInputs(
        input_ids=rows,
        positions=rows,
        seq_lens=rows,
        out_cache_loc=rows,
        block_tables=rows,
        kv_lens=rows,
        mrope_positions=rows,
        forward_mode="target_verify",
    )
    DecodeInputs(input_ids=rows)  # type: ignore[call-arg]
    DecodeInputs(
        input_ids=[1, 2],  # type: ignore[arg-type]
        positions=rows,
        seq_lens=rows,
        out_cache_loc=rows,
        block_tables=rows,
        kv_lens=rows,
    )


def model_step(view: DecodeInputs) -> torch.Tensor:
    """A step that reads the declaration."""
    return view.input_ids


def runners_are_typed(batch: DecodeInputs) -> None:
    """A runner takes the declaration and a step that reads it; what it answers is plain data."""
    runner = DecodeRunner(DecodeInputs, model_step, buckets=[1, 2, 4, 8], backend="auto", sizes={PAGES: 64})
    report = runner.capture()
    assert_type(report.memory.inputs, int)
    assert_type(report.memory.graphs, int)
    assert_type(report.memory.outputs, int)
    decision = runner.decide(batch)
    assert_type(decision.bucket, int | None)
    assert_type(decision.reason, str)
    eager = EagerRunner(DecodeInputs, model_step, backend="cpu", sizes={PAGES: 64})
    eager(batch)
