"""Thousands of decode steps over a paged cache: requests come and go, and each must read its own keys alone."""

from typing import Any

import attrs
import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, DecodeRunner, Inputs, Step, computed, copied

PAGES = Axis("PAGES")
PAGE = 4
"""Rows of one page."""
MOST_PAGES = 6
MOST_REQUESTS = 20
VOCABULARY, HIDDEN = 61, 8
LARGEST = 16
STEPS = 600


def live_tokens(step: Step) -> int:
    """Computed on the host."""
    return step.live(TOKENS)


def page_starts(block_tables: torch.Tensor) -> torch.Tensor:
    """Computed on the device."""
    return block_tables.long() * PAGE


class CacheInputs(Inputs):
    """What one decode step of an engine with a paged cache reads; page 0 belongs to no request."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)
    bias: torch.Tensor | None = copied(BATCH, dtype=torch.float32, pad=0, default=None)
    num_token_non_padded: torch.Tensor = computed(live_tokens, shape=1, dtype=torch.int32)
    starts: torch.Tensor = computed(page_starts, shape=(BATCH, PAGES), dtype=torch.int64)


@attrs.frozen(eq=False)
class Model:
    """One layer of attention over a paged cache. keys, values: [pages * PAGE, HIDDEN]."""

    embeddings: torch.Tensor
    heads: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def seeded(cls) -> "Model":
        """Random weights, and a cache full of numbers that must never be read."""
        draw = torch.Generator().manual_seed(3)
        rows = (1 + MOST_REQUESTS * MOST_PAGES) * PAGE
        return cls(
            embeddings=torch.randn(VOCABULARY + MOST_PAGES * PAGE, HIDDEN, generator=draw),
            heads=torch.randn(3, HIDDEN, HIDDEN, generator=draw),
            keys=torch.full((rows, HIDDEN), 7e3),
            values=torch.full((rows, HIDDEN), 7e3),
        )

    def project(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of tokens."""
        hidden = self.embeddings[ids] + self.embeddings[positions + VOCABULARY]
        query, key, value = (hidden @ head for head in self.heads)
        return query, key, value

    def step(self, view: CacheInputs) -> torch.Tensor:
        """[TOKENS, HIDDEN]: writes this step's keys and values into the cache, then attends over all pages."""
        query, key, value = self.project(view.input_ids, view.positions)
        self.keys.index_copy_(0, view.out_cache_loc, key)
        self.values.index_copy_(0, view.out_cache_loc, value)
        places = (view.starts[:, :, None] + torch.arange(PAGE, device=query.device)).flatten(1)
        scores = torch.einsum("th,tlh->tl", query, self.keys[places])
        if view.bias is not None:
            scores = scores * view.bias[:, None]
        ahead = torch.arange(places.shape[1], device=query.device) >= view.seq_lens[:, None]
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return torch.einsum("tl,tlh->th", weights, self.values[places])


@attrs.define(eq=False)
class Request:
    """One request: the tokens so far, and the pages that it holds."""

    tokens: list[int]
    pages: list[int]


