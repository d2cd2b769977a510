"""The engine: prompts eagerly, then cycles of draft, verify and extend from graphs, until all requests are done."""

import abc
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from serving.attention import PageAllocator, PagedCache
from serving.model import Language
from slotgraph import BATCH, DecodeRunner, EagerRunner, standard
from slotgraph.backends import Backend
from slotgraph.runners.tree import Accepted
from speculating.attention import attend_to_trees
from speculating.batches import prompt_batch, verify_batch
from speculating.drafts import LookupDrafts, ModelDrafts, Timed
from speculating.inputs import VerifyInputs
from speculating.options import Options
from speculating.request import SpeculativeRequest
from speculating.steps import DraftSteps, Model, TargetSteps

RESERVED: Final = 2
"""Rows of the caches that no request gets: padded rows write row 0, and draft-extend writes row 1 in its capture."""
BLOCK: Final = 16
"""Rows that a request gets at once where the host reads late what it has won, so that few launches need an edit."""


class Engine(abc.ABC):
    """Serves a set of requests by speculation: admits them, lets them cycle, and retires them.

    target, draft: the models; draft is None for prompt lookup. runners: what runs captured steps, by name.
    launches: how often a graph of these was launched.
    """

    runners: Mapping[str, Timed]

    def __init__(
        self,
        language: Language,
        draft: PreTrainedModel | None,
        requests: Sequence[SpeculativeRequest],
        options: Options,
        backend: Backend,
    ) -> None:
        self.waiting, self.running = list(requests), list[SpeculativeRequest]()
        self.cycles, self.launches, self.seconds = 0, 0, 0.0
        self.options, self.backend, self._eos = options, backend, language.eos
        self.nodes = options.draft_tokens
        self.topk, self.depth = options.tree
        most = max(options.buckets)
        self.room = max(self.nodes, 1 + self.topk * self.depth, 2 + self.depth)
        self.longest = max(request.longest for request in requests) + self.room + BLOCK
        rows = RESERVED + most * (self.longest + self.topk * self.depth)
        self.rows, self.numbers = PageAllocator(rows), list(range(most, 0, -1))
        self.rows.take(RESERVED - 1)  # the allocator keeps row 0 to itself
        self.table = torch.zeros(1 + most, self.longest, dtype=torch.int64, device=backend.device)
        self._where: dict[str, Any] = {"buckets": options.buckets, "backend": backend}
        self.target = self._over_rows(language.model, rows)
        self.draft = None if draft is None else self._over_rows(draft, rows)
        self.prompts = EagerRunner(standard.PrefillInputs, self.target.prompt, backend=backend)

    def _over_rows(self, model: PreTrainedModel, rows: int) -> Model:
        """A model over a cache of its own, a row a token."""
        attend_to_trees(model)
        return Model(model, PagedCache.empty(model, rows, 1), self.table)

    def capture(self) -> None:
        """Capture every bucket of all steps."""
        for timed in self.runners.values():
            timed.runner.capture()

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
            request.row, request.pages = self.numbers.pop(), self.rows.take(len(request.prompt_ids) + 1)
            logits = self.prompts(prompt_batch(request.prompt_ids, request.pages))
            request.generated += logits.argmax(dim=1).tolist()
            self._begin(request)
            self.running.append(request)
        self._retire()

    @abc.abstractmethod
    def _begin(self, request: SpeculativeRequest) -> None:
        """Prepare the first draft of a request whose prompt was read."""

    @abc.abstractmethod
    def _cycle(self) -> None:
        """Draft, verify, keep what the target accepts, and begin the next trees."""

    def _retire(self) -> list[SpeculativeRequest]:
        """Requests that are done leave, and their rows are free at once."""
        done = [request for request in self.running if request.finished(self._eos)]
        for request in done:
            self.rows.give_back(request.pages)
            self.numbers.append(request.row)
        self.running = [request for request in self.running if request not in done]
        return done


class LaunchesEngine(Engine):
    """Drafts, verifies and extends by a launch each, whose batches the host makes.

    verify: what a verify reads; a subclass of VerifyInputs may add to it or override it.
    """

    def __init__(self, *args: Any, verify: type[VerifyInputs] = VerifyInputs) -> None:
        super().__init__(*args)
        step = TargetSteps(self.target, self.depth).verify
        self.verify = Timed(DecodeRunner(verify, step, width=self.nodes, output_rows=BATCH, **self._where))
        self.drafts: LookupDrafts | ModelDrafts = LookupDrafts(self.backend.device)
        if self.draft is not None:
            self.drafts = ModelDrafts(DraftSteps(self.draft, self.topk, self.depth), self.rows, self._where)
        self.runners = {"verify": self.verify, **self.drafts.runners}

    def _begin(self, request: SpeculativeRequest) -> None:
        self._place([request])
        self.drafts.begin(request)

    def _cycle(self) -> None:
        requests = self.running
        tree = self.drafts.trees(requests, self.nodes)
        rows = [[request.pages[-1], *self.rows.take(self.nodes - 1)] for request in requests]
        self._keep(requests, rows, self.verify(verify_batch(requests, tree, rows)))
        self._retire()
        if self.running:
            self._place(self.running)
            self.drafts.extend(self.running)
        self.launches = sum(timed.runner.stats()["steps"]["graph"] for timed in self.runners.values())

    def _keep(self, requests: Sequence[SpeculativeRequest], rows: Sequence[Sequence[int]], accepted: Accepted) -> None:
        """Append the accepted tokens and the target's own next one; the rows of all others are free again."""
        found = zip(accepted.counts.tolist(), accepted.nodes.tolist(), accepted.tokens.tolist(), strict=True)
        for request, own, (count, nodes, tokens) in zip(requests, rows, found, strict=True):
            kept = [own[node] for node in nodes[1 : count + 1]]
            self.rows.give_back([row for row in own[1:] if row not in kept])
            request.pages += [*kept, *self.rows.take(1)]
            before = request.seq_len
            for token in tokens[: count + 1]:
                if not request.finished(self._eos):
                    request.generated.append(token)
            request.gains.append(request.seq_len - before)

    def _place(self, requests: Sequence[SpeculativeRequest]) -> None:
        """Write into the table where the caches have each request's tokens, its root's among them."""
        new = [request.gains[-1] if request.gains else request.seq_len for request in requests]
        pairs = list(zip(requests, new, strict=True))
        rows = [request.row for request, count in pairs for _ in range(count)]
        positions = [request.root + 1 - count + place for request, count in pairs for place in range(count)]
        places = [row for request, count in pairs for row in request.pages[-count:]]
        at = torch.tensor([rows, positions, places], device=self.table.device)
        self.table[at[0], at[1]] = at[2]
