"""torch.compile: of a step that a runner captures, and of transformers' own, which torch captures by itself."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel, StaticCache

from serving.inputs import DecodeInputs
from serving.options import OptionsError
from serving.timing import Contestant

Step = TypeVar("Step", bound=Callable[..., object])
MODE = "reduce-overhead"
WARMUPS = 6
"""It compiles in the first step, records in the second, and checks in the third; the rest is to be sure."""


def check_compiles(backend: str) -> None:
    """Raises OptionsError for a backend whose graphs cannot hold compiled kernels."""
    if backend == "cpu-capture":
        raise OptionsError(
            "cpu-capture records torch operators and cannot record compiled kernels: compile with --backend cpu or cuda"
        )


def compiled_for_each_size(step: Step) -> Step:
    """The step under torch.compile. A runner's warm-ups compile it, once for each bucket."""
    config = torch._dynamo.config  # noqa: SLF001 - it has no public name
    config.recompile_limit = config.accumulated_recompile_limit  # torch allows 8 sizes by itself
    return torch.compile(step, fullgraph=True, dynamic=False)


def compiled_step(model: PreTrainedModel, batches: Sequence[DecodeInputs], places: int) -> Contestant:
    """A step of as many rows as the batches have, with a static cache of so many places a row; it is warm.

    Raises whatever torch raises where it cannot compile.
    """
    cache = StaticCache(config=model.config, max_cache_len=places)
    inputs = [(batch.input_ids[:, None], batch.positions[:, None]) for batch in batches]

    def decode(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=input_ids, position_ids=positions, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    @contextlib.contextmanager
    def emptied() -> Iterator[None]:
        """Each step takes one more place, so each turn begins with none taken; the addresses stay."""
        with torch.no_grad():
            cache.reset()
            yield

    compiled = torch.compile(decode, mode=MODE, dynamic=False)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what torch has to say about itself
        decode(*inputs[0])  # as written: the cache makes its tensors, and tells torch that they will not move
        for number in range(WARMUPS):
            compiled(*inputs[number % len(inputs)])
    return Contestant(lambda number: compiled(*inputs[number % len(inputs)]), emptied)


def graphs_skipped() -> int:
    """How many compiled parts torch has run without a CUDA graph so far, since it found some reason."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])  # noqa: SLF001 - it is told nowhere else
