"""Where drafts come from: a small model's trees, or chains of tokens that stand in the text already."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from serving.attention import PageAllocator
from slotgraph import EagerRunner, standard
from slotgraph.runners.tree import Tree, ancestors, best_tree, top_tokens
from slotgraph.speculative import DraftExtendRunner, DraftRunner
from speculating.batches import draft_batch, extend_batch, prompt_batch
from speculating.inputs import DraftInputs, ExtendInputs
from speculating.lookup import lookup
from speculating.request import SpeculativeRequest
from speculating.steps import DraftSteps, Model

Requests = Sequence[SpeculativeRequest]


@attrs.frozen(eq=False)
class Timed:
    """A runner whose fills are timed. fills: seconds that each took on the host."""

    runner: Any
    fills: list[float] = attrs.field(factory=list)

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """Fill, with a look at the clock, and replay."""
        begin = time.perf_counter()
        view = self.runner.fill(batch)
        self.fills.append(time.perf_counter() - begin)
        return self.runner.replay(view)


class DraftPrompts:
    """What a draft model reads before its first tree."""

    def __init__(self, model: Model, topk: int, backend: Any) -> None:
        self._topk = topk
        self._prompts = EagerRunner(standard.PrefillInputs, model.prompt, backend=backend)

    def begin(self, request: SpeculativeRequest) -> None:
        """The likeliest children of the root, after the model has read all before."""
        batch = prompt_batch([*request.prompt_ids, *request.generated], request.pages)
        shares, tokens = top_tokens(self._prompts(batch), self._topk)
        request.shares, request.tokens = shares[0], tokens[0]


class ModelDrafts(DraftPrompts):
    """Trees of a draft model, whose cache has the target's rows. runners: its captured steps by name."""

    def __init__(self, steps: DraftSteps, rows: PageAllocator, where: Mapping[str, Any]) -> None:
        super().__init__(steps.model, steps.topk, where["backend"])
        self._rows, self._depth = rows, steps.steps
        draft = DraftRunner(DraftInputs, steps.drafting, topk=steps.topk, steps=steps.steps, **where)
        extend = DraftExtendRunner(ExtendInputs, steps.extend, width=steps.steps + 1, **where)
        self.runners = {"draft": Timed(draft), "extend": Timed(extend)}

    def trees(self, requests: Requests, nodes: int) -> Tree:
        """The best nodes of all that were drafted."""
        scratch = [self._rows.take(self._topk * self._depth) for _ in requests]
        drafts = self.runners["draft"](draft_batch(requests, self._topk, scratch))
        for rows in scratch:
            self._rows.give_back(rows)
        roots = torch.tensor([request.generated[-1] for request in requests], device=drafts.tokens.device)
        return best_tree(drafts, roots, nodes)

    def extend(self, requests: Requests) -> None:
        """The likeliest children of the new roots."""
        shares, tokens = self.runners["extend"](extend_batch(requests, self._depth + 1))
        for request, *first in zip(requests, shares.clone(), tokens.clone(), strict=True):
            request.shares, request.tokens = first  # clones: a later replay overwrites what this one handed out


@attrs.frozen
class LookupDrafts:
    """Chains by prompt lookup: no model, no captured steps, and nothing to take in."""

    device: torch.device
    runners: Mapping[str, Timed] = attrs.field(factory=dict)

    def begin(self, request: SpeculativeRequest) -> None:
        """The text is all that it reads."""

    def trees(self, requests: Requests, nodes: int) -> Tree:
        """A chain for each request."""
        texts = [[*request.prompt_ids, *request.generated] for request in requests]
        tokens = torch.tensor([[text[-1], *lookup(text, nodes - 1)] for text in texts], device=self.device)
        parents = torch.arange(-1, nodes - 1, device=self.device).repeat(len(texts), 1)
        return Tree(tokens, parents, parents + 1, ancestors(parents))

    def extend(self, requests: Requests) -> None:
        """The text is all that it reads."""
