"""Speculative decoding: runners that draft a tree of tokens, and runners that continue from accepted tokens."""

from slotgraph import _publish
from slotgraph.dataflow.axes import WIDTH
from slotgraph.runners.draft import (
    DraftExtendRunner,
    DraftRunner,
    DraftStep,
    MultiLayerDraftExtendRunner,
    draft_tree,
)
from slotgraph.runners.tree import Accepted, Drafts, Tree, accept, ancestors, best_tree, top_tokens

__all__ = [
    "WIDTH",
    "Accepted",
    "DraftExtendRunner",
    "DraftRunner",
    "DraftStep",
    "Drafts",
    "MultiLayerDraftExtendRunner",
    "Tree",
    "accept",
    "ancestors",
    "best_tree",
    "draft_tree",
    "top_tokens",
]

_publish(__name__)
