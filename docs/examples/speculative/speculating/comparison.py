"""The comparison: every token against what transformers' own generate() makes of each prompt alone."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from speculating.request import Request


def ask(model: PreTrainedModel, request: Request) -> list[int]:
    """Greedy generate() of one prompt alone: its new tokens."""
    ids = torch.tensor([request.prompt], device=model.device)
    settings = GenerationConfig(do_sample=False, max_new_tokens=request.limit, pad_token_id=0)
    generate: Any = model.generate
    output = generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def first_difference(requests: Sequence[Request], answers: Sequence[Sequence[int]]) -> str | None:
    """Where a request first goes another way than its answer; None where all are equal."""
    for request, answer in zip(requests, answers, strict=True):
        if request.generated != list(answer):
            pairs = zip(request.generated, answer, strict=False)
            place = next((at for at, (got, due) in enumerate(pairs) if got != due), len(request.generated))
            got, due = request.generated[place : place + 1], list(answer[place : place + 1])
            return f"request {request.number}, generated token {place}: expected {due}, got {got}"
    return None
