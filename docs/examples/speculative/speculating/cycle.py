"""A cycle in one launch: drafts, verification and what the next cycle begins with are one captured step."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from slotgraph import Axis
from slotgraph.runners.tree import Tree, accept, ancestors, best_tree, top_tokens
from slotgraph.speculative import draft_tree
from speculating.attention import Sight
from speculating.drafts import DraftPrompts, LookupDrafts
from speculating.inputs import TOPK, CycleInputs, DraftInputs, LookupCycleInputs, TreeCycleInputs
from speculating.lookup import lookup_on_device
from speculating.request import SpeculativeRequest
from speculating.steps import DraftSteps, Model, causal


@attrs.frozen(eq=False)
class TreeDrafts:
    """Trees of a draft model. topk, steps: of a tree; prompts: reads prompts, eagerly; reads: what a cycle reads."""

    reads = TreeCycleInputs
    model: Model
    topk: int
    steps: int
    prompts: DraftPrompts

    @property
    def sizes(self) -> Mapping[Axis, int]:
        """Of the axes of the declaration."""
        return {TOPK: self.topk}

    def batch(self, requests: Sequence[SpeculativeRequest]) -> dict[str, Any]:
        """What first cycles of these requests begin with."""
        return {
            "topk_p": torch.stack([request.shares for request in requests]),
            "topk_index": torch.stack([request.tokens for request in requests]),
        }

    def tree(self, view: TreeCycleInputs, rows: torch.Tensor, nodes: int) -> Tree:
        """So many nodes, the root's among them. rows [requests, room]: of the caches, the root's first."""
        behind, scratch = view.positions + 1, rows[:, 1 : 1 + self.topk * self.steps]
        own = DraftInputs(
            req_pool_indices=torch.arange(len(rows), device=rows.device),
            seq_lens=behind,
            positions=behind.repeat_interleave(self.topk),
            out_cache_loc=scratch.flatten(),
            topk_p=view.topk_p,
            topk_index=view.topk_index,
        )
        drafting = DraftSteps(attrs.evolve(self.model, table=view.places), self.topk, self.steps).drafting
        return best_tree(draft_tree(drafting, self.topk, self.steps, own), view.input_ids, nodes)

    def extend(self, view: TreeCycleInputs, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Let the draft read what was accepted, [requests, steps + 1], and write the new roots' likeliest children."""
        behind, width = view.positions + 1, tokens.shape[1]
        own, everyone = rows[:, 1 : 1 + width], torch.arange(len(rows), device=rows.device)
        sight = Sight(prefix=view.places, lengths=behind, beside=own, mask=causal(width, rows.device))
        positions = behind[:, None] + torch.arange(width, device=rows.device)
        logits = self.model.logits(tokens.flatten(), positions.flatten(), own.flatten(), sight)
        shares, children = top_tokens(logits[everyone * width + view.gains - 1], self.topk)
        view.next_p.copy_(shares)
        view.next_index.copy_(children)


@attrs.frozen(eq=False)
class TextDrafts:
    """Chains by prompt lookup, on the device."""

    reads = LookupCycleInputs
    prompts: LookupDrafts
    sizes: Mapping[Axis, int] = attrs.field(factory=dict)

    def batch(self, requests: Sequence[SpeculativeRequest]) -> dict[str, Any]:
        """What first cycles of these requests begin with."""
        return {"text": [[*request.prompt_ids, *request.generated] for request in requests]}

    def tree(self, view: LookupCycleInputs, rows: torch.Tensor, nodes: int) -> Tree:
        """A chain of so many nodes, the root's among them."""
        chain = lookup_on_device(view.text, view.positions + 1, nodes - 1)
        parents = torch.arange(-1, nodes - 1, device=rows.device).expand(len(rows), -1)
        return Tree(torch.cat([view.input_ids[:, None], chain], dim=1), parents, parents + 1, ancestors(parents))

    def extend(self, view: LookupCycleInputs, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """The rule of the text takes them in."""


@attrs.frozen(eq=False, kw_only=True)
class CycleStep:
    """The step.

    drafts: TreeDrafts or TextDrafts. nodes: of a tree that are verified; steps: its depth; room: rows of the caches
    that a cycle may write, the root's among them; ends: tokens that end a text.
    A request has the rows of its positions in its `places`, in order. Nodes of its tree use those from the root on, and
    what is accepted moves to the front of them, so that the host need not know which nodes these are.
    """

    target: Model
    drafts: Any
    nodes: int
    steps: int
    room: int
    ends: torch.Tensor

    def __call__(self, view: Any) -> torch.Tensor:
        """The tokens that each request wins, [requests, steps + 1], and -1 behind them."""
        counting = torch.arange(self.room, device=view.positions.device)
        rows = view.places.gather(1, view.positions[:, None] + counting)
        tokens, counts = self._verify(view, rows, self.drafts.tree(view, rows, self.nodes))
        place, left = counting[: self.steps + 1], (view.last - view.positions)[:, None]
        ends = (tokens[:, :, None] == self.ends).any(2)
        is_behind = ends.cumsum(1) > ends.int()
        won = (place <= counts[:, None]) & (place < left) & ~is_behind
        gains = view.gains.copy_(won.sum(1))
        view.next_ids.copy_(tokens.gather(1, gains[:, None] - 1)[:, 0])
        view.ended.copy_((ends & won).any(1) | (view.positions + gains >= view.last))
        self.drafts.extend(view, rows, tokens)
        return view.tokens.copy_(tokens.masked_fill(~won, -1))

    def _verify(self, view: CycleInputs, rows: torch.Tensor, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's own tokens along the path that it accepts, and how many of the drafted ones are right."""
        own = rows[:, : self.nodes]
        sight = Sight(prefix=view.places, lengths=view.positions, beside=own, mask=tree.mask)
        positions = tree.positions(view.positions).flatten()
        chosen = self.target.logits(tree.tokens.flatten(), positions, own.flatten(), sight).argmax(dim=1)
        accepted = accept(tree.tokens, tree.parents, chosen.view_as(tree.tokens), self.steps)
        self.target.move(rows.gather(1, accepted.nodes).flatten(), rows[:, : self.steps + 1].flatten())
        return accepted.tokens, accepted.counts
