"""The steps that the runners run: prompts eagerly; drafts, verification and extension captured for each bucket."""

from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from serving.attention import PagedCache
from slotgraph import standard
from slotgraph.runners.draft import DraftStep
from slotgraph.runners.tree import Accepted, accept, top_tokens
from speculating.attention import Sight, TreeAttention
from speculating.inputs import DraftInputs, ExtendInputs, VerifyInputs


@attrs.frozen(eq=False)
class Model:
    """One model over its cache. table [rows, positions] int64: where in the caches a request's tokens are."""

    model: PreTrainedModel
    cache: PagedCache
    table: torch.Tensor

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, sight: Sight) -> torch.Tensor:
        """[tokens, vocabulary], given [tokens] each; rows: where their keys and values go."""
        attention = TreeAttention(self.cache, rows, sight)
        base: Any = self.model.base_model
        output = base(input_ids=ids[None], position_ids=positions[None], use_cache=False, step_attention=attention)
        head: Any = self.model.get_output_embeddings()
        logits: torch.Tensor = head(output.last_hidden_state[0])
        return logits

    def move(self, rows: torch.Tensor, to: torch.Tensor) -> None:
        """Copy keys and values of rows of the cache to others, in all layers."""
        for held in (self.cache.keys, self.cache.values):
            held[:, to] = held[:, rows]

    def prompt(self, view: standard.PrefillInputs) -> torch.Tensor:
        """Logits after the last token of one prompt, [1, vocabulary]."""
        rows, length = view.out_cache_loc, view.input_ids.shape[0]
        mask = causal(length, rows.device)
        sight = Sight(prefix=rows[None, :0], lengths=rows[:1] * 0, beside=rows[None], mask=mask)
        return self.logits(view.input_ids, view.positions, rows, sight)[-1:]


@attrs.frozen(eq=False)
class TargetSteps:
    """The captured step of a target. steps: the depth of a tree."""

    model: Model
    steps: int

    def verify(self, view: VerifyInputs) -> Accepted:
        """The target on whole trees, and what it accepts of them."""
        shape = view.parents.shape
        rows = view.out_cache_loc
        prefix = self.model.table[view.req_pool_indices]
        sight = Sight(prefix=prefix, lengths=view.seq_lens, beside=rows.view(shape), mask=view.tree_mask)
        chosen = self.model.logits(view.input_ids, view.positions, rows, sight).argmax(dim=1)
        return accept(view.input_ids.view(shape), view.parents, chosen.view(shape), self.steps)


@attrs.frozen(eq=False)
class DraftSteps:
    """The captured steps of a draft model. topk, steps: of its tree."""

    model: Model
    topk: int
    steps: int

    def drafting(self, view: DraftInputs, step: DraftStep) -> tuple[torch.Tensor, None]:
        """One step of the draft: a branch sees its request's text, and of the drafted tokens its own ancestors."""
        requests, device = view.seq_lens.shape[0], view.seq_lens.device
        places = view.out_cache_loc.view(requests, self.topk, self.steps)[:, :, : step.index + 1].transpose(1, 2)
        branches = torch.arange(self.topk, device=device)
        own = branches.expand(requests, -1)[:, :, None]
        path = torch.cat([step.branches, own], dim=2)  # which branch of each step so far a row descends from
        mask = (path[:, :, :, None] == branches).flatten(2)
        prefix = self.model.table[view.req_pool_indices]
        sight = Sight(prefix=prefix, lengths=view.seq_lens, beside=places.flatten(1), mask=mask)
        rows = places[:, -1].flatten()
        return self.model.logits(step.input_ids, view.positions, rows, sight), None

    def extend(self, view: ExtendInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft on what was accepted: probabilities and ids of each new root's children, [requests, topk] each."""
        requests, rows = view.seq_lens.shape[0], view.out_cache_loc
        beside = rows.view(requests, -1)
        prefix, mask = self.model.table[view.req_pool_indices], causal(beside.shape[1], rows.device)
        sight = Sight(prefix=prefix, lengths=view.seq_lens, beside=beside, mask=mask)
        logits = self.model.logits(view.input_ids, view.positions, rows, sight)
        return top_tokens(logits[view.select_index], self.topk)


def causal(length: int, device: torch.device) -> torch.Tensor:
    """[1, length, length]: each token sees itself and those before it."""
    places = torch.arange(length, device=device)
    return (places[:, None] >= places)[None]
