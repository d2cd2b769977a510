"""What a view must hold, in plain Python: live rows, tails, counts and constants of any drawn declaration."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from slotgraph import BATCH, Inputs, Step
from slotgraph.dataflow.axes import extent
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.slots import Computed, Constant, Copied, Slot, Staged
from slotgraph.dataflow.tails import Pad, resolve_value
from tests.strategies import AXES, HIDDEN, Sizes, same_bytes

WIDE: Final = 2
"""The size of HIDDEN."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without gaps."""
    return tensor.clone(memory_format=torch.contiguous_format)


def alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes, however they lie."""
    return same_bytes(plain(left), plain(right))


@attrs.frozen(eq=False)
class Given:
    """One batch: its sources by slot, without those that are absent, the field that it carries, and its live sizes."""

    sources: Mapping[str, torch.Tensor]
    tag: int
    live: Sizes


@attrs.frozen(eq=False)
class Reference:
    """The rules of one declaration on one device."""

    inputs: type[Inputs]
    capabilities: Capabilities

    def path(self, given: Given, buckets: tuple[int, ...], capacity: Sizes, patterns: set[frozenset[str]]) -> str:
        """In one word, where a batch goes: `fits`, or why it is run eagerly."""
        optional = {name for name, slot in self.inputs.slotgraph.slots.items() if slot.optional}
        if given.live[BATCH] > max(buckets) or any(given.live[axis] > capacity[axis] for axis in AXES):
            return "too_large"
        if frozenset(optional - given.sources.keys()) not in patterns:
            return "absent"
        return "fits" if given.tag == 3 else "field_differs"

    def faults(
        self, view: Mapping[str, Any], given: Given, padded: Sizes, capacity: Sizes | None, unseen: Collection[str] = ()
    ) -> Iterator[str]:
        """Every slot that does not hold what it must. capacity: of the buffers, where it is known. unseen: left out."""
        step = Step(given.live, padded)
        for name, slot in self.inputs.slotgraph.slots.items():
            value = view[name]
            if name in unseen:
                continue
            if isinstance(slot, Copied) and name not in given.sources:
                if value is not None:
                    yield f"{name} is absent, and was {value}"
            elif not self._holds(slot, value, view, given, step, given.sources.get(name), capacity):
                yield f"{name}, {slot}: {value}"

    def _holds(
        self,
        slot: Slot,
        value: torch.Tensor,
        view: Mapping[str, Any],
        given: Given,
        step: Step,
        source: torch.Tensor | None,
        capacity: Sizes | None,
    ) -> bool:
        if tuple(value.shape) != extent(slot.shape, step.padded_sizes):
            return False
        if isinstance(slot, Computed):
            return alike(value.cpu(), self._computed(slot, view, given, step).to(value.dtype))
        if isinstance(slot, Constant):
            return capacity is None or alike(value.cpu(), _constant(slot, value, capacity))
        parts = tuple(slice(0, size) for size in extent(slot.shape, step.live_sizes))
        if isinstance(slot, Copied) and source is not None and not alike(value[parts].cpu(), source.to(value.dtype)):
            return False
        return not isinstance(slot, Copied | Staged) or self._tail(slot, value, parts)

    def _tail(self, slot: Slot, value: torch.Tensor, parts: tuple[slice, ...]) -> bool:
        """Whether all beyond the live part is the tail's value, where the rule names one."""
        rule = slot.rule()
        if not isinstance(rule, Pad):
            return True
        number = resolve_value(rule.value, self.capabilities, {HIDDEN: WIDE})
        beyond = torch.ones(value.shape, dtype=torch.bool)
        beyond[parts] = False
        found = value.cpu()[beyond]
        return alike(found, torch.full_like(found, number))

    def _computed(self, slot: Computed, view: Mapping[str, Any], given: Given, step: Step) -> torch.Tensor:
        compute = slot.function
        known = {**view, "step": step, "tag": given.tag}
        arguments = {name: _on_host(known[name]) for name in compute.needs}
        shape = extent(slot.shape, step.padded_sizes)
        if compute.writes_out:
            out = torch.empty(shape, dtype=next(iter(arguments.values())).dtype)
            compute.function(**arguments, out=out)
            return out
        return torch.as_tensor(compute.function(**arguments)).expand(shape).clone(memory_format=torch.contiguous_format)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _constant(slot: Constant, value: torch.Tensor, capacity: Sizes) -> torch.Tensor:
    """Row i of a bucket is row i of the whole."""
    whole = extent(slot.shape, capacity)
    if callable(slot.value):
        made = torch.as_tensor(slot.value(Step(capacity, capacity)))
    else:
        number = resolve_value(slot.value, Capabilities(), {HIDDEN: WIDE})
        made = torch.full(whole, number, dtype=value.dtype)  # a NaN that is converted may have other bits
    return made.to(value.dtype)[tuple(slice(0, size) for size in value.shape)]
