"""Chunks of steps: which numbers of steps one launch may run, and why some loops cannot run several."""

from collections.abc import Collection
from typing import Any

from ...dataflow.capabilities import HOST
from ...dataflow.errors import ConfigError
from ..engine.config import is_collection, refuse
from ..engine.graphs import GraphSet


def checked_chunks(chunks: Any, ranks: object) -> tuple[int, ...]:
    """Return the numbers of steps, more than 1, that need graphs of their own.

    Raise ConfigError for other values, and with ranks.
    """
    if not is_collection(chunks) or not all(type(one) is int and one > 0 for one in chunks):
        refuse("chunks", "numbers of steps, at least 1, in a list or tuple, such as (1, 4, 8)", chunks)
    found = tuple(sorted({*chunks} - {1}))
    if found and ranks is not None:
        raise ConfigError("chunks= and ranks=: ranks agree on a bucket before each step: leave one of them out")
    return found


def chunk_sizes(chunk: Any, chunks: Collection[int]) -> tuple[int, ...]:
    """Return the numbers of steps that launches may run: one, or all that have graphs. Raise ConfigError for others."""
    every = (1, *chunks)
    if type(chunk) is not int or chunk not in every:
        if chunk == "auto":
            return every
        refuse("chunk", f"one of {', '.join(map(str, every))}, which this runner captures by chunks=, or 'auto'", chunk)
    return (chunk,)


def check_host(graphs: GraphSet[Any]) -> None:
    """Raise ConfigError if the host has work to do between two steps of a graph."""
    declaration = graphs.stage.declaration
    why = ""
    for buffer in graphs.buffers:
        name = buffer.name
        slot = buffer.slot
        if slot.placement == HOST and name in declaration.rules:
            why = f"host slot {name!r} advances: place it on the device"
        elif slot.placement == HOST and (slot.rewritten or (buffer.foreign and name in declaration.read_on_host)):
            why = f"host slot {name!r} may be written in each step, and the host must see to it"
    if any(captured.graph.parts > 1 for captured in graphs.captured.values()):
        why = "a break runs on the host in the middle of the step"
    if why:
        raise ConfigError(f"several steps cannot be one launch, because {why}; or say chunk=1")
