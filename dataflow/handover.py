"""Handing a batch through: the views are the batch's own tensors, checked as ever, and nothing is copied."""

from typing import Any

import attrs
import torch

from .bucket import Bucket
from .ready import Ready
from .sources import NO_SIDE, Side
from .views import Views


def hand_over(
    bucket: Bucket, batch: Any, live: tuple[int, ...], absent: frozenset[str] = frozenset(), side: Side = NO_SIDE
) -> Ready:
    """What a fill would have made ready, with the batch's tensors in the place of copies.

    A source whose dtype its slot converts comes through as it is; host data for a slot on the device, as a tensor of
    its own there; one that the step writes, as a copy, because the batch is the caller's. Raises as a fill does.
    """
    ready, given = bucket.tensors(batch, live, absent, side)
    slots = bucket.declaration.slots
    own = {
        name: value.clone() if slots[name].rewritten or slots[name].restored else value for name, value in given.items()
    }
    views: Views = {**ready.shown(), **own}
    declaration = bucket.declaration
    known, fields = {**declaration.given(ready.step), **views}, declaration.fields
    host = [computation.on(known, fields) for computation in ready.host]
    with torch.no_grad():
        for computation in host:
            computation.run(batch)
    if ready.packed or ready.moved:
        move = bucket.feed().upload.move
        for value in (*ready.packed, *ready.moved):
            views = {**views, value.slot: move(value.on(known, fields).tensor_of(batch))}
    known |= views
    device = [computation.on(known, fields) for computation in ready.device]
    return attrs.evolve(ready, views=views, shown=lambda: views, host=host, device=device)
