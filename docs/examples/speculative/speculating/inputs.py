"""What the captured steps read: the field's declarations, without what these models have no use for, and a whole cycle.

They hand on no hidden states, and their attention asks for no lengths on the host.
"""

import torch

from slotgraph import BATCH, Axis, Inputs, computed, copied, output, standard
from slotgraph.runners.tree import ancestors
from slotgraph.speculative import WIDTH

TOPK, DEPTH = standard.TOPK, standard.STEPS
LENGTH = Axis("LENGTH", fixed=True)
"""Rows of the caches that a request may have."""


class DraftInputs(standard.DraftInputs, drop=("hidden_states", "seq_lens_cpu")):
    """What drafting a tree reads: the draft model here is a model like any other, on tokens alone."""


class VerifyInputs(standard.TargetVerifyInputs, drop=("custom_mask", "next_token_logits", "seq_lens_cpu")):
    """What verifying a tree reads.

    parents: the tree's shape; padded rows hold a tree of roots.
    tree_mask: which of the tree's nodes each of them sees, computed in the graph; a padded row sees itself, so that no
    NaN gets into the cache's dummy row.
    """

    parents: torch.Tensor = copied(BATCH, WIDTH, dtype=torch.int64, pad=-1)
    tree_mask: torch.Tensor = computed(ancestors, shape=(BATCH, WIDTH, WIDTH), dtype=torch.bool)


class ExtendInputs(standard.DraftExtendInputs, drop=("hidden_states", "next_token_logits", "seq_lens_cpu")):
    """What the draft model reads of what was accepted."""


class CycleInputs(Inputs):
    """What a cycle in one launch reads: draft, verify and extend are one step, and `then=` leads to the next one.

    input_ids: each request's newest token, the root of its tree.
    positions: where it is in the text. It advances by what the cycle has won, a number that only the device knows.
    places: the row of each position in the caches, and behind the root rows for a tree; padded rows write to row 0.
    last: the position at which a request ends; padded rows win one token, which nobody reads.
    done: requests that have ended.
    gains, tokens: how many tokens a cycle has won, and these, with -1 behind them.
    next_ids, ended: the new roots, and whether they are the last.
    """

    input_ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    positions: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda positions, gains: positions + gains)
    places: torch.Tensor = copied(BATCH, LENGTH, dtype=torch.int64, pad=0, ragged=True)
    last: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)
    done: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, then=lambda ended: ended)
    gains: torch.Tensor = output(BATCH, dtype=torch.int64)
    tokens: torch.Tensor = output(BATCH, DEPTH + 1, dtype=torch.int64)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)
    ended: torch.Tensor = output(BATCH, dtype=torch.bool)


class TreeCycleInputs(CycleInputs):
    """What a cycle reads whose drafts are trees of a model: probabilities and ids of each root's likeliest children."""

    topk_p: torch.Tensor = copied(BATCH, TOPK, dtype=torch.float32, pad=0, then=lambda next_p: next_p)
    topk_index: torch.Tensor = copied(BATCH, TOPK, dtype=torch.int64, pad=0, then=lambda next_index: next_index)
    next_p: torch.Tensor = output(BATCH, TOPK, dtype=torch.float32)
    next_index: torch.Tensor = output(BATCH, TOPK, dtype=torch.int64)


def written(text: torch.Tensor, positions: torch.Tensor, gains: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The text with a cycle's tokens behind the root, whose new position is given."""
    first = (positions - gains + 1).clamp(min=0)[:, None]
    return text.scatter(1, first + torch.arange(tokens.shape[1], device=text.device), tokens)


class LookupCycleInputs(CycleInputs):
    """What a cycle reads whose drafts are chains out of the text so far."""

    text: torch.Tensor = copied(BATCH, LENGTH, dtype=torch.int64, pad=0, ragged=True, then=written)
