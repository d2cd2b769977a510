"""The gate of a runner: one step or capture at a time, since each writes the slots that another one reads."""

import threading

from ..dataflow.errors import ReplayError


class Gate:
    """Lets one step or capture in, and refuses every call meanwhile: another thread's, or one of the step itself.

    lock: to be held by the step, after a look whether someone holds it. Who looks at the same moment as another waits
    for that one's step instead, which is as safe. A lock of C, because a signal that comes between a function's return
    from taking something and the statement that sees to its return would leave it taken for good.
    """

    __slots__ = ("_runner", "lock")

    def __init__(self, runner: str) -> None:
        self._runner = runner
        self.lock = threading.Lock()

    def open(self) -> threading.Lock:
        """The lock, to go in by. ReplayError where somebody is in."""
        if self.lock.locked():
            raise self.refusal()
        return self.lock

    def refusal(self) -> ReplayError:
        """The error for a caller that finds the runner busy."""
        message = (
            f"this {self._runner} is in the middle of a step or a capture: another thread runs it, or its own step "
            "calls it; give each thread a runner of its own, or take turns by a lock of yours"
        )
        return ReplayError(message)
