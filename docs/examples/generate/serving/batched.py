"""Transformers' own continuous batching of the same prompts, for scale."""

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import attrs
from transformers import GenerationConfig

from serving.model import Language
from serving.options import RANDOM, Options
from serving.ranks import World
from serving.request import Request


@attrs.frozen
class Batched:
    """What it came to. tokens_per_second: None where it did not run, which note gives the reason for."""

    tokens_per_second: float | None
    note: str = ""


def continuous_batching(language: Language, requests: Sequence[Request], options: Options, world: World) -> Batched:
    """Run it, from the first request to the last token; its set-up and its warm-up are not counted."""
    if not (options.model != RANDOM if options.compare is None else options.compare):
        return Batched(None, "not asked for, by --compare")
    if options.temperature or world.size > 1:
        return Batched(None, "only in one process, and without --temperature")
    model: Any = language.model
    if not hasattr(model, "generate_batch") or importlib.util.find_spec("psutil") is None:
        return Batched(None, "it needs a newer transformers, and psutil")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=options.max_new_tokens,
        eos_token_id=min(language.eos, default=None),
        pad_token_id=0,
    )
    try:
        inputs = [request.prompt_ids for request in requests]
        done = list(model.generate_batch(inputs, generation_config=settings, record_timestamps=True).values())
        seconds = max(one.timestamps[-1] for one in done) - min(one.created_time for one in done)
    except Exception as error:  # noqa: BLE001 - it may fail in any way, and nothing else depends on it
        return Batched(None, f"it failed: {type(error).__name__}: {error}".splitlines()[0])
    return Batched(sum(len(one.generated_tokens) for one in done) / seconds)
