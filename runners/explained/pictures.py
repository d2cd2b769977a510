"""The pictures of an explanation, each by its name."""

from collections.abc import Mapping

from .areas import own_picture, pool_picture
from .dependencies import dependencies
from .diagram import step_lines
from .fill_picture import fill_picture, rows_of
from .records import RunnerExplanation
from .svg import Picture


def pictures(explanation: RunnerExplanation) -> Mapping[str, Picture]:
    """Dependencies, fills and memory; the pool's, too, where the runner shares memory with others."""
    found = {
        "dependencies": dependencies(explanation.declaration, step_lines(explanation)),
        "fills": fill_picture(rows_of(explanation), explanation.kind),
        "memory": own_picture(explanation.memory, explanation.kind),
    }
    if explanation.pool is not None:
        kinds = {slot.name: slot.kind for slot in explanation.declaration.slots}
        found["pool"] = pool_picture(explanation.pool, kinds)
    return found
