"""Several ranks: steps that all run together, and pipelines of them."""

from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.ranks.pipeline import PipelineStage

__all__ = ["PipelineStage", "Ranks"]
