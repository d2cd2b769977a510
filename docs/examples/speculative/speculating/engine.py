"""The engine: prompts eagerly, then cycles of draft, verify and extend from graphs, until all requests are done."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM

from slotgraph import BATCH, DecodeRunner, EagerRunner, standard
from slotgraph.backends import Backend
from slotgraph.runners.tree import Accepted, best_tree, top_tokens
from slotgraph.speculative import DraftExtendRunner, DraftRunner
from speculating.attention import attend_to_trees
from speculating.batches import draft_batch, extend_batch, verify_batch
from speculating.cache import KeysAndValues, RowAllocator
from speculating.inputs import DraftInputs, ExtendInputs, VerifyInputs
from speculating.options import Options
from speculating.request import Request
from speculating.steps import Model, Steps


class Engine:
    """Serves a set of requests by speculation.

    verify: what a verify reads; a subclass of VerifyInputs may add to it or override it. fills: seconds on the host for
    the fills of each draft, verify and extend, by its name.
    """

    def __init__(
        self,
        models: tuple[LlamaForCausalLM, LlamaForCausalLM],
        requests: Sequence[Request],
        options: Options,
        backend: Backend,
        verify: type[VerifyInputs] = VerifyInputs,
    ) -> None:
        self.waiting, self.running = list(requests), list[Request]()
        self.cycles, self.seconds = 0, 0.0
        self.fills: dict[str, list[float]] = {"draft": [], "verify": [], "extend": []}
        self.nodes, self.most = options.draft_tokens, max(options.buckets)
        topk, steps = self.topk, self.depth = options.topk, options.steps
        longest = max(request.longest for request in requests) + steps + 1
        rows = self.most * (longest + self.nodes + topk * steps)
        self.rows, self.numbers = RowAllocator(rows), list(range(self.most, 0, -1))
        self.table = torch.zeros(1 + self.most, longest, dtype=torch.int64, device=backend.device)
        target, draft = (Model(model, KeysAndValues.empty(model, rows), self.table) for model in models)
        self.steps = Steps(target, draft, topk, steps)
        for model in models:
            attend_to_trees(model)
        where: dict[str, Any] = {"buckets": options.buckets, "backend": backend}
        self.prompts = [EagerRunner(standard.PrefillInputs, one.prompt, backend=backend) for one in (target, draft)]
        self.draft = DraftRunner(DraftInputs, self.steps.drafting, topk=topk, steps=steps, **where)
        self.verify = DecodeRunner(verify, self.steps.verify, width=self.nodes, output_rows=BATCH, **where)
        self.extend = DraftExtendRunner(ExtendInputs, self.steps.extend, width=steps + 1, **where)

    def capture(self) -> None:
        """Capture every bucket of all three steps."""
        for runner in (self.draft, self.verify, self.extend):
            runner.capture()

    @torch.no_grad()
    def run(self) -> None:
        """Cycle until all requests are done."""
        begin = time.perf_counter()
        while self.running or self.waiting:
            self._admit()
            if self.running:
                self._cycle()
            self.cycles += 1
        self.seconds += time.perf_counter() - begin

    def _admit(self) -> None:
        """Prompts run in the order of arrival, one at a time, while there is room."""
        while self.waiting and self.numbers and self.waiting[0].arrival <= self.cycles:
            request = self.waiting.pop(0)
            request.row, request.places = self.numbers.pop(), self.rows.take(len(request.prompt) + 1)
            [token] = self._read(0, request.prompt, request.places).argmax(dim=1).tolist()
            request.generated.append(token)
            self._place([request])
            shares, tokens = top_tokens(self._read(1, [*request.prompt, token], request.places), self.topk)
            request.shares, request.tokens = shares[0], tokens[0]
            self.running.append(request)
        self._retire()

    def _read(self, which: int, ids: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        """The target's or the draft's logits after a prompt."""
        rows = list(places[: len(ids)])
        logits: torch.Tensor = self.prompts[which](
            {"input_ids": list(ids), "positions": list(range(len(ids))), "out_cache_loc": rows}
        )
        return logits

    def _cycle(self) -> None:
        """Draft, verify, keep what the target accepts, and begin the next trees."""
        requests = self.running
        scratch = [self.rows.take(self.topk * self.depth) for _ in requests]
        drafts = self._step("draft", self.draft, draft_batch(requests, self.topk, scratch))
        for rows in scratch:
            self.rows.give_back(rows)
        roots = torch.tensor([request.generated[-1] for request in requests], device=self.table.device)
        tree = best_tree(drafts, roots, self.nodes)
        rows = [[request.places[-1], *self.rows.take(self.nodes - 1)] for request in requests]
        self._keep(requests, rows, self._step("verify", self.verify, verify_batch(requests, tree, rows)))
        self._retire()
        if self.running:
            self._place(self.running)
            shares, tokens = self._step("extend", self.extend, extend_batch(self.running, self.depth + 1))
            for request, *first in zip(self.running, shares.clone(), tokens.clone(), strict=True):
                request.shares, request.tokens = first  # clones: a later replay overwrites what this one handed out

    def _step(self, name: str, runner: Any, batch: dict[str, Any]) -> Any:
        """Fill, with a look at the clock, and replay."""
        begin = time.perf_counter()
        view = runner.fill(batch)
        self.fills[name].append(time.perf_counter() - begin)
        return runner.replay(view)

    def _keep(self, requests: Sequence[Request], rows: Sequence[Sequence[int]], accepted: Accepted) -> None:
        """Append the accepted tokens and the target's own next one; the rows of all others are free again."""
        found = zip(accepted.counts.tolist(), accepted.nodes.tolist(), accepted.tokens.tolist(), strict=True)
        for request, own, (count, nodes, tokens) in zip(requests, rows, found, strict=True):
            gain = min(count + 1, request.limit - len(request.generated))
            kept = [own[node] for node in nodes[1 : count + 1]]
            self.rows.give_back([row for row in own[1:] if row not in kept])
            request.places += [*kept, *self.rows.take(1)]
            request.generated += tokens[:gain]
            request.gains.append(gain)

    def _place(self, requests: Sequence[Request]) -> None:
        """Write into the table where the caches have each request's tokens, its root's among them."""
        new = [len(request.prompt) + 1 if not request.gains else request.gains[-1] for request in requests]
        pairs = list(zip(requests, new, strict=True))
        rows = [request.row for request, count in pairs for _ in range(count)]
        positions = [request.root + 1 - count + place for request, count in pairs for place in range(count)]
        places = [row for request, count in pairs for row in request.places[-count:]]
        at = torch.tensor([rows, positions, places], device=self.table.device)
        self.table[at[0], at[1]] = at[2]

    def _retire(self) -> None:
        """Requests that are done leave, and their rows are free at once."""
        for request in self.running:
            if request.finished:
                self.rows.give_back(request.places)
                self.numbers.append(request.row)
        self.running = [request for request in self.running if not request.finished]
