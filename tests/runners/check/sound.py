"""Sound runners of every kind, each with the batches to check it with."""

from collections.abc import Callable
from typing import Any

import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs
from slotgraph.dataflow.slots import Output
from tests.runners import prefilled
from tests.runners.models import plain_runner, random_batch
from tests.runners.standard.batches import fixed_of
from tests.runners.standard.test_runs import SHARDING
from tests.runners.test_draft import batch_of as drafted
from tests.runners.test_draft import captured as draft_runner
from tests.runners.test_draft_extend import batch_of as extended
from tests.runners.test_draft_extend import captured as extend_runner
from tests.runners.test_draft_extend import chained

Make = Callable[[int, torch.Generator], Any]
Found = tuple[Any, Make]


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(0, 1 << 30, (), generator=generator))


def _lengths(tokens: int, generator: torch.Generator) -> list[int]:
    """Five requests at most that have so many tokens together."""
    cuts = torch.randint(1, tokens + 1, (4,), generator=generator).tolist()
    ends = sorted({*cuts, tokens})
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def plain(backend: Any) -> Found:
    """Decode."""
    return plain_runner(backend), lambda rows, generator: _on(random_batch(rows, _seed(generator)), backend)


def draft(backend: Any) -> Found:
    """A tree of drafts."""
    runner = draft_runner(backend.name, 2, 3)
    return runner, lambda rows, generator: drafted(rows, 2, 3, _seed(generator), backend.device)


def draft_extend(backend: Any) -> Found:
    """Three tokens a request, one row of it."""
    return extend_runner(backend.name, 3), lambda rows, generator: extended(rows, 3, _seed(generator), backend.device)


def multi_layer(backend: Any) -> Found:
    """Three layers, each of which writes what the next one reads."""
    return chained(backend.name), lambda rows, generator: extended(
        rows, 3, _seed(generator), backend.device, whole=True
    )


def breakable(backend: Any) -> Found:
    """A stack in pieces, by breaks."""
    return _prefill("breakable", backend)


def piecewise(backend: Any) -> Found:
    """A stack in pieces, split at an operator."""
    return _prefill("piecewise", backend)


def _prefill(kind: str, backend: Any) -> Found:
    def make(tokens: int, generator: torch.Generator) -> Any:
        return prefilled.batch_of(_lengths(tokens, generator), _seed(generator), backend.device)

    return prefilled.captured(kind, backend.name)[0], make


KINDS = (plain, draft, draft_extend, multi_layer, breakable, piecewise)


def _on(batch: dict[str, Any], backend: Any) -> dict[str, Any]:
    return {name: value.to(backend.device) for name, value in batch.items()}


def every_slot(view: Inputs) -> torch.Tensor:
    """A step that reads all slots on the device, each row for itself, and writes the outputs among them."""
    info = view._slotgraph_view
    assert info is not None
    sizes, total = info.step.padded_sizes, None
    for name, slot in info.declaration.slots.items():
        tensor = vars(view)[name]
        if tensor is None or isinstance(slot, Output) or slot.placement == "host":
            continue
        rows = _by_token(tensor, sizes[BATCH], sizes[TOKENS])
        total = rows if total is None else total + rows
    assert total is not None
    for name, slot in info.declaration.slots.items():
        if isinstance(slot, Output):
            out = vars(view)[name]
            out.copy_(total[: out.shape[0], None].expand_as(out))
    return total


def _by_token(tensor: torch.Tensor, requests: int, tokens: int) -> torch.Tensor:
    """One number a token, made of its own part of a slot, or of its request's."""
    exact = tensor.double()
    if exact.dim() == 2 and exact.shape[0] == 3 and exact.shape[1] == tokens:
        return exact.sum(0)
    rows = next((count for count in (tokens, requests) if exact.dim() and exact.shape[0] % count == 0), None)
    if rows is None or exact.numel() < requests:
        return exact.sum().expand(tokens)
    return exact.reshape(rows, -1).sum(1).repeat_interleave(tokens // rows)


def standard_runner(inputs: type[Inputs], width: int, backend: Any) -> Any:
    """A captured decode runner over a declaration, for batches with every optional slot and with none."""
    optional = {name for name, slot in inputs.slotgraph.slots.items() if slot.optional}
    runner = DecodeRunner(
        inputs,
        every_slot,
        buckets=[2, 5],
        width=width,
        sizes=fixed_of(inputs),
        settings=SHARDING,
        absent=[optional] if optional else [],
        backend=backend,
        progress=False,
    )
    runner.capture()
    return runner
