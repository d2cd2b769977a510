# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Never run: mypy and pyright hold that classes made of standard declarations are typed, whatever they combine."""

from typing import assert_type

import torch

from slotgraph import BATCH, DecodeRunner, copied, standard


@standard.model_dtype(torch.float16)
class Mine(standard.DecodeInputs, standard.SlidingWindow, standard.ExpertParallel, standard.PipelineProxies):
    """A base, mixins, and a slot of one's own."""

    lora_ids: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)


def views_are_typed(view: Mine) -> None:
    """Slots of all bases have their types; what may be absent may be None."""
    assert_type(view.input_ids, torch.Tensor)
    assert_type(view.out_cache_loc_swa, torch.Tensor)
    assert_type(view.num_token_non_padded, torch.Tensor)
    assert_type(view.seq_lens_cpu, torch.Tensor | None)
    assert_type(view.pp_residual, torch.Tensor | None)
    assert_type(view.lora_ids, torch.Tensor)
    assert_type(view.capture_hidden_mode, str)
    view.lora_idz  # type: ignore[attr-defined]  # noqa: B018


def batches_are_typed(rows: torch.Tensor) -> None:
    """A batch is given what is copied and required."""
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


def step(view: Mine) -> torch.Tensor:
    """A step that reads the declaration."""
    return view.lora_ids


def runners_are_typed() -> None:
    """A runner takes the class, decorated or not, and a step that reads it."""
    DecodeRunner(Mine, step, sizes={standard.VOCAB: 8, standard.HIDDEN: 4}, settings=standard.Sharding())
