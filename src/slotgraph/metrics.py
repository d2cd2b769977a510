"""Statistics of runners for Prometheus. It needs prometheus-client, which the extra `metrics` installs."""

from slotgraph import _publish
from slotgraph.runners.metrics import Collector, exposition

__all__ = ["Collector", "exposition"]

_publish(__name__)
