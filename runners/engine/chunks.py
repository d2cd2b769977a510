"""Chunks: several steps in one graph, with the rules of slots between them, and the outputs of each kept apart."""

from collections.abc import Callable
from typing import Any

import torch

from ...dataflow.fill.bucket import Bucket
from .outputs import map_tensors


def handed_out(bucket: Bucket, outputs: Any) -> tuple[Any, torch.Tensor | None]:
    """Return the outputs of a step, and which of its requests were done before it, or None if no slot says that."""
    return outputs, bucket.views.get(bucket.declaration.done)


def steps_in_graph(
    step: Callable[[], Any], count: int, bucket: Bucket, advance: Callable[[], None], last: Any
) -> Callable[[], list[Any]]:
    """Return a call that runs a step several times, and returns what `handed_out` says of each.

    Args:
        step: The step, which begins with what a replay of its own graph does.
        count: How many times.
        bucket: The bucket.
        advance: Advances slots between two steps, if the step itself does not.
        last: The outputs of the step's own graph. Memory that is the same in each step, such as a slot's, is copied
            before the next step writes it.
    """
    fixed = set[int]()

    def note(tensor: torch.Tensor) -> None:
        fixed.add(tensor.untyped_storage().data_ptr())

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in fixed else tensor

    map_tensors(handed_out(bucket, last), note)

    def run() -> list[Any]:
        found = list[Any]()
        for number in range(count):
            if number:
                found[-1] = map_tensors(found[-1], own)
                advance()
            found.append(handed_out(bucket, step()))
        return found

    return torch.no_grad()(run)
