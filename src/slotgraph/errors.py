"""Everything that slotgraph raises."""

from slotgraph.dataflow.errors import *  # noqa: F403 # pyright: ignore[reportWildcardImportFromLibrary]
