"""A small model with attention over requests of different lengths, for the runners that capture a part of it.

All its numbers are whole and below a prime, in float64: no order of additions and no shape of a product changes a bit.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slotgraph import (
    BATCH,
    CACHE_LOC,
    TOKENS,
    BreakableRunner,
    EagerRunner,
    Inputs,
    PrefillRunner,
    Step,
    computed,
    copied,
    current_view,
    graph_break,
)
from slotgraph.backends import choose
from tests.runners.models import ready

VOCAB, HIDDEN, LAYERS, ROOM, PRIME = 50, 16, 2, 256, 31
SPLIT = "slotgraph_tests::attention"
KINDS = ("breakable", "piecewise")
Runner = BreakableRunner["Prefill"] | PrefillRunner["Prefill"]


def starts(extend_seq_lens: torch.Tensor) -> torch.Tensor:
    """Where each request's tokens begin."""
    ends: torch.Tensor = extend_seq_lens.cumsum(0, dtype=torch.int32)
    return ends - extend_seq_lens


class Prefill(Inputs):  # tokens of several requests behind one another
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    extend_seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    extend_start_loc: torch.Tensor = computed(starts, shape=BATCH, dtype=torch.int32, pad=7)
    scale: Any

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:  # one request that owns all tokens
        return {"extend_seq_lens": [step.live(TOKENS)], "scale": 1}


def attend(query: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, view: Prefill) -> torch.Tensor:
    """Causal attention within each request, on keys from the cache and the host's own count of tokens."""
    out = torch.zeros_like(value)
    lengths, begins = view.extend_seq_lens.tolist(), view.extend_start_loc.tolist()
    for begin, length in zip(begins, lengths, strict=True):
        rows = slice(begin, begin + length)
        keys = cache[view.out_cache_loc[rows]]
        scores = torch.remainder(query[rows] @ keys.T, PRIME).tril()
        out[rows] = torch.remainder(scores @ value[rows] * view.scale, PRIME)
    return out


@graph_break
def broken_attention(query: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, view: Prefill) -> torch.Tensor:
    """Between graphs, with the view as an argument."""
    return attend(query, value, cache, view)


