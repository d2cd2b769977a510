"""A fill written by hand: its time beside the runner's, and the wrong text if it forgets to reset padded rows."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import torch

from serving.attention import paged
from serving.engine import Engine
from serving.inputs import DecodeInputs
from serving.measuring import VARIANTS, Times, batches_of, effort_of, is_device, served, to_time
from serving.model import Language
from serving.options import Options
from serving.request import Request
from slotgraph import BATCH, SEQ_LEN_FILL, TOKENS, attention, copied, keep
from slotgraph.backends import Backend
from slotgraph.runners.testing.timing import Spread

PAIRS: Final = 200
"""Pairs of fills that follow one another; with a step of the model before each fill, so many a round:"""
PAIRS_A_ROUND: Final = 6


class HandFilled:
    """The inputs of a decode step as engines keep them: a buffer for each, of which a graph reads the first rows."""

    def __init__(self, buckets: Sequence[int], width: int, backend: Backend) -> None:
        device = backend.device
        self.buckets, rows = buckets, max(buckets)
        self.no_length = SEQ_LEN_FILL.on(backend.capabilities)
        self.input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seq_lens = torch.full((rows,), self.no_length, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.num_token_non_padded = torch.zeros(1, dtype=torch.int32, device=device)

    def fill(self, batch: DecodeInputs) -> None:
        """Copy the batch to the front, and reset the padded rows behind it. The graph computes out_cache_loc."""
        rows = batch.input_ids.size(0)
        size = next(size for size in self.buckets if size >= rows)
        self.input_ids[:rows] = batch.input_ids
        self.input_ids[rows:size] = 0
        self.positions[:rows] = batch.positions
        self.positions[rows:size] = 0
        self.numbers[:rows] = batch.numbers
        self.numbers[rows:size] = 0
        self.seq_lens[:rows] = batch.seq_lens
        self.seq_lens[rows:size] = self.no_length
        self.page_table[:rows] = batch.page_table
        self.page_table[rows:size] = 0
        self.num_token_non_padded.fill_(rows)


class Forgetful(DecodeInputs):
    """Two resets are forgotten: padded rows of these inputs keep what an earlier step left there."""

    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=keep("nobody thought of it"))
    page_table: torch.Tensor = copied(BATCH, attention.PAGES, dtype=torch.int32, pad=keep("nobody thought of it"))


@attrs.frozen(kw_only=True)
class Forgotten:
    """The first text that the forgotten resets changed. `prompt` is None if they changed none."""

    prompt: str | None = None
    text: str = ""
    instead: str = ""


def forget(language: Language, requests: Sequence[Request], options: Options) -> Forgotten:
    """Serve the requests with all resets, and once more without two of them, until a text ends differently."""
    plain = attrs.evolve(options, ahead=None, prefill="eager", verify=False)
    right = requests if (options.ahead, options.prefill) == (None, "eager") else fresh(requests)
    if right is not requests:
        run_all(Engine(language, right, plain), language)
    wrong = fresh(requests)
    pairs = list(zip(right, wrong, strict=True))

    def differs(one: Request, other: Request) -> bool:
        return other.finished(language.eos) and one.generated != other.generated

    run_all(
        Engine(language, wrong, plain, declaration=Forgetful), language, lambda: any(differs(*pair) for pair in pairs)
    )
    for one, other in pairs:
        if differs(one, other):
            text, instead = (language.tokens.decode(request.generated) for request in (one, other))
            return Forgotten(prompt=one.prompt, text=text, instead=instead)
    return Forgotten()


def fresh(requests: Sequence[Request]) -> list[Request]:
    """Return copies of the requests as they were before they ran."""
    return [attrs.evolve(request, generated=[], logits=[], steps=[], pages=[]) for request in requests]


def run_all(engine: Engine, language: Language, enough: Callable[[], bool] = lambda: False) -> None:
    """Capture an engine's steps, and run them until all requests are done, or it is enough."""
    with paged(language.model):
        engine.capture()
        for _ in engine.run():
            if enough():
                break


def time_fills(engine: Engine, options: Options, requests: Sequence[Request]) -> Times | None:
    """Microseconds on the host to fill the inputs of a decode step: by hand, and by the engine's runner.

    after_a_step: with a step of the model before each fill. at_once: with nothing between, None on a device, where
    graphs may do a part of the fill. ratio: by hand beside the runner, pair by pair; they take turns in who is first.
    Return None if there is nothing to time, or if timing is off. Raise RuntimeError if the two leave different bytes.
    """
    runner, backend, rounds = engine.decode, engine.decode.stage.backend, effort_of(engine, options).rounds
    decoded, sizes = to_time(engine, options, requests)
    if not rounds or not sizes:
        return None
    live, _ = sizes[-1]
    batches = batches_of(engine, options, decoded[:live])
    hand = HandFilled(runner.buckets.sizes, engine.width, backend)

    def pairs(count: int, *, after_a_step: bool) -> Times:
        by_hand, ours = list[float](), list[float]()
        ways = [(hand.fill, by_hand), (runner.fill, ours)]
        for number in range(count):
            for fill, times in ways[:: -1 if number % 2 else 1]:
                if after_a_step:
                    runner(batches[number % VARIANTS - 1])
                    backend.synchronize()
                begin = time.perf_counter()
                fill(batches[number % VARIANTS])
                times.append(1e6 * (time.perf_counter() - begin))
        ratios = [one / other for one, other in zip(by_hand, ours, strict=True)]
        return {"by_hand": Spread.of(by_hand), "runner": Spread.of(ours), "ratio": Spread.of(ratios)}

    with served(engine.steps):
        compare_bytes(hand, engine, batches[0])
        at_once = None if is_device(engine) else pairs(PAIRS, after_a_step=False)
        after = pairs(PAIRS_A_ROUND * rounds, after_a_step=True)
    return {"live": live, "on_a_device": is_device(engine), "at_once": at_once, "after_a_step": after}


def compare_bytes(hand: HandFilled, engine: Engine, batch: DecodeInputs) -> None:
    """Fill by hand and by the runner; RuntimeError where they leave other bytes."""
    hand.fill(batch)
    view = engine.decode.fill(batch)
    engine.decode.replay(view)  # where the graph does a part of the fill, it is done now
    buffers = {name: buffer for name, buffer in vars(hand).items() if isinstance(buffer, torch.Tensor)}
    for name, buffer in buffers.items():
        slot = getattr(view, name)
        if not torch.equal(slot, buffer[: len(slot)]):
            raise RuntimeError(f"{name} is {slot.tolist()}, and by hand {buffer[: len(slot)].tolist()}")
