"""What the tests of attention's declarations share: each with tokens beside it, runners, and random requests."""

import math
import random
import types
from collections.abc import Iterator
from typing import Any, Final

import torch

from slotgraph import BATCH, SEQ_LEN_FILL, TOKENS, DecodeRunner, InputBuffers, Inputs, attention, copied, standard
from slotgraph.backends import Backend
from slotgraph.speculative import WIDTH
from tests.runners.attention import builders
from tests.runners.attention.builders import Requests

KINDS: Final[dict[str, type[Inputs]]] = {
    name: found
    for name in attention.__all__
    if isinstance(found := getattr(attention, name), type) and issubclass(found, Inputs)
}
"""Every class that the module exports."""
BUCKETS: Final = [1, 3, 8]
PAGES: Final = 5
ONE_TOKEN: Final = ("FlexDecode", "FlashInferWindow", "TritonWindow", "WindowCache")
WIDTHS: Final[dict[str, tuple[int, ...]]] = dict.fromkeys(ONE_TOKEN, (1,))
"""The tokens that a request may have, of declarations that do not take any number."""


class Tokens(Inputs):
    """What a step has beside attention's inputs: a query for each token."""

    queries: torch.Tensor = copied(TOKENS, 4, dtype=torch.float32, pad=0)


WHOLE_STEP: Final = ("FlashMLA", "TritonBalanced")
"""Declarations whose requests decide how others are split; they refuse a step of no requests."""


def with_tokens(name: str) -> Any:
    """The declaration of that name, mixed into one that has tokens."""
    return types.new_class(f"{name}Step", (Tokens, KINDS[name]), {})


def is_ragged(name: str) -> bool:
    """Whether requests bring query tokens of their own number."""
    return "extend_seq_lens" in KINDS[name].slotgraph.sources


def sizes_of(inputs: type[Inputs], page: int) -> dict[Any, int]:
    """The sizes of the fixed axes that a declaration has, but for WIDTH."""
    one = Requests(lens=[], table=[], queries=[], page=page, pages=PAGES)
    known = {
        attention.PAGES: PAGES,
        attention.PAGE_SIZE: page,
        attention.TILE: one.tile,
        attention.CHUNK: one.chunk,
        attention.CHUNKS: one.chunks,
        attention.SM_PARTS: one.parts,
        attention.WINDOW: builders.WINDOW,
        attention.CONTEXT_RANKS: builders.RANKS,
        attention.CONTEXT_RANK: builders.RANK,
        attention.INTERLEAVE: one.interleave,
        attention.HEAD_BLOCKS: math.ceil(builders.HEADS / builders.GROUP),
        attention.SPLITS: builders.SPLITS,
        attention.MULTIPROCESSORS: builders.MULTIPROCESSORS,
        standard.STEPS: builders.STEPS,
    }
    return {axis: size for axis, size in known.items() if axis in inputs.slotgraph.axes}


def decoder(inputs: str | Any, step: Any, backend: Backend, page: int, width: int) -> DecodeRunner[Any]:
    """A captured runner of a declaration, or of the one of that name, for steps of equal width."""
    kind: Any = with_tokens(inputs) if isinstance(inputs, str) else inputs
    sizes = sizes_of(kind, page)
    runner: DecodeRunner[Any] = DecodeRunner(
        kind, step, buckets=BUCKETS, width=width, sizes=sizes, backend=backend, progress=False, output_rows=TOKENS
    )
    runner.capture()
    return runner


def buffers_of(name: str, backend: Backend, page: int, width: int) -> InputBuffers[Any]:
    """Buffers of a declaration, where requests have query tokens of their own number."""
    inputs = with_tokens(name)
    sizes = {BATCH: max(BUCKETS), TOKENS: max(BUCKETS) * 6, **sizes_of(inputs, page)}
    return InputBuffers(inputs, sizes | ({WIDTH: width} if WIDTH in inputs.slotgraph.axes else {}), backend=backend)


def random_requests(draw: random.Random, name: str, page: int, width: int, rows: int, least: int = 0) -> Requests:
    """Requests with pages of their own, never page 0, of any length from the least to what fits."""
    drafts = width * builders.STEPS if name.endswith("Draft") else 0
    most = PAGES * page - drafts
    lens = [max(least, draw.choice([0, 1, page, most, draw.randint(1, most)])) for _ in range(rows)]
    pages = draw.sample(range(1, 1 + rows * PAGES), rows * PAGES)
    table = [pages[i * PAGES : (i + 1) * PAGES] for i in range(rows)]
    queries = [draw.randint(min(length, 1), min(length, 6)) if is_ragged(name) else width for length in lens]
    states = [[draw.randint(1, 20) for _ in range(width)] for _ in lens]
    accepted = [draw.randint(1, width) for _ in lens]
    windows = [row[::-1] for row in table]
    return Requests(
        lens=lens, table=table, queries=queries, page=page, pages=PAGES, states=states, accepted=accepted,
        window_table=windows, drafts=drafts,
    )  # fmt: skip


def batch_of(one: Requests, name: str, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """The batch of these requests; the lists as lists, and as tensors, by turns."""
    draw = torch.Generator().manual_seed(seed)
    batch: dict[str, Any] = {"queries": torch.randn(sum(one.queries), 4, generator=draw).to(device)}
    batch |= {"seq_lens": one.lens, "page_table": [one.pages_of(i) for i in range(len(one.lens))]}
    if issubclass(KINDS.get(name, Inputs), attention.WindowCache):
        batch["window_page_table"] = one.window_table
    if is_ragged(name):
        batch["extend_seq_lens"] = one.queries
    if name == "LinearAttention":
        cached = [length - queries for length, queries in zip(one.lens, one.queries, strict=True)]
        batch |= {"extend_prefix_lens": cached, "state_indices": [row[0] for row in one.states]}
    if name == "LinearAttentionVerify":
        batch |= {"state_indices": one.states, "num_accepted_tokens": one.accepted}
    if seed % 2:
        batch["seq_lens"] = torch.tensor(one.lens, device=device)
    return batch


def padded(one: Requests, name: str, width: int, rows: int, backend: Backend) -> Requests:
    """The same requests in a bucket: others behind them, with the lengths that the backend's kernels can take."""
    more = rows - len(one.lens)
    fill = int(SEQ_LEN_FILL.on(backend.capabilities))
    table = [[*one.pages_of(i), *[0] * (PAGES - len(one.pages_of(i)))] for i in range(len(one.lens))]
    return Requests(
        lens=one.lens + [fill] * more,
        table=table + [[0] * PAGES] * more,
        queries=one.queries + [0 if is_ragged(name) else width] * more,
        page=one.page,
        pages=PAGES,
        states=[*one.states, *[[-1] * width] * more],
        accepted=[*one.accepted, *[1] * more],
        window_table=[*one.window_table, *[[0] * PAGES] * more],
        drafts=one.drafts,
    )


def bucket_of(rows: int) -> int:
    """The bucket that so many requests run in."""
    return min(size for size in BUCKETS if size >= rows)


def games(seed: int, count: int) -> Iterator[tuple[random.Random, int]]:
    """So many batches: a source of numbers, and how many requests each has."""
    draw = random.Random(seed)
    for _ in range(count):
        yield draw, draw.randint(1, max(BUCKETS))
