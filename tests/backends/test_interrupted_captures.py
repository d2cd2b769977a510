"""KeyboardInterrupts at any moment of a capture on the CPU: torch works as before, and so does the next capture.

As a program, a timer interrupts captures at random moments. It ends with an error where torch does not work as before
after an interrupt, or the next capture is wrong.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import torch

from slotgraph.backends import load

ROOT: Final = Path(__file__).parents[2]
INTERRUPTS: Final = 200
_C: Final[Any] = torch._C


def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """What Python itself does at Ctrl-C."""
    raise KeyboardInterrupt


def modes() -> tuple[int, int]:
    """How many modes are on for this thread."""
    return _C._len_torch_dispatch_stack(), _C._len_torch_function_stack()


def main() -> None:
    """Interrupt captures of a step that writes, breaks, and enters modes of its own."""
    backend = load("cpu-capture")()
    source, cache = torch.rand(4), torch.rand(4)

    def step() -> torch.Tensor:
        cache[:2].copy_(source[:2] * 3)
        told = backend.interrupt(lambda places: source.sum() if places is None else places[0].copy_(source.sum()))
        with torch.enable_grad():
            noise = torch.nn.functional.dropout(source, 0.5)
        answer: torch.Tensor = noise + cache + told
        return answer

    backend.capture(step)
    kept, longest, hits, draw = cache.clone(), 0.05, 0, torch.Generator().manual_seed(5)
    signal.signal(signal.SIGALRM, interrupt)
    while hits < INTERRUPTS:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(2e-5, torch.rand(1, generator=draw).item() * longest))
            backend.capture(step)
            signal.setitimer(signal.ITIMER_REAL, 0)
            longest *= 0.9
        except KeyboardInterrupt:
            hits += 1
            longest *= 1.1
        assert torch.arange(3.0).add_(1).tolist() == [1.0, 2.0, 3.0]  # no mode refuses or swallows operators
        assert torch.equal(cache, kept)
        if modes() != (0, 0):  # one that lets all calls through, which torch put back late
            backend.capture(step)
        assert modes() == (0, 0)
    graph = backend.capture(step)
    source.fill_(2.0)
    graph.replay()
    assert cache[:2].tolist() == [6.0, 6.0]
    sys.stdout.write(f"{hits} interrupts\n")


def test_at_any_moment() -> None:
    """In a process of its own, which cannot harm the tests that follow."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-m", "tests.backends.test_interrupted_captures"]
    done = subprocess.run(  # noqa: S603 - this file
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"{INTERRUPTS} interrupts\n"


if __name__ == "__main__":
    main()
