"""Several ranks: steps that all of them run together, and pipelines."""

from slotgraph import _publish
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.ranks.pipeline import PipelineStage

__all__ = ["PipelineStage", "Ranks"]

_publish(__name__)
