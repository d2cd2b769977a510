"""Axes that the standard declarations add to BATCH, TOKENS and WIDTH: fixed sizes of a model, a draft or a set-up."""

from typing import Final

from ...dataflow.axes import Axis

HIDDEN: Final = Axis("HIDDEN", fixed=True)
"""Elements of one token's hidden state."""
VOCAB: Final = Axis("VOCAB", fixed=True)
"""Tokens that the model knows: elements of one row of logits."""
CONTEXT: Final = Axis("CONTEXT", fixed=True)
"""The most tokens that one request may come to, prompt and answer together."""
FILL: Final = Axis("FILL", fixed=True)
"""Cached tokens of each request that a tree mask has room for: the backend's fill value, or up to CONTEXT."""
TOPK: Final = Axis("TOPK", fixed=True)
"""Branches of a draft tree: a draft step's tokens a request."""
STEPS: Final = Axis("STEPS", fixed=True)
"""Draft steps in one graph."""
FRONT: Final = Axis("FRONT", fixed=True)
"""Tokens of a request that stand before its drafts in a multi-layer draft-extend."""
INDEX_TOPK: Final = Axis("INDEX_TOPK", fixed=True)
"""Cached tokens that sparse attention chooses for each token."""
DP: Final = Axis("DP", fixed=True)
"""Data-parallel ranks whose token counts are kept apart; 1 where one count serves all."""
