"""The options that each runner uses: keywords beside its arguments, and the error for any other."""

import difflib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final, Required, TypedDict, get_args

import attrs

from ..backends.registry import name_of
from ..dataflow.errors import ConfigError
from .config import RunnerConfig
from .exclusive import Unique
from .modes import Wanted

_NEAR: Final = 0.7
"""How alike two options are of which one may have been meant for the other."""


class EagerOptions(TypedDict, total=False):
    """Of a runner that captures nothing."""

    no_copy: bool | None


class CaptureOptions(TypedDict, total=False):
    """Of every runner that captures."""

    buckets: tuple[int, ...] | list[int]
    max_batch: int
    max_waste: float
    warmups: int
    progress: bool
    debug: Wanted
    sharing: bool | None
    graphs: bool
    lowering: str
    lazy: bool
    error_mode: str | None


class DecodeOptions(CaptureOptions, total=False):
    """Of a runner whose buckets are requests of `width` tokens."""

    width: int


class StackOptions(CaptureOptions, total=False):
    """Of a runner whose buckets are tokens, up to `max_tokens`."""

    max_tokens: int


class ExtendOptions(CaptureOptions, total=False):
    """Of a runner over the `width` tokens that each request brings after a verify."""

    width: Required[int]


def config_of(kind: type, options: Mapping[str, Any]) -> RunnerConfig:
    """The configuration of a runner of this class from all its keywords, with every option that the class uses.

    Raises ConfigError for an option that it does not use, with the nearest name, and for a value of the wrong kind.
    """
    used = keywords_of(kind)
    for name in options:
        if name not in used:
            raise ConfigError(_refusal(kind, name))
    known = used.intersection(RunnerConfig.options())
    given = {name: value for name, value in options.items() if name in known}
    backend = name_of(options.get("backend", "auto"))
    return attrs.evolve(RunnerConfig.of({**given, "backend": backend}), told=known)


@functools.cache
def keywords_of(kind: type) -> frozenset[str]:
    """The keywords that a runner takes, its options among them, as its constructor's signature has them."""
    parameters = inspect.signature(kind).parameters.values()
    options = (get_args(one.annotation)[0] for one in parameters if one.kind is one.VAR_KEYWORD)
    named = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    return frozenset(named.union(*(one.__annotations__ for one in options)))


def _refusal(kind: type, name: str) -> str:
    """The error for a keyword that a runner does not take."""
    own, everyone = keywords_of(kind), {one.__name__: keywords_of(one) for one in _runners()}
    users = {
        known: sorted(runner for runner, used in everyone.items() if known in used)
        for known in own.union(*everyone.values())
    }
    if name in users:
        near = difflib.get_close_matches(name, sorted(own), n=1, cutoff=_NEAR)
        hint = f"did you mean {near[0]!r}?" if near else "leave it out"
        return f"{kind.__name__} does not use option {name!r}, which is one of {', '.join(users[name])}: {hint}"
    near = difflib.get_close_matches(name, sorted(users), n=1)
    if not near:
        return f"{kind.__name__}: unknown option {name!r}: known are {', '.join(sorted(own))}"
    foreign = "" if near[0] in own else f" {kind.__name__} does not use that one; {', '.join(users[near[0]])} do"
    return f"{kind.__name__}: unknown option {name!r}: did you mean {near[0]!r}?{foreign}"


def _runners(kind: type = Unique) -> Iterator[type]:
    """All classes of runners: those that take options."""
    if not inspect.isabstract(kind) and "options" in inspect.signature(kind).parameters:
        yield kind
    subclasses: list[type] = kind.__subclasses__()
    for one in subclasses:
        yield from _runners(one)
