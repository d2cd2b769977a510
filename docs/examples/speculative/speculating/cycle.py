"""A cycle in one launch: drafts, verification and what the next cycle begins with are one captured step."""

import attrs
import torch

from slotgraph.runners.tree import Tree, accept, best_tree, top_tokens
from slotgraph.speculative import draft_tree
from speculating.attention import Sight
from speculating.inputs import CycleInputs, DraftInputs
from speculating.steps import DraftSteps, Model, causal


@attrs.frozen(eq=False, kw_only=True)
class CycleStep:
    """The step. topk, steps: of a draft's tree; nodes: of these that are verified; room: rows of the caches that a cycle
    may write, the root's among them; ends: tokens that end a text.

    A request has the rows of its positions in its `places`, in order. Nodes of its tree use those from the root on, and
    what is accepted moves to the front of them, so that the host need not know which nodes these are.
    """

    target: Model
    draft: Model
    topk: int
    steps: int
    nodes: int
    room: int
    ends: torch.Tensor

    def __call__(self, view: CycleInputs) -> torch.Tensor:
        """The tokens that each request wins, [requests, steps + 1], and -1 behind them."""
        counting = torch.arange(self.room, device=view.positions.device)
        rows = view.places.gather(1, view.positions[:, None] + counting)
        tokens, counts = self._verify(view, rows, self._drafted(view, rows))
        place, left = counting[: self.steps + 1], (view.last - view.positions)[:, None]
        ends = (tokens[:, :, None] == self.ends).any(2)
        behind = ends.cumsum(1) > ends.int()  # an end
        won = (place <= counts[:, None]) & (place < left) & ~behind
        gains = view.gains.copy_(won.sum(1))
        view.next_ids.copy_(tokens.gather(1, gains[:, None] - 1)[:, 0])
        view.ended.copy_((ends & won).any(1) | (view.positions + gains >= view.last))
        self._extend(view, rows, tokens)
        return tokens.where(won, -1)

    def _drafted(self, view: CycleInputs, rows: torch.Tensor) -> Tree:
        """Draft behind the roots, as a `DraftRunner` does, and choose the best nodes."""
        behind, scratch = view.positions + 1, rows[:, 1 : 1 + self.topk * self.steps]
        batch = DraftInputs(
            req_pool_indices=torch.arange(len(rows), device=rows.device),
            seq_lens=behind,
            positions=behind.repeat_interleave(self.topk),
            out_cache_loc=scratch.flatten(),
            topk_p=view.topk_p,
            topk_index=view.topk_index,
        )
        steps = DraftSteps(attrs.evolve(self.draft, table=view.places), self.topk, self.steps)
        return best_tree(draft_tree(steps.drafting, self.topk, self.steps, batch), view.input_ids, self.nodes)

    def _verify(self, view: CycleInputs, rows: torch.Tensor, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's own tokens along the path that it accepts, and how many of the drafted ones are right."""
        own = rows[:, : self.nodes]
        sight = Sight(prefix=view.places, lengths=view.positions, beside=own, mask=tree.mask)
        positions = tree.positions(view.positions).flatten()
        chosen = self.target.logits(tree.tokens.flatten(), positions, own.flatten(), sight).argmax(dim=1)
        accepted = accept(tree.tokens, tree.parents, chosen.view_as(tree.tokens), self.steps)
        self.target.move(rows.gather(1, accepted.nodes).flatten(), rows[:, : self.steps + 1].flatten())
        return accepted.tokens, accepted.counts

    def _extend(self, view: CycleInputs, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Let the draft read what was accepted, and write the likeliest children of the new roots."""
        width, behind = tokens.shape[1], view.positions + 1
        own, everyone = rows[:, 1 : 1 + width], torch.arange(len(rows), device=rows.device)
        sight = Sight(prefix=view.places, lengths=behind, beside=own, mask=causal(width, rows.device))
        positions = behind[:, None] + torch.arange(width, device=rows.device)
        logits = self.draft.logits(tokens.flatten(), positions.flatten(), own.flatten(), sight)
        shares, children = top_tokens(logits[everyone * width + view.gains - 1], self.topk)
        view.next_topk_p.copy_(shares)
        view.next_topk_index.copy_(children)
