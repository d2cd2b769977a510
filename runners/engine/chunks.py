"""Chunks: several steps in one graph, with the rules of slots between them, and the outputs of each kept apart."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from ...backends.base import Backend, Graph
from ...dataflow.fill.bucket import Bucket
from ...dataflow.guard import outside_inference
from .capture import capture_step, warm_up
from .outputs import map_tensors


def handed_out(bucket: Bucket, outputs: Any) -> tuple[Any, torch.Tensor | None]:
    """Return the outputs of a step, and which of its requests were done before it, or None if no slot says that."""
    return outputs, bucket.views.get(bucket.declaration.done)


@attrs.frozen(eq=False, slots=False)
class Chunks:
    """Captures the graphs of several steps of one runner.

    Attributes:
        backend: The device.
        counts: How many steps these graphs run, each more than 1.
        sizes: How many live counts there are, see `Declaration.counted`.
    """

    backend: Backend
    counts: Sequence[int]
    sizes: int

    @functools.cached_property
    def live(self) -> torch.Tensor:
        """The live counts that graphs read if no kernel does. While they are 0, nothing advances."""
        with outside_inference():
            return torch.zeros(self.sizes, dtype=torch.int64, device=self.backend.device)

    def capture(self, step: Callable[[], Any], last: Any, bucket: Bucket, *given: Any) -> dict[int, Graph]:
        """Capture a bucket's graphs, by their number of steps.

        Their outputs are a list of what `handed_out` says of each step, and a list of the tensors with a row for each
        step that are a part of it.

        Args:
            step: What the graph of one step runs.
            last: The outputs of that graph. Memory that is the same in each step, such as a slot's, is copied into a
                tensor with a row for each step.
            bucket: The bucket.
            given: Further arguments of `capture_step`.
        """
        advance = self._advance(bucket)
        found = dict[int, Graph]()
        for count in self.counts:
            found[count] = capture_step(self.backend, _repeated(step, count, bucket, advance, last), *given)
        return found

    def _advance(self, bucket: Bucket) -> Callable[[], None] | None:
        """Return a call that advances slots between two steps, warmed up, or None if each step begins with that."""
        if bucket.lowering.is_in_graph:
            return None
        rules = bucket.transition_in_graph
        live = self.live.unbind()

        def advance() -> None:
            rules.advance(live, live[0] != 0)

        self.live.zero_()
        warm_up(self.backend, advance)
        return advance


def _repeated(
    step: Callable[[], Any], count: int, bucket: Bucket, advance: Callable[[], None] | None, last: Any
) -> Callable[[], tuple[list[Any], list[torch.Tensor]]]:
    """Return a call that runs a step several times, see `Chunks.capture`."""
    fixed = dict[int, torch.Tensor]()  # which keeps this memory from being used again

    def note(tensor: torch.Tensor) -> None:
        fixed[tensor.untyped_storage().data_ptr()] = tensor

    def kept(stacks: list[torch.Tensor], number: int, places: Iterator[int], tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in fixed:
            return tensor
        if not number:
            stacks.append(tensor.new_empty((count, *tensor.shape)))
        return stacks[next(places)][number].copy_(tensor)

    map_tensors(handed_out(bucket, last), note)

    @torch.no_grad()
    def run() -> tuple[list[Any], list[torch.Tensor]]:
        found = list[Any]()
        stacks = list[torch.Tensor]()
        for number in range(count):
            if number and advance is not None:
                advance()
            keep = functools.partial(kept, stacks, number, itertools.count())
            found.append(map_tensors(handed_out(bucket, step()), keep))
        return found, stacks

    return run
