"""Batches that are refused, fills that are broken off, and the caller's batch: what each leaves behind."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from slotgraph import EagerRunner
from slotgraph.backends import Backend
from slotgraph.errors import BatchError, ComputeError, ReplayError
from tests.invariants.device import Device
from tests.invariants.steps import (
    BEYOND,
    BUCKETS,
    EITHER,
    Quick,
    Slots,
    breaking,
    drawn,
    each_lowering,
    everything,
    on,
    runner_of,
    wrong,
)
from tests.life.worlds import ACTS, decoding, interrupt_everywhere

Act = Callable[[], object]

SPOILS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda one: one.to(torch.complex64),
    "rank": lambda one: one[None],
    "length": lambda one: torch.cat([one, one[:1]]),
    "device": lambda one: one.to("meta"),
    "sparse": lambda one: one.to_sparse(),
    "text": lambda _: "none",
    "ragged": lambda one: [[1], [2, 3], *[[4]] * (len(one) - 2)],
    "missing": lambda _: None,
}


def changed(batch: Mapping[str, Any], act: Act, error: type[BaseException] | None = None) -> list[str]:
    """What a step has written of its caller's batch; one that must raise, where an error is given."""
    before = {name: copy.deepcopy(one) for name, one in batch.items()}
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        act()
    assert batch.keys() == before.keys()
    return [name for name, one in batch.items() if not _equal(one, before[name])]


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return one.is_meta or torch.equal(one.to_dense(), other.to_dense())


def left_behind(device: Device, runner: Any, batch: Mapping[str, Any], act: Act) -> list[str]:
    """What a refused batch has changed, of all that a user can see: itself too."""
    prior = drawn(4, 1)
    view = runner.fill(on(device, prior))
    runner.replay(view)

    def known() -> dict[str, Any]:
        return {"buffers": device.bytes_now(), "counters": runner.stats(), "report": runner.report}

    before = known()
    found = changed(batch, act, BatchError)
    found += [name for name, value in known().items() if value != before[name]]
    try:
        found += wrong(runner.replay(view), prior)
    except ReplayError:
        found += ["view"]
    for seed, rows in enumerate((1, 5, BEYOND, 2)):  # which believe what is known of tails
        found += wrong(runner(drawn(rows, seed)), drawn(rows, seed))
    return found


@each_lowering
@pytest.mark.parametrize("lazy", [False, True], ids=["captured", "lazy"])
def test_refusals_leave_nothing(lowering: str, *, lazy: bool) -> None:
    """Whatever is wrong with whichever source: buffers, marks, graphs, counters, batch and view are as they were."""
    device = Device()
    runner = runner_of(device, lowering, lazy=lazy)
    for rows in (1, 3, BEYOND, 2):
        runner(drawn(rows, rows))
    for number, name in enumerate(drawn(0, 0)):
        act = (runner, runner.fill)[number % 2]
        for how, spoil in SPOILS.items():
            if (name, how) != ("extra", "missing"):
                batch: dict[str, Any] = drawn(3, number)
                batch[name] = spoil(batch[name])
                assert left_behind(device, runner, batch, functools.partial(act, batch)) == [], (name, how)
    batch = drawn(3, 1)
    assert left_behind(device, runner, batch, lambda: runner(batch, besides=1)) == []


@pytest.mark.parametrize("inputs", EITHER)
def test_broken_fills_are_not_believed(backend: Backend, inputs: type[Quick]) -> None:
    """Whatever is raised in a call, a fill or a replay: the view before is refused or right, and the next steps are."""
    for lowering in backend.capabilities.lowerings:
        world = decoding(backend, lowering, inputs, buckets=BUCKETS)
        for rows, act in itertools.product((3, BEYOND), ACTS.values()):
            interrupt_everywhere(world, act, rows, few=8)


@each_lowering
def test_the_batch_is_never_written(lowering: str) -> None:
    """By no step, whether it is done, refused or broken off, in a graph or eagerly, as tensors, lists or arrays."""
    runner, backend = runner_of("cpu-capture", lowering), Device()
    for rows in (3, 6, BEYOND):
        tensors = on(backend, drawn(rows, rows))
        lists = {name: one.tolist() for name, one in tensors.items()}
        for batch in (tensors, lists):
            call = functools.partial(runner, batch)
            assert changed(batch, call) == changed(batch, functools.partial(runner.fill, batch)) == []
            with breaking():
                assert changed(batch, call, ComputeError) == []
    eager = EagerRunner(Slots, everything, backend="cpu", no_copy=True)
    batch = drawn(3, 1)
    assert changed(batch, lambda: eager(batch)) == []
