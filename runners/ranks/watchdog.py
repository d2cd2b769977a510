"""Watchdogs: a device whose collectives wait for a lost rank is waited for no longer than ranks are."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs

from ...backends.base import Backend, Event
from ...dataflow.errors import RankError
from ..coordination import Step
from .group import Ranks

_PAUSE: Final = 1.0
"""Seconds between two looks at a device that captures keep busy."""


@attrs.define(eq=False)
class Watchdog:
    """Looks at the device while a bucket is warmed up, whose collectives may wait for a rank that never comes.

    The host then waits inside the driver, where nothing can be raised: a thread names who is lost, and aborts the
    group's collectives. seconds: how long the device may stand at one place.
    """

    ranks: Ranks
    backend: Backend
    seconds: float
    told: str
    _asked: Event | None = None
    _lost: RankError | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[Callable[[Step], Step]]:
        """As long as the block runs, for what its call wraps.

        RankError at its end where ranks were lost, since no step can run any more.
        """
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,), name="slotgraph watchdog", daemon=True)
        watcher.start()
        try:
            yield self.over
        finally:
            over.set()
            watcher.join()
            if self._lost is not None:
                raise self._lost

    def over(self, step: Step) -> Step:
        """The step, and a wait for the device, which is looked at meanwhile. RankError where ranks were lost.

        A step after that would wait for them again, in a group whose collectives were ended.
        """

        def asked() -> Any:
            outputs = step()
            self._asked = self.backend.event()
            self.backend.synchronize()
            if self.ranks.broken is not None:
                raise self.ranks.broken
            return outputs

        return asked

    def _watch(self, over: threading.Event) -> None:
        at: Event | None = None
        since = 0.0
        while not over.wait(min(_PAUSE, self.seconds)):
            asked = self._asked
            if asked is None or asked.query():
                at = None
            elif asked is not at:
                at, since = asked, time.monotonic()
            elif time.monotonic() - since >= self.seconds:
                self._lost = self.ranks.stood_still(asked, self.backend.device, self.told, self.seconds)
                return