@attrs.define(eq=False)
class Engine:
    """Draws steps: which requests run, in which order, and with what; answers them without any cache."""

    model: Model
    draw: torch.Generator
    free: list[int] = attrs.field(factory=lambda: list(range(1, 1 + MOST_REQUESTS * MOST_PAGES)))
    requests: list[Request] = attrs.field(factory=list)

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.draw))

    def chosen(self) -> list[Request]:
        """Some requests in any order, after some have left and others come; often as many as a step ago."""
        for request in [one for one in self.requests if len(one.tokens) == MOST_PAGES * PAGE or not self.number(0, 9)]:
            self.requests.remove(request)
            self.free += request.pages
        wanted = self.number(1, MOST_REQUESTS)
        while len(self.requests) < wanted:
            self.requests.append(Request([], []))
        order = torch.randperm(len(self.requests), generator=self.draw).tolist()
        return [self.requests[i] for i in order[: self.number(1, len(order))]]

    def batch(self, running: list[Request], *, bias: bool) -> dict[str, Any]:
        """The next token of each running request, with a page for it where its last one is full."""
        for request in running:
            if len(request.tokens) % PAGE == 0:
                request.pages.append(self.free.pop(self.number(0, len(self.free) - 1)))
            request.tokens.append(self.number(1, VOCABULARY - 1))
        lens = [len(request.tokens) for request in running]
        width = max(len(request.pages) for request in running)
        tables = [request.pages + [0] * (width - len(request.pages)) for request in running]
        places = [request.pages[-1] * PAGE + (len(request.tokens) - 1) % PAGE for request in running]
        return {
            "input_ids": torch.tensor([request.tokens[-1] for request in running]),
            "positions": torch.tensor(lens) - 1,
            "out_cache_loc": torch.tensor(places, dtype=[torch.int32, torch.int64][self.number(0, 1)]),
            "seq_lens": torch.tensor(lens, dtype=torch.int32),
            "block_tables": torch.tensor(tables, dtype=torch.int32),
            **({"bias": torch.rand(len(running), generator=self.draw) + 0.5} if bias else {}),
        }

    def answer(self, request: Request, bias: float) -> torch.Tensor:
        """[HIDDEN]: attention over all that the request ever read, anew."""
        tokens = torch.tensor(request.tokens)
        query, key, value = self.model.project(tokens, torch.arange(len(tokens)))
        return ((query[-1] @ key.T) * bias).softmax(-1) @ value


def runner_for(model: Model, backend: str) -> DecodeRunner[CacheInputs]:
    """Captured for some buckets, with the optional slot and without it; larger batches run eagerly."""
    runner = DecodeRunner(
        CacheInputs,
        model.step,
        buckets=[1, 2, 4, 7, LARGEST],
        sizes={PAGES: MOST_PAGES},
        backend=backend,
        absent=[{"bias"}],
    )
    runner.capture()
    return runner


@pytest.mark.parametrize("seed", [1, 2])
def test_random_steps(cpu: str, seed: int) -> None:
    """Each row of each step is what the request alone gives, whoever else ran, in whatever bucket and order."""
    engine = Engine(Model.seeded(), torch.Generator().manual_seed(seed))
    runner = runner_for(engine.model, cpu)
    engine.model.keys[PAGE:] = engine.model.values[PAGE:] = 7e3
    for number in range(STEPS):
        running = engine.chosen()
        batch = engine.batch(running, bias=bool(engine.number(0, 1)))
        outputs = runner(batch)
        bias = batch["bias"].tolist() if "bias" in batch else [1.0] * len(running)
        answers = torch.stack([engine.answer(request, factor) for request, factor in zip(running, bias, strict=True)])
        assert torch.allclose(outputs, answers, rtol=1e-4, atol=1e-4), (number, outputs - answers)
    counted = runner.stats()
    assert list(counted["buckets"]) == [1, 2, 4, 7, LARGEST]
    assert counted["eager"].keys() == {"too_large"}


@pytest.mark.parametrize("fault", ["position", "tail", "place", "table"])
def test_planted_faults_are_seen(cpu: str, fault: str) -> None:
    """The comparison is no rubber stamp: one wrong value of the usual kind changes rows that it is compared with."""
    engine = Engine(Model.seeded(), torch.Generator().manual_seed(5))
    runner = runner_for(engine.model, cpu)
    wrong = 0
    for _ in range(60):
        running = engine.chosen()[:LARGEST]
        batch = engine.batch(running, bias=False)
        view = runner.fill(batch)
        if fault == "position":
            view.positions[0] += 1
        elif fault == "tail":
            view.out_cache_loc[len(running) :] = int(view.out_cache_loc[0])
        elif fault == "place":
            view.out_cache_loc[0] = 0
        else:
            view.block_tables[0, 0] = 0
        answers = torch.stack([engine.answer(request, 1.0) for request in running])
        wrong += not torch.allclose(runner.replay(view), answers, rtol=1e-4, atol=1e-4)
    assert wrong > 0
