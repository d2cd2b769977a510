"""A model in stages, whose layers may be sharded, and what one process computes with it.

All numbers are whole and below a prime, in float64: no order of additions changes a bit.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist

from slotgraph import BATCH, TOKENS, EagerRunner, Inputs, copied
from slotgraph import standard as std
from tests.runners import prefilled
from tests.runners.prefilled import HIDDEN, PRIME, VOCAB

ROOM: Final = 64
CHOSEN: Final = 3
LAYERS: Final = 4
ALL: Final = ("hidden_states", "residual", "topk_indices")
SIZES: Final = {std.HIDDEN: HIDDEN, std.INDEX_TOPK: CHOSEN}
Flow = dict[str, torch.Tensor | None]


class Tokens(Inputs):
    """What each stage of a decode step reads."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)


class First(Tokens):
    """What the first one reads. keys: of what its outputs have."""

    keys: Any = ALL


@std.model_dtype(torch.float64)
class Later(Tokens, std.PipelineProxies, std.PipelineIndices):
    """What a later stage reads beside."""


@functools.cache
def weights(place: int, *shape: int, device: torch.device | None = None) -> torch.Tensor:
    """Whole numbers, the same in each process."""
    return prefilled.whole(*shape, generator=torch.Generator().manual_seed(place)).data.to(device)


def layer(place: int, view: Tokens, flow: Flow, mine: slice, reduce: Callable[[torch.Tensor], object]) -> Flow:
    """One layer: it mixes in positions, lengths, and the residual and indices of the layer before.

    mine: the rows of weights that one rank has. reduce: adds up what all of them have.
    """
    hidden, residual, chosen = (flow[key] for key in ALL)
    assert hidden is not None
    width = len(view.input_ids) // max(len(view.seq_lens), 1) or 1
    lengths = view.seq_lens.repeat_interleave(width).double()[:, None]
    mixed = hidden + weights(100 + place, ROOM, HIDDEN, device=hidden.device)[view.positions] * lengths
    if residual is not None:
        mixed = mixed + residual * 3
    if chosen is not None:
        mixed = mixed + hidden.gather(1, chosen.long() % HIDDEN).sum(1, keepdim=True)
    part = mixed[:, mine] @ weights(place, HIDDEN, HIDDEN, device=hidden.device)[mine]
    reduce(part)
    out = torch.remainder(part, PRIME)
    left = None if residual is None else torch.remainder(residual + hidden, PRIME)
    again = None if chosen is None else torch.remainder(out[:, :CHOSEN], HIDDEN).int() + 1
    return {"hidden_states": out, "residual": left, "topk_indices": again}


def begin(view: First) -> Flow:
    """Embeddings; with a residual and indices, where the keys ask for them."""
    ids = view.input_ids
    hidden = weights(200, VOCAB, HIDDEN, device=ids.device)[ids]
    residual = hidden.flip(1) + 1 if "residual" in view.keys else None
    chosen = ids[:, None].int().repeat(1, CHOSEN) + 1 if "topk_indices" in view.keys else None
    return {"hidden_states": hidden, "residual": residual, "topk_indices": chosen}


def end(flow: Flow) -> torch.Tensor:
    """Logits."""
    hidden = flow["hidden_states"]
    assert hidden is not None
    return hidden @ weights(300, HIDDEN, VOCAB, device=hidden.device)


CHANGES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "keys": lambda flow: {**flow, "extra": torch.ones(3, 2)},
    "shape": lambda flow: {**flow, "hidden_states": flow["hidden_states"][:, :5]},
    "rows": lambda flow: {key: one[:2] for key, one in flow.items()},
    "dtype": lambda flow: {**flow, "residual": flow["residual"].float()},
}
"""What a stage may hand on that the next one does not expect."""


@attrs.define(eq=False)
class Part:
    """One rank's part of the layers of one stage. fault: what it does wrong in the steps to come, at their end."""

    stage: int
    stages: int
    shard: int = 0
    shards: int = 1
    group: Any = None
    fault: str = ""

    def __call__(self, view: Any) -> Any:
        """Proxies, or logits of the last stage."""
        flow = begin(view) if self.stage == 0 else {key: getattr(view, f"pp_{key}") for key in ALL}
        width, each = HIDDEN // self.shards, LAYERS // self.stages
        mine = slice(self.shard * width, (self.shard + 1) * width)
        for place in range(self.stage * each, (self.stage + 1) * each):
            flow = layer(place, view, flow, mine, self._reduce)
        if self.fault == "raises":
            raise ValueError(f"shard {self.shard} of stage {self.stage} lost a page")
        return end(flow) if self.stage == self.stages - 1 else CHANGES.get(self.fault, dict)(flow)

    def _reduce(self, part: torch.Tensor) -> None:
        if self.shards > 1:
            dist.all_reduce(part, group=self.group)


def eager_part(stage: int, stages: int, step: Any = None) -> EagerRunner[Any]:
    """A stage that is not captured."""
    inputs: type[Tokens] = Later if stage else First
    return EagerRunner(inputs, step or Part(stage, stages), sizes=SIZES if stage else {}, backend="cpu")


def batch_of(requests: int, seed: int, width: int = 1, keys: tuple[str, ...] = ALL) -> dict[str, Any]:
    """Random tokens, never 0; the same on all ranks."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, VOCAB, (requests * width,), generator=draw),
        "positions": torch.randint(1, ROOM, (requests * width,), generator=draw),
        "seq_lens": torch.randint(1, 9, (requests,), generator=draw, dtype=torch.int32),
        "keys": keys,
    }


def expected(batch: Mapping[str, Any], backend: str = "cpu") -> torch.Tensor:
    """What one process computes with the whole model."""
    out: torch.Tensor = EagerRunner(First, Part(0, 1), backend=backend)(batch)
    return out.cpu()