@graph_break
def scaled(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
    """One break, with the number of requests and a field."""
    return torch.add(hidden * view.extend_seq_lens.shape[0], view.scale)


@torch.library.custom_op(SPLIT, mutates_args=())
def named_attention(query: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """An operator of its own, which asks for the view."""
    return attend(query, value, cache, current_view(Prefill))


@named_attention.register_fake
def _(query: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    del query, cache
    return torch.empty_like(value)


class Layer(nn.Module):  # attention, whose keys go into a cache, and a dense layer
    cache: torch.Tensor

    def __init__(self, generator: torch.Generator, *, named: bool) -> None:
        super().__init__()
        self.named = named
        self.mix = whole(HIDDEN, 3 * HIDDEN, generator=generator)
        self.dense = whole(HIDDEN, HIDDEN, generator=generator)
        self.register_buffer("cache", torch.zeros(ROOM, HIDDEN, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
        query, key, value = torch.remainder(hidden @ self.mix, PRIME).chunk(3, dim=-1)
        self.cache[view.out_cache_loc] = key
        if self.named:
            attention = named_attention(query, value, self.cache)
        else:
            attention = broken_attention(query, value, self.cache, view)
        hidden = hidden + attention
        return torch.remainder(hidden + hidden @ self.dense, PRIME)


class Layers(nn.ModuleList):  # the inner layers
    def forward(self, hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
        for layer in self:
            hidden = layer(hidden, view)
        return hidden


class Model(nn.Module):  # embeddings, inner layers, and a head over the last token of each request
    def __init__(self, seed: int = 0, *, named: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = whole(VOCAB, HIDDEN, generator=generator)
        self.rope = whole(ROOM, HIDDEN, generator=generator)
        self.inner = Layers([Layer(generator, named=named) for _ in range(LAYERS)])
        self.head = whole(HIDDEN, VOCAB, generator=generator)

    def hidden(self, view: Prefill) -> torch.Tensor:  # what the inner layers make of each token
        out: torch.Tensor = self.inner(self.embed[view.input_ids] + self.rope[view.positions], view)
        return out

    def forward(self, view: Prefill) -> torch.Tensor:  # logits of each request's next token
        last = (view.extend_start_loc + view.extend_seq_lens - 1).long()
        return self.hidden(view)[last] @ self.head

    def caches(self) -> torch.Tensor:  # what the layers' caches hold, but for the row that padding is written to
        return torch.stack([layer.get_buffer("cache")[1:] for layer in self.inner])

    def clear(self) -> None:  # empty those caches
        for layer in self.inner:
            layer.get_buffer("cache").zero_()


class Inner(nn.Module):  # a stack that is a function
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Around(nn.Module):  # a step around a stack: embeddings, then the stack, or what `outer` makes of both
    def __init__(self, function: Callable[..., Any], outer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inner = Inner(function)
        self.outer = outer

    def forward(self, view: Prefill) -> Any:  # [TOKENS, 2] whole numbers through the stack
        hidden = torch.stack([view.input_ids * 3, view.positions + 1], 1).double()
        return self.inner(hidden, view) if self.outer is None else self.outer(view, hidden, self.inner)


def whole(*shape: int, generator: torch.Generator) -> nn.Parameter:
    """Weights that are small whole numbers."""
    return nn.Parameter(torch.randint(0, 5, shape, generator=generator).double(), requires_grad=False)


def batch_of(lengths: list[int], seed: int, device: torch.device | str = "cpu", scale: int = 3) -> dict[str, Any]:
    """Requests of given lengths, with random tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    places = [place for length in lengths for place in range(length)]
    return {
        "input_ids": torch.randint(0, VOCAB, (total,), generator=generator).to(device),
        "positions": torch.tensor(places, dtype=torch.int64).to(device),
        "out_cache_loc": (1 + torch.randperm(ROOM - 1, generator=generator)[:total]).to(device),
        "extend_seq_lens": torch.tensor(lengths, dtype=torch.int32).to(device),
        "scale": scale,
    }


def runner_of(kind: str, model: Any, backend: Any, **options: Any) -> Runner:
    """A runner over the inner layers of a model, not captured yet."""
    given: dict[str, Any] = {"stack": "inner", "buckets": [4, 16], "max_batch": 5, "output_rows": BATCH, **options}
    inputs = given.pop("inputs", Prefill)
    if kind == "breakable":
        return BreakableRunner(inputs, model, backend=backend, progress=False, **given)
    return PrefillRunner(inputs, model, splits=[SPLIT], backend=backend, progress=False, **given)


def around(
    function: Callable[..., Any], backend: Any, outer: Callable[..., Any] | None = None, **options: Any
) -> tuple[BreakableRunner[Prefill], EagerRunner[Prefill]]:
    """A captured breakable runner whose stack is a function, and an eager one over the same step."""
    step, given = Around(function, outer), {"buckets": [4, 8], "output_rows": TOKENS, **options}
    runner: Any = ready(runner_of("breakable", step, backend, **given))
    return runner, EagerRunner(given.get("inputs", Prefill), step, backend=backend, settings=given.get("settings"))


def assert_equal(runner: Runner, eager: EagerRunner[Prefill], device: torch.device, *seeds: int) -> None:
    """Both runners give the same for batches of one request and of several."""
    for lengths in ([3], [1, 2, 1], [8], [2, 3], [4]):
        for seed in seeds or (1,):
            batch = batch_of(lengths, seed + len(lengths), device, scale=2 + seed)
            poison(runner)
            assert torch.equal(runner(batch), eager(batch)), lengths


@functools.cache
def captured(kind: str, backend: str) -> tuple[Runner, EagerRunner[Prefill]]:
    """A captured runner, and an eager one over a model with the same weights and caches of its own, for many tests."""
    device = choose(backend).device
    twins = [Model(named=kind == "piecewise").to(device) for _ in range(2)]
    runner = ready(runner_of(kind, twins[0], backend))
    return runner, EagerRunner(Prefill, twins[1], backend=backend)


def model_of(runner: Runner | EagerRunner[Prefill]) -> Model:
    """The model behind a runner. Tests share it, and some run one of two twins alone: its caches may be emptied."""
    model = runner.stage.step
    assert isinstance(model, Model)
    return model


def poison(runner: Any) -> None:
    """Write what no step may depend on over all inputs, as something that the runner is told of."""
    if runner.graphs is not None:  # as an eager runner's are
        for buffer in runner.graphs.buffers:
            buffer.tensor.fill_(77)
        runner.graphs.buffers.distrust()
