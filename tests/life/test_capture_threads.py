"""A capture has its runner for itself: calls of other threads are refused while it runs, and buckets capture right."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from slotgraph import DecodeRunner
from slotgraph.backends import Backend
from slotgraph.dataflow.errors import ReplayError
from tests.life import worlds
from tests.runners import prefilled

SECONDS = 60.0
"""After so long a thread that waits gives up, and the test fails."""


class Door:
    """Holds up a step at its first run, until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self, *_: object) -> None:
        """Wait until the door is open."""
        self.reached.set()
        assert self.opened.wait(SECONDS)


@contextmanager
def in_thread(act: Callable[[], object], door: Door) -> Iterator[list[BaseException]]:
    """While another thread does something, which ends once the door is open; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield raised
    finally:
        door.opened.set()
        thread.join(SECONDS)
        assert not thread.is_alive()


def made(kind: str, backend: Backend, door: Door, **options: Any) -> tuple[Any, Callable[[int], Any]]:
    """A runner that is not captured, whose step goes through the door, and its batches by rows."""
    if kind == "breakable":
        model = prefilled.Model().to(backend.device)
        model.register_forward_pre_hook(door.pass_through)
        runner: Any = prefilled.runner_of(kind, model, backend, **options)
        return runner, lambda rows: prefilled.batch_of([rows], rows, backend.device)

    def step(view: worlds.LifeInputs) -> torch.Tensor:
        door.pass_through()
        return worlds.step(view)

    runner = DecodeRunner(worlds.LifeInputs, step, buckets=[4, 16], backend=backend, progress=False, **options)
    return runner, lambda rows: worlds.batch_of(rows, rows, backend.device)


@pytest.mark.parametrize("kind", ["decode", "breakable"])
def test_a_capture_is_not_disturbed(backend: Backend, kind: str) -> None:
    """Whatever another thread asks of the runner that writes slots is refused, and what is captured is right."""
    door, open_door = Door(), Door()
    open_door.opened.set()
    (runner, batch), (twin, _) = made(kind, backend, door), made(kind, backend, open_door)
    with in_thread(runner.capture, door) as raised:
        assert door.reached.wait(SECONDS)
        for act in (runner, runner.fill, lambda _: runner.capture()):
            with pytest.raises(ReplayError, match="in the middle of a step or a capture"):
                act(batch(3))
    assert raised == []
    assert runner.report.captured == (4, 16)
    twin.capture()
    for rows in (3, 9, 1):
        outputs = runner(batch(rows)).clone()  # the twin's graphs use the same pool
        assert torch.equal(outputs, twin(batch(rows)))


@pytest.mark.parametrize("kind", ["decode", "breakable"])
def test_a_late_capture_is_not_disturbed(backend: Backend, kind: str) -> None:
    """Nor is one in the middle of a run; other buckets are refused meanwhile, too."""
    door, open_door = Door(), Door()
    open_door.opened.set()
    (runner, batch), (twin, _) = made(kind, backend, door, lazy=True), made(kind, backend, open_door)
    runner.capture()
    with in_thread(lambda: runner(batch(3)), door) as raised:
        assert door.reached.wait(SECONDS)
        for act in (runner, runner.fill):
            with pytest.raises(ReplayError, match="in the middle of a step or a capture"):
                act(batch(9))
        if kind == "decode":
            with pytest.raises(ReplayError, match="in the middle of a step or a capture"):
                runner.inputs(16)
    assert raised == []
    twin.capture()
    for rows in (3, 9, 1):
        outputs = runner(batch(rows)).clone()  # the twin's graphs use the same pool
        assert torch.equal(outputs, twin(batch(rows)))
    assert runner.report.captured == (4, 16)
