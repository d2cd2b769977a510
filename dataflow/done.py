"""Requests that are done: their rows hold the tail of each slot, as padded rows do, until they leave."""

import functools
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import attrs
import torch

from .axes import BATCH, Sizes, shape_of
from .capabilities import DEVICE, Capabilities
from .computation import Computation, word_of, words
from .declaration import Declaration
from .errors import ConfigError
from .guard import outside_inference
from .slots import Copied, Slot
from .sources import Compute
from .tails import Pad, resolve_value
from .transition import rows_of_requests
from .views import Views


def with_done(declaration: Declaration, name: str) -> Declaration:
    """Return a declaration whose slot `name` says which requests are done. A request that is done stays done.

    Raise ConfigError if the slot cannot say that.
    """
    declaration.check_names("done", [name], "copied")
    slot = declaration.slots[name]
    rule = slot.advances()
    fits = (slot.shape, slot.dtype, slot.placement, slot.optional) == (shape_of(BATCH), torch.bool, DEVICE, False)
    if rule is None or not (fits and isinstance(slot, Copied)):
        raise ConfigError(
            f"done names {name!r}: name a copied slot on the device with one bool a request and a rule: "
            "copied(BATCH, dtype=torch.bool, pad=True, then=lambda next_ids: next_ids == END)"
        )

    own = name.partition(".")[0]
    parameters = [*rule.arguments(dict.fromkeys(rule.needs))]

    @functools.wraps(rule.function)
    def ends(**given: Any) -> Any:
        return given[own] | rule.function(**{one: given[one] for one in parameters})

    then = Compute(ends, tuple(dict.fromkeys([*rule.needs, name])), writes_out=False)
    slots = {**declaration.slots, name: attrs.evolve(slot, then=then)}  # type: ignore[arg-type] # its converter takes it
    return attrs.evolve(declaration, slots=MappingProxyType(slots), done=name)


@functools.cache
def _resetter(dim: int, each: int, number: Any) -> Callable[..., torch.Tensor]:
    """Return a function that writes a number to rows of requests. All buckets share it, so it is compiled once."""

    def reset(done: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        rows = done[:, None].expand(-1, each).reshape(-1, *[1] * (slot.dim() - dim - 1))
        return slot.masked_fill(rows, number)

    return reset


def is_reset(slot: Slot, sizes: Sizes) -> bool:
    """Return whether rows of requests that are done hold the slot's tail: on the device, one value for all of them."""
    is_filled = slot.placement == DEVICE and slot.writers & {"batch", "producer", "function"}
    return bool(is_filled) and isinstance(slot.rule(), Pad) and rows_of_requests(slot, sizes) is not None


def reset_of(
    name: str, declaration: Declaration, views: Views, sizes: Sizes, capabilities: Capabilities
) -> Computation | None:
    """Return what writes a slot's tail into rows of requests that are done, or None for a slot without."""
    slot, view = declaration.slots[name], views[name]
    rule, rows = slot.rule(), rows_of_requests(slot, sizes)
    done = views[declaration.done] if declaration.done else None
    if done is None or view is None or rows is None or name == declaration.done:
        return None
    if not is_reset(slot, sizes) or not isinstance(rule, Pad):
        return None
    with outside_inference():
        target = words(view)
    word = word_of(resolve_value(rule.value, capabilities, sizes), view.dtype)
    compute = Compute(_resetter(*rows, word), ("done", "slot"), writes_out=False)
    known = {"done": done, "slot": target}
    return Computation.bind(f"{name} of requests that are done", declaration, known, target, compute)


def resets(declaration: Declaration, views: Views, sizes: Sizes, capabilities: Capabilities) -> Iterator[Computation]:
    """Yield `reset_of` each slot that is there before functions on the device run."""
    for name in declaration.slots:
        if name in declaration.functions and declaration.side(name) == DEVICE:
            continue
        if reset := reset_of(name, declaration, views, sizes, capabilities):
            yield reset
