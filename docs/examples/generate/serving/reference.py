"""The reference: what transformers makes of each prompt alone, of a given text, and of all prompts in its batches."""

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
import transformers
from transformers import GenerationConfig

from serving.model import Language
from serving.options import RANDOM, Options
from serving.request import Request
from serving.sampling import GREEDY, Sampler

Text = tuple[Sequence[int], Sequence[int]]
"""A prompt's ids, and the ids of the tokens that follow it."""


@attrs.frozen(eq=False)
class Answer:
    """What generate() said. tokens: generated ids. logits: [tokens, vocabulary] float32 on the host."""

    tokens: list[int]
    logits: torch.Tensor


def reference_answers(language: Language, requests: Sequence[Request], sampler: Sampler = GREEDY) -> Iterator[Answer]:
    """What generate() makes of each prompt alone, with the model's own attention and cache, by the sampler."""
    generate: Any = language.model.generate
    for request in requests:
        count = len(request.prompt_ids)
        ids = torch.tensor([request.prompt_ids], device=language.model.device)

        def scores(so_far: torch.Tensor, logits: torch.Tensor, request: Request = request) -> torch.Tensor:
            number, position = torch.tensor([request.number]), torch.tensor([so_far.shape[1]])
            return sampler.scores(logits.float().cpu(), number, position).to(logits.device)

        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=_settings(
                request.limit, sorted(language.eos) or None, output_logits=True, return_dict_in_generate=True
            ),
            logits_processor=[scores],
        )
        yield Answer(output.sequences[0, count:].tolist(), torch.cat(output.logits).float().cpu())


def _settings(limit: int, eos: Any, **more: bool) -> GenerationConfig:
    return GenerationConfig(do_sample=False, max_new_tokens=limit, eos_token_id=eos, pad_token_id=0, **more)


@torch.inference_mode()
def forced_logits(language: Language, texts: Sequence[Text], together: int = 1) -> list[torch.Tensor]:
    """The logits for each token of each text, [tokens, vocabulary] float32 on the host; so many texts share a run."""
    rows: list[torch.Tensor] = []
    for first in range(0, len(texts), together):
        group = texts[first : first + together]
        ids = [[*prompt, *tokens[:-1]] for prompt, tokens in group]
        width = max(map(len, ids))  # padding lies on the right, where no earlier token sees it
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=language.model.device)
        logits = language.model(padded, use_cache=False).logits
        for row, (prompt, tokens) in zip(logits, group, strict=True):
            rows.append(row[len(prompt) - 1 :][: len(tokens)].float().cpu())
    return rows


def answer_to(language: Language, request: Request, alone: Answer, sampler: Sampler) -> Answer:
    """What the reference says of a request's own tokens, each after those before it.

    alone: what generate() made of the prompt. From the first other token on its text is another one, and the model is
    run over the request's: not beyond an end of text, and one token more where it stopped short.
    """
    pairs = enumerate(zip(request.generated, alone.tokens, strict=False))
    parted = next((place for place, (token, other) in pairs if token != other), None)
    if parted is None:
        return alone
    ends = (place + 1 for place, token in enumerate(request.generated) if token in language.eos)
    due = [*request.generated, 0][: next(ends, request.limit)]
    [forced] = forced_logits(language, [(request.prompt_ids, due)])
    logits = torch.cat([alone.logits[: parted + 1], forced[parted + 1 :]])
    return Answer(sampler.choices(logits, request.number, len(request.prompt_ids)), logits)


def continuous_batching(
    language: Language, requests: Sequence[Request], options: Options, ranks: int
) -> tuple[float | None, str]:
    """Tokens a second of transformers' own continuous batching, without its set-up; or None, and why it did not run."""
    if not (options.model != RANDOM if options.compare is None else options.compare):
        return None, "not asked for, by --compare"
    if options.temperature or ranks > 1:
        return None, "only in one process, and without --temperature"
    model: Any = language.model
    made: Any = getattr(transformers, "ContinuousBatchingConfig", None)
    if made is None or importlib.util.find_spec("psutil") is None:
        return None, "it needs a newer transformers, and psutil"
    size = made(num_blocks=4 * options.max_batch, max_batch_tokens=options.max_prefill_tokens)  # else most of memory
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    settings = _settings(options.max_new_tokens, min(language.eos, default=None))
    try:
        inputs = [request.prompt_ids for request in requests]
        answers = model.generate_batch(inputs, settings, size, record_timestamps=True)
        done = list(answers.values())
        seconds = max(one.timestamps[-1] for one in done) - min(one.created_time for one in done)
    except Exception as error:  # noqa: BLE001 - it may fail in any way, and nothing else depends on it
        return None, f"it failed: {type(error).__name__}: {error}".splitlines()[0]
    return sum(len(one.generated_tokens) for one in done) / seconds, ""
