"""The engine's loop: graphs of its own, whose inputs slotgraph allocates, fills and pads."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from engine.model import PAGE, PAGES, DecodeInputs, Model
from slotgraph import BATCH, InputBuffers
from slotgraph.backends import Backend, choose

VOCABULARY, HIDDEN = 97, 16
Step = Callable[[dict[str, torch.Tensor], int], torch.Tensor]


@attrs.define
class Request:
    """A text that grows: its tokens, and the pages that hold its keys."""

    tokens: list[int]
    pages: list[int]


class Graphs:
    """One captured graph for each padded batch size. The engine captures and replays; slotgraph knows nothing of it."""

    def __init__(
        self, backend: Backend, buffers: InputBuffers[DecodeInputs], model: Model, sizes: Sequence[int]
    ) -> None:
        self._sizes = sorted(sizes)
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}
        for size in self._sizes:
            padded = {BATCH: size}
            buffers.prepare(padded)

            def step(padded: Any = padded) -> torch.Tensor:
                buffers.fill_in_graph(padded)
                return model(buffers.view(padded))

            self._replays[size] = captured(backend, step)

    def bucket(self, requests: int) -> int:
        """The smallest size that so many requests fit."""
        return next(size for size in self._sizes if size >= requests)

    def replay(self, size: int) -> torch.Tensor:
        """Replay one, behind a fill of its size."""
        return self._replays[size]()


def captured(backend: Backend, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture a step, by torch.cuda.graph on a GPU and by the backend elsewhere; a call that replays it."""
    if backend.device.type == "cuda":
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # a warm-up
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            outputs = step()
        return lambda: (graph.replay(), outputs)[1]
    step()
    recorded = backend.capture(step)

    def replay() -> torch.Tensor:
        recorded.replay()
        made: torch.Tensor = recorded.outputs
        return made

    return replay


def batch_of(requests: Sequence[Request], device: torch.device) -> dict[str, torch.Tensor]:
    """The newest token of each request, as an engine's scheduler brings it: without padding."""
    positions = [len(request.tokens) - 1 for request in requests]
    most = max(len(request.pages) for request in requests)
    places = [one.pages[at // PAGE] * PAGE + at % PAGE for one, at in zip(requests, positions, strict=True)]
    tables = [[*one.pages, *[0] * (most - len(one.pages))] for one in requests]
    made = {
        "input_ids": torch.tensor([request.tokens[-1] for request in requests]),
        "positions": torch.tensor(positions),
        "out_cache_loc": torch.tensor(places),
        "block_tables": torch.tensor(tables, dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def generate(step: Step, requests: list[Request], tokens: int, device: torch.device) -> None:
    """Decode until the first text has so many tokens more, each other one two less; who ends leaves the batch."""
    goals = [len(request.tokens) + tokens - 2 * place for place, request in enumerate(requests)]
    free, unused = list[int](), iter(range(1, 1 << 30))
    running = requests
    while running:
        for request in running:
            if len(request.tokens) > len(request.pages) * PAGE:
                request.pages.append(free.pop() if free else next(unused))
        made = step(batch_of(running, device), len(running)).tolist()
        for request, token in zip(running, made, strict=True):
            request.tokens.append(token)
        ended = [one for one, goal in zip(requests, goals, strict=True) if one in running and len(one.tokens) >= goal]
        for request in ended:
            free.extend(request.pages)
        running = [one for one in running if one not in ended]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loop with graphs and without; 0 where all tokens are equal."""
    parser = argparse.ArgumentParser(prog="own_graphs", description=__doc__)
    parser.add_argument("--backend", default="cpu-capture", help="cuda, or cpu-capture on a laptop")
    parser.add_argument("--requests", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args(arguments)
    backend = choose(given.backend)
    return run(backend, given.requests, given.tokens)


def run(backend: Backend, count: int, tokens: int) -> int:
    """Both ways, compared."""
    pages = count * (tokens // PAGE + 2) + 1
    prompts = [[(1 + 3 * place) % VOCABULARY] for place in range(count)]
    texts = {}
    with torch.no_grad():
        for way in ("graphs", "plain"):
            model = Model(VOCABULARY, HIDDEN, pages, backend.device)
            requests = [Request(list(prompt), []) for prompt in prompts]
            step = by_graphs(backend, model, count, tokens) if way == "graphs" else plainly(model)
            generate(step, requests, tokens, backend.device)
            texts[way] = [request.tokens for request in requests]
    equal = texts["graphs"] == texts["plain"]
    made = sum(map(len, texts["graphs"])) - count
    print(f"backend    {backend.name}")
    print(f"tokens     {made}, {'all equal to those without graphs' if equal else 'NOT equal to those without graphs'}")
    return 0 if equal else 1


def by_graphs(backend: Backend, model: Model, count: int, tokens: int) -> Step:
    """A step by the engine's own graphs."""
    buffers = InputBuffers(DecodeInputs, {BATCH: count, PAGES: tokens // PAGE + 1}, backend=backend)
    graphs = Graphs(backend, buffers, model, sorted({1, max(1, count // 2), count}))
    print(buffers.plan({BATCH: count}))

    def step(batch: dict[str, torch.Tensor], rows: int) -> torch.Tensor:
        size = graphs.bucket(rows)
        buffers.fill(batch, {BATCH: size})
        return graphs.replay(size)[:rows]

    return step


def plainly(model: Model) -> Step:
    """The same step without graphs, buffers or padding."""
    return lambda batch, rows: model(DecodeInputs(**batch))[:rows]
