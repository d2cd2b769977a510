"""A program: it prints, as JSON, for each kind of runner what a forked child of it did that was not refused."""

import itertools
import json
import os
from typing import Any, Final

from slotgraph.errors import ReplayError
from tests.invariants.steps import EITHER, LOWERINGS, drawn, runner_of, wrong

KINDS: Final[dict[str, dict[str, Any]]] = {"sound": {}, "planted": {"graphs": False}}
"""Options of runners; without graphs there is nothing that belongs to a process, and steps go on in the child."""


def refuses(act: Any) -> bool:
    """Whether a forked child that does it is refused."""
    child = os.fork()
    if not child:
        code = 2
        try:
            act()
            code = 1
        except ReplayError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def accepted(options: dict[str, Any]) -> list[str]:
    """What a child did that has graphs of its parent; the parent goes on, and so does a runner of the child's own."""
    found = []
    for lowering, inputs in itertools.product(LOWERINGS, EITHER):
        runner, values = runner_of("cpu-capture", lowering, inputs, **options), drawn(3, 1, inputs=inputs)
        for _ in range(3):  # so that the quickest way is known
            runner(values)
        found += [f"{lowering} call"] if not refuses(lambda: runner(values)) else []  # noqa: B023 - done at once
        view = runner.fill(values)
        found += [f"{lowering} replay"] if not refuses(lambda: runner.replay(view)) else []  # noqa: B023 - likewise
        assert wrong(runner.replay(view), values, exact="graphs" in options) == []
    return found


if __name__ == "__main__":
    print(json.dumps({kind: accepted(options) for kind, options in KINDS.items()}))  # noqa: T201 - a program
