"""Host work of the steps of a loop: the work that no graph does, in steps with an edit and without."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from ...dataflow.axes import Live, Step
from ...dataflow.capabilities import HOST, Placement
from ...dataflow.computation import Computation, PackedValue
from ...dataflow.fill.bucket import Bucket


@attrs.define(eq=False)
class HostWork:
    """Host work of one step, for one bucket and number of requests.

    Attributes:
        step: The sizes.
        counts: The live counts of an edit's packet.
        live_counts: The same on the device, for graphs of several steps, or None until one needs them.
        advances: Advances slots in each step.
        rules: Advances slots before an edit, except those that its kernel advances.
        tails: Padded rows to reset in each step, with their values.
        other_tails: Further ones to reset if the number of requests changed.
        values: Slots that the host computes.
        packed: Slots that the host computes, whose values travel in an edit's packet.
    """

    step: Step
    counts: Sequence[int]
    live_counts: torch.Tensor | None = None
    advances: list[Callable[[], None]] = attrs.field(factory=list)
    rules: list[Callable[[], None]] = attrs.field(factory=list)
    tails: list[tuple[torch.Tensor, Any]] = attrs.field(factory=list)
    other_tails: list[tuple[torch.Tensor, Any]] = attrs.field(factory=list)
    values: list[Computation] = attrs.field(factory=list)
    packed: list[PackedValue] = attrs.field(factory=list)

    @classmethod
    def of(
        cls, bucket: Bucket, live: Live, sides: Iterable[Placement], lanes: Collection[str], whole: Collection[str]
    ) -> "HostWork":
        """Find the work that a bucket's graph leaves to the host.

        Args:
            bucket: The bucket.
            live: Live rows on each varying axis.
            sides: The placements of slots that no graph advances.
            lanes: Slots that an edit's kernel advances.
            whole: Slots whose values an edit's packet carries.
        """
        step = bucket.step(live)
        transitions = bucket.transitions
        sizes = step.live_sizes
        work = cls(step, bucket.declaration.counts(sizes))
        for side, transition in transitions.items():
            if side not in sides:
                if transition.leaves(lanes):
                    work.rules.append(transition.of(sizes, lanes))
            elif transition.sources:
                work.advances.append(transition.of(sizes))
        work.tails += bucket.tails(live, always=True)
        work.other_tails += bucket.tails(live, always=False)
        for one, value in bucket.computations(bucket.views, whole):
            if one.on == HOST:
                if one.slot in whole:
                    work.packed.append(PackedValue.of(value))
                else:
                    work.values.append(value)
        return work

    def advance(self, *, before_edit: bool) -> None:
        """Advance slots. Before an edit, also advance those that the step's graph normally advances."""
        advances = [*self.advances, *self.rules] if before_edit else self.advances
        if advances:
            with torch.no_grad():
                for advance in advances:
                    advance()

    def reset_tails(self, *, resized: bool) -> None:
        """Reset padded rows, before the host computes anything from these slots."""
        tails = [*self.tails, *self.other_tails] if resized else self.tails
        if tails:
            with torch.no_grad():
                for tail, number in tails:
                    tail.fill_(number)

    def compute(self, fields: Mapping[str, Any]) -> None:
        """Compute slots from the current contents of the slots that they read. fields: Those of the first batch."""
        if self.values:
            with torch.no_grad():
                for value in self.values:
                    value.run(fields, self.step)

    def packed_values(self, fields: Mapping[str, Any]) -> dict[str, bytes]:
        """Compute the values for a packet, by slot. fields: The fields of the first batch."""
        return {one.computation.slot: one.bytes_of(fields, self.step) for one in self.packed}
