"""A tool that raises in the middle of the library's own code, at each point where an exception can come."""

import inspect
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

import attrs

import slotgraph

OURS: Final = (str(Path(slotgraph.__file__).parent),)
"""Where points count: the package."""
POINTS: Final = frozenset({"call", "c_call", "c_return"})


class InjectedError(Exception):
    """What no code of the library expects."""


@attrs.define(eq=False)
class Injection:
    """Raises once, when a block has come to its n-th point in our code.

    A point is where a function of ours begins, where it calls one of C, which then may fail without having done
    anything, and where that has returned, so that it is done: it is there that Python handles signals.
    at: n, from 1 on; 0 for never. error: what is raised. more: files beside our folders whose points count. seen:
    points so far. where: the place of the raise.
    """

    at: int = 0
    error: type[BaseException] = InjectedError
    more: tuple[str, ...] = ()
    seen: int = 0
    where: str = ""
    _before: Any = None

    def __enter__(self) -> Self:
        """From here on."""
        self._before = sys.getprofile()
        sys.setprofile(self._point)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Up to here; what was injected goes no further, nor what our code made of it."""
        sys.setprofile(self._before)
        while error is not None and self.where:
            if isinstance(error, self.error):
                return True
            error = error.__cause__
        return False

    def _point(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in POINTS or not code.co_filename.startswith((*OURS, *self.more)):
            return
        if event == "call" and code.co_flags & inspect.CO_GENERATOR:  # one that is closed has nobody to raise to
            return
        if event == "c_call" and getattr(argument, "__name__", "") == "__exit__":
            return  # a lock that is let go of does not fail
        self.seen += 1
        if self.seen == self.at:
            what = getattr(argument, "__qualname__", "") or code.co_qualname
            self.where = f"{code.co_filename}:{frame.f_lineno} {event} {what}"
            raise self.error(self.where)
