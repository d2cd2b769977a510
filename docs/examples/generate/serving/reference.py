"""The reference: what transformers' own generate() makes of each prompt alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from transformers import GenerationConfig

from serving.model import Language
from serving.request import Request


@attrs.frozen(eq=False)
class Answer:
    """What generate() said. tokens: generated ids. logits: [tokens, vocabulary] float32 on the host."""

    tokens: list[int]
    logits: torch.Tensor


def reference_answers(language: Language, requests: Sequence[Request]) -> Iterator[Answer]:
    """Greedy generate() of each prompt alone, with the model's own attention and cache."""
    for request in requests:
        ids = torch.tensor([request.prompt_ids], device=language.model.device)
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=request.limit,
            eos_token_id=sorted(language.eos) or None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        generate: Any = language.model.generate
        output = generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        yield Answer(output.sequences[0, ids.shape[1] :].tolist(), torch.cat(output.logits).float().cpu())
