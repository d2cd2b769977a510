"""Checks of what a runner is constructed with: each error names the argument, what was expected, and what came."""

import threading
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch

from ..dataflow.axes import Axis, Dim
from ..dataflow.declaration import Declaration
from ..dataflow.errors import ConfigError, hint
from ..dataflow.inputs import Inputs


def refuse(argument: str, expected: str, value: object) -> NoReturn:
    """Raise ConfigError for an argument of the wrong kind."""
    got = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.80} of type {type(value).__name__}"
    raise ConfigError(f"{argument}: expected {expected}, got {got}")


def checked(argument: str, expected: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    """The value, which is of a kind. ConfigError where it is not; a bool is not a number."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        refuse(argument, expected, value)
    return value


def is_collection(value: object) -> bool:
    """Whether it holds several values; a text is one, and so is a tensor."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping | torch.Tensor)


def declaration_of(inputs: Any) -> Declaration:
    """What a declaration class declares. ConfigError where it is no subclass of Inputs."""
    if not (isinstance(inputs, type) and issubclass(inputs, Inputs) and inputs is not Inputs):
        refuse("inputs", "a declaration, a subclass of Inputs", inputs)
    return inputs.slotgraph


def check_step(argument: str, step: Any, takes: str = "the view") -> None:
    """ConfigError where a step cannot be called."""
    if not callable(step):
        refuse(argument, f"a function of {takes}", step)


def checked_sizes(sizes: Any) -> dict[Axis, int]:
    """Sizes by axis. ConfigError where one is no whole number of at least 0, or its key no axis."""
    checked("sizes", "a mapping of axes to their sizes, such as {HIDDEN: 64}", sizes, Mapping)
    for axis, size in sizes.items():
        checked("sizes", "an Axis as each key", axis, Axis)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            refuse(f"sizes of {axis.name}", "a whole number, at least 0", size)
    return dict(sizes)


def checked_relations(relations: Any) -> dict[Axis, Dim]:
    """Axes that follow from others. ConfigError where a key is no axis, or its size no expression over axes."""
    expected = "a mapping of axes to sizes over other axes, such as {TOKENS: BATCH * 4}"
    for axis, size in checked("relations", expected, {} if relations is None else relations, Mapping).items():
        checked("relations", expected, axis, Axis)
        checked(f"relations of {axis.name}", "an axis, or an expression over axes", size, (Axis, Dim))
    return {axis: Dim.of(size) for axis, size in (relations or {}).items()}


def checked_names(argument: str, names: Any) -> tuple[str, ...]:
    """Names of slots. ConfigError where it is one bare text, or not all are texts."""
    expected = "names of slots in a list or tuple"
    if not is_collection(names):
        refuse(argument, expected, names)
    return tuple(checked(argument, expected, name, str) for name in names)


def check_seconds(argument: str, seconds: Any) -> None:
    """ConfigError where it is no number of seconds that a wait can take."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= threading.TIMEOUT_MAX:
        refuse(argument, f"seconds, more than 0 and at most {threading.TIMEOUT_MAX:g}", seconds)


def check_slots(argument: str, declaration: Declaration, names: Collection[str]) -> None:
    """ConfigError where a name is no slot's, of those that settings switch off neither."""
    for name in names:
        if name not in declaration.slots and name not in declaration.disabled:
            raise ConfigError(f"{argument} names {name!r}, which is no slot of {declaration.name}")


def checked_by_slot(argument: str, given: Any, what: str) -> Mapping[str, Any]:
    """What is given by slot. ConfigError where it is no mapping of names."""
    checked(argument, f"a mapping of slots' names to {what}", given, Mapping)
    for name in given:
        checked(argument, "a slot's name as each key", name, str)
    return dict(given)


def patterns_of(declaration: Declaration, absent: Any) -> set[frozenset[str]]:
    """Patterns of absent slots to capture: none absent, and those declared.

    A slot that the settings switch off is absent from every batch, so its name adds nothing to a pattern. ConfigError
    where a pattern is no collection of names, or names what is no optional slot.
    """
    expected = "a list of patterns, each a collection of slots' names, such as [{'embeds'}, {'embeds', 'mask'}]"
    if not is_collection(absent) or not all(map(is_collection, absent)):
        refuse("absent", expected, absent)
    patterns = [frozenset(checked_names("absent", one)) - {*declaration.disabled} for one in absent]
    optional = [name for name, _ in declaration.optional]
    for name in sorted(frozenset().union(*patterns).difference(optional)):
        instead = hint(name, optional, f"optional are {', '.join(optional) or 'none'}")
        raise ConfigError(f"absent names {name!r}, which is no optional slot of {declaration.name}: {instead}")
    return {frozenset(), *patterns}
