"""What the three kinds of captured steps read: the field's declarations, without what these models have no use for.

They hand on no hidden states, and their attention asks for no lengths on the host.
"""

import torch

from slotgraph import BATCH, computed, copied, standard
from slotgraph.runners.tree import ancestors
from slotgraph.speculative import WIDTH


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
