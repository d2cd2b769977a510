"""What the tests of the standard declarations share: sizes, random batches of any declaration, and lists of views."""

from typing import Any, Final

import torch

from slotgraph import BATCH, TOKENS, Axis, Inputs, standard
from slotgraph.dataflow.axes import extent
from slotgraph.dataflow.capabilities import Capabilities, resolve_dtype
from slotgraph.dataflow.declaration import Declaration
from slotgraph.dataflow.sources import Path
from slotgraph.ranks import Ranks
from slotgraph.speculative import WIDTH
from tests.strategies import noise

Sizes = dict[Axis, int]
CUDA: Final = Capabilities()
NPU: Final = Capabilities(roles={"cache_loc": torch.int32}, fills={"seq_len_fill": 0}, pools_inputs=False)
FIXED: Final[Sizes] = {
    standard.HIDDEN: 4,
    standard.VOCAB: 5,
    standard.CONTEXT: 100,
    standard.FILL: 2,
    standard.TOPK: 2,
    standard.STEPS: 3,
    standard.FRONT: 1,
    standard.INDEX_TOPK: 3,
    standard.DP: 2,
    standard.ADAPTERS: 3,
}
CLASSES: Final[dict[str, type[Inputs]]] = {
    name: found
    for name in standard.__all__
    if isinstance(found := getattr(standard, name), type) and issubclass(found, Inputs)
}
"""Every class that the package exports."""


def ranked(rank: int, size: int, shards: int, batches: list[Sizes]) -> Ranks:
    """One of so many ranks, without their processes, after all have told their batches, each of `shards` in a row."""
    made = Ranks.__new__(Ranks)
    made.rank, made.size, made.shards = rank, size, shards
    each = [one for one in batches for _ in range(shards)]
    made.live_sizes = {axis: tuple(one[axis] for one in each) for axis in batches[0]}
    return made


def fixed_of(inputs: type[Inputs]) -> Sizes:
    """The sizes of fixed axes that a runner must be given, but for WIDTH."""
    return {axis: size for axis, size in FIXED.items() if axis in inputs.slotgraph.axes}


def sizes_of(inputs: type[Inputs], requests: int, width: int) -> Sizes:
    """The size of every axis for so many requests."""
    return {BATCH: requests, TOKENS: requests * width, WIDTH: width, **fixed_of(inputs)}


def batch_of(
    declaration: Declaration, live: Sizes, seed: int, absent: frozenset[str] = frozenset(), device: str = "cpu"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random data of any dtype for all that is copied, where its source is looked up, in the batch and beside it."""
    batch: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    for turn, (name, slot) in enumerate(declaration.slots.items()):
        source = slot.reads(name)
        if not isinstance(source, Path) or name in absent:
            continue
        taken = (resolve_dtype(slot.dtype, CUDA), *slot.converts_from())
        value = noise(extent(slot.shape, live), taken[(turn + seed) % len(taken)], seed + turn)
        holder = beside if source.from_side else batch
        for part in source.parts[:-1]:
            holder = holder.setdefault(part, {})
        holder[source.parts[-1]] = value if slot.placement == "host" else value.to(device)
    return batch, beside
