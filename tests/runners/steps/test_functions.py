"""Functions of slots where no random declaration has them: slots beside the kernel, of producers, and before a fill.

tests/life/test_functions.py draws all others.
"""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, Inputs, computed, copied, staged
from slotgraph.dataflow.capabilities import LADDER
from tests.packing import backend_of
from tests.runners.models import decoder

ON_CPU: Final = [(backend, lowering) for backend in ("cpu", "cpu-capture") for lowering in LADDER]
WAYS: Final = [
    *ON_CPU,
    *[pytest.param("cuda", lowering, marks=pytest.mark.cuda) for lowering in LADDER if lowering != "direct"],
]
by_all_ways = pytest.mark.parametrize(("backend", "lowering"), WAYS)
Edit = Callable[[Any], object]


def ids(**options: Any) -> Any:
    """A slot that grows, so that there is something to follow."""
    return copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids: ids + 1, **options)


def captured(backend: str, lowering: str, inputs: type[Inputs], step: Any, **options: Any) -> Any:
    """A captured runner of buckets of 2, 4 and 8, or a skip where there is no such way."""
    options = {"buckets": (2, 4, 8), "output_rows": None, **options}
    return decoder(inputs, step, backend=backend_of(backend, lowering), lowering=lowering, **options)


def outputs(runner: Any, batch: dict[str, Any], edits: dict[int, Edit], count: int, ahead: int = 0) -> list[list[int]]:
    """What each of so many steps returned. edits: by the number of a step, what is then said."""
    found = list[list[int]]()
    for step in runner.steps(batch, ahead=ahead):
        found.append(step.outputs.tolist())
        edits.get(step.number, id)(step)
        if step.number == count - 1:
            break
    return found


class OfHost(Inputs):  # a packet carries what follows from a slot that the host computes
    ids: torch.Tensor = ids()
    requests: torch.Tensor = computed(lambda step: step.live(BATCH), dtype=torch.int64, placement="host")
    twice: torch.Tensor = computed(lambda requests: 2 * int(requests), dtype=torch.int64)


@by_all_ways
def test_a_packet_carries_what_follows_from_other_slots_of_this_step(backend: str, lowering: str) -> None:
    """A slot on the host is computed before the packet of an edit, which carries slots that need it."""
    runner = captured(backend, lowering, OfHost, lambda view: view.ids[:1] * 0 + view.twice)
    edits: dict[int, Edit] = {0: lambda step: step.leave([1]), 1: lambda step: step.leave([0])}
    assert outputs(runner, {"ids": [1, 2, 3]}, edits, 3) == [[6], [4], [2]]


WIDE: Final = Axis("WIDE", fixed=True)


class Apart(Inputs):  # slots that the fill kernel does not write: by their dtype, and by their many outer rows
    ids: torch.Tensor = ids()
    z: torch.Tensor = copied(TOKENS, dtype=torch.complex128, pad=7, then=lambda z: z * 2)
    tall: torch.Tensor = copied(WIDE, TOKENS, dtype=torch.int32, pad=7, then=lambda tall: tall + 1)
    noted: torch.Tensor = copied(WIDE, TOKENS, dtype=torch.int32, pad=0, rewritten=True)
    spread: torch.Tensor = computed(lambda noted: noted.amax().reshape(1), shape=1, dtype=torch.int32)


@by_all_ways
def test_slots_beside_the_kernel_advance_as_others_do(backend: str, lowering: str) -> None:
    """Their live rows do in each step, once, and their tails are reset in each step, also in those without news."""

    def step(view: Apart) -> torch.Tensor:
        view.noted.add_(view.ids)
        view.noted[:, -1] += 1000  # a padded row
        return torch.cat([view.ids, view.z.real.long(), view.tall[-1], view.spread])

    runner = captured(backend, lowering, Apart, step, sizes={WIDE: 1100}, buckets=(4, 8))
    three = torch.arange(1, 4, device=runner.stage.backend.device)
    tall = torch.zeros(1100, 3, dtype=torch.int32) + torch.tensor([10, 20, 30], dtype=torch.int32)
    batch = {
        "ids": three.clone(),
        "z": three.to(torch.complex128),
        "tall": tall.to(three.device),
        "noted": torch.zeros(1100, 3, dtype=torch.int32, device=three.device),
    }
    found = outputs(runner, batch, {1: lambda step: step.leave([0]), 2: lambda step: step.edit()}, 4)
    assert found == [
        [1, 2, 3, 0, 1, 2, 3, 7, 10, 20, 30, 7, 0],
        [2, 3, 4, 0, 2, 4, 6, 7, 11, 21, 31, 7, 3],
        [5, 4, 0, 0, 12, 8, 7, 7, 32, 22, 7, 7, 7],
        [6, 5, 0, 0, 24, 16, 7, 7, 33, 23, 7, 7, 12],
    ]


class Produced(Inputs):  # a producer writes a slot in host memory, and the host computes from it
    ids: torch.Tensor = ids()
    lens: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=0, placement="host")
    most: torch.Tensor = computed(lambda lens: int(lens.sum()), shape=1, dtype=torch.int64)


@by_all_ways
def test_a_function_on_the_host_sees_what_a_producer_wrote(backend: str, lowering: str) -> None:
    """It is called again in each step, also without news, and sees no padded row that the producer wrote."""
    runner = captured(backend, lowering, Produced, lambda view: view.most.clone(), buckets=(4, 8))
    lens = runner.inputs(4).lens
    lens.copy_(torch.tensor([1, 2, 3, 50]))
    found = []
    for step in runner.steps({"ids": [1, 2, 3]}):
        found += step.outputs.tolist()
        lens += 10
        if step.number == 2:
            break
    assert found == [6, 36, 66]


class Started(Inputs):  # a slot that the step may write, with numbers of its own at first, and a rule over it
    ids: torch.Tensor = ids()
    seen: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, starts=4, rewritten=True)
    total: torch.Tensor = copied(1, dtype=torch.int64, then=lambda seen: seen.sum().reshape(1))


@by_all_ways
def test_a_capture_leaves_the_tails_that_rules_read(backend: str, lowering: str) -> None:
    """A rule that a warm-up runs resets no tail: the slot holds what it held at first."""
    runner = captured(backend, lowering, Started, lambda view: view.total.clone())
    assert runner.graphs.buffers["seen"].tensor.tolist() == [4] * 8
