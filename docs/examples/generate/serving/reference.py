"""The reference: what transformers' own generate() makes of each prompt alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from transformers import GenerationConfig

from serving.model import Language
from serving.request import Request
from serving.sampling import Sampler


@attrs.frozen(eq=False)
class Answer:
    """What generate() said. tokens: generated ids. logits: [tokens, vocabulary] float32 on the host."""

    tokens: list[int]
    logits: torch.Tensor


def reference_answers(language: Language, requests: Sequence[Request], sampler: Sampler) -> Iterator[Answer]:
    """What generate() makes of each prompt alone, with the model's own attention and cache.

    It takes the largest score in each step; where tokens are drawn, that is the sampler's score.
    """
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
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            logits_processor=[_scores(request, sampler)],
        )
        yield Answer(output.sequences[0, ids.shape[1] :].tolist(), torch.cat(output.logits).float().cpu())


def _scores(request: Request, sampler: Sampler) -> Any:
    """What generate() calls in each step with all ids so far, [1, tokens], and logits, [1, vocabulary]."""

    def scores(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        place = ids.shape[1] - len(request.prompt_ids)
        return sampler.scores(logits[0].float().cpu(), request.number, place)[None].to(logits.device)

    return scores
