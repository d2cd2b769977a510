"""A runner's configuration: from Python, TOML or JSON, with every key and type checked."""

import difflib
import math
import pathlib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import cattrs
from cattrs.errors import ClassValidationError
from cattrs.v import format_exception

from ..dataflow.capabilities import AUTO, Capabilities, chosen_lowering
from ..dataflow.errors import ConfigError
from ..dataflow.serial import json_data
from .buckets import Buckets
from .modes import modes_of

MOST: Final = 1 << 24
"""Rows that a configuration may ask for: a runner has a table over as many, which a slip of the keyboard would fill."""


def _within(least: float, most: float = math.inf) -> Callable[[Any, Any, Any], None]:
    """A validator for a number, or each of several, between two bounds."""

    def check(_: Any, field: Any, value: Any) -> None:
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(least <= number <= most for number in numbers):
            bounds = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            message = f"option {field.name!r}: expected {bounds}, got {value!r}"
            raise ConfigError(message)

    return check


def _no_duplicates(_: Any, field: Any, value: tuple[int, ...]) -> None:
    """A validator for numbers that each say something."""
    twice = sorted({one for one in value if value.count(one) > 1})
    if twice:
        message = f"option {field.name!r}: {twice[0]} is given twice: give each once"
        raise ConfigError(message)


def _known_modes(_: Any, field: Any, value: Any) -> None:
    """A validator for names of debug modes; what the environment says is looked at when a runner is made."""
    del field
    if value is not None:
        modes_of(value)


@attrs.frozen(kw_only=True)
class RunnerConfig:
    """How a runner runs: options of which each runner uses some, and refuses the others.

    backend: a backend's name, or "auto". buckets: padded request counts to capture; a default ladder up to
    `max_batch` where none are given; of a prefill runner token counts, up to `max_tokens`, for `max_batch` requests
    at most. max_waste: the largest share of padding worth a replay. width: tokens a request has in each step.
    warmups: runs before each capture. progress: whether capture may show a bar (on a terminal only). debug: modes of
    debugging, by name, or True for those that run no step twice; None asks the environment, SLOTGRAPH_DEBUG. no_copy:
    an eager runner hands the batch through; None asks the environment, SLOTGRAPH_EAGER_NO_COPY=1. sharing: whether a
    runner shares input memory with others of its pool; None for what the backend's record says. graphs: whether steps
    are captured at all; without, nothing is, and all run eagerly. lowering: how fills are run, one of the backend's
    `lowerings`, or "auto" for the first of them. lazy: capture a bucket when the first batch comes for it. error_mode:
    the mode that captures run in, one of the backend's `capture_error_modes`; None for its default. told: options that
    `as_data` gives even where they are the default: those that a mapping or file named, or that a runner uses.
    A runner takes them as keywords: `DecodeRunner(Inputs, step, **RunnerConfig.load("runner.toml").as_data())`.
    """

    backend: str = "auto"
    buckets: tuple[int, ...] = attrs.field(default=(), validator=[_within(1, MOST), _no_duplicates])
    max_batch: int = attrs.field(default=32, validator=_within(1, MOST))
    max_tokens: int = attrs.field(default=2048, validator=_within(1, MOST))
    max_waste: float = attrs.field(default=1.0, validator=_within(0, 1))
    width: int = attrs.field(default=1, validator=_within(1, MOST))
    warmups: int = attrs.field(default=1, validator=_within(0))
    progress: bool = True
    debug: bool | str | tuple[str, ...] | None = attrs.field(default=None, validator=_known_modes)
    no_copy: bool | None = None
    sharing: bool | None = None
    graphs: bool = True
    lowering: str = AUTO
    lazy: bool = False
    error_mode: str | None = None
    told: frozenset[str] = attrs.field(default=frozenset(), eq=False, repr=False)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "RunnerConfig":
        """Check a mapping's keys and types. ConfigError names the nearest known key, or the value and its type."""
        known = cls.options()
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                message = f"unknown option {key!r}: {hint}"
                raise ConfigError(message)
        try:
            return attrs.evolve(_CONVERTER.structure(options, cls), told=frozenset(options))
        except ClassValidationError as group:
            raise ConfigError("; ".join(cattrs.transform_error(group, format_exception=_fault))) from group

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(field.name for field in attrs.fields(cls) if field.name != "told")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "RunnerConfig":
        """Read a `.toml` or `.json` file. ConfigError where it cannot be read, does not parse or has unknown keys."""
        file = pathlib.Path(path)
        readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json_data}
        read = readers.get(file.suffix)
        if read is None:
            message = f"{file.name}: configuration is a .toml or .json file"
            raise ConfigError(message)
        try:
            data = read(file.read_text(encoding="utf-8"))
        except RecursionError as error:
            message = f"{file.name}: it is nested too deeply"
            raise ConfigError(message) from error
        except (OSError, ValueError) as error:
            message = f"{file.name}: {error}"
            raise ConfigError(message) from error
        if not isinstance(data, dict):
            message = f"{file.name}: expected keys and values, got {type(data).__name__}"
            raise ConfigError(message)
        return cls.of(data)

    def as_data(self) -> dict[str, Any]:
        """Plain data that `of` reads back, for TOML or JSON, without defaults that no mapping or file named."""
        data: dict[str, Any] = _CONVERTER.unstructure(self)
        default = _CONVERTER.unstructure(RunnerConfig())
        wanted = [key for key in self.options() if key in self.told or data[key] != default[key]]
        unset: dict[str, Any] = {"buckets": ()}  # what an option that was not given has, where that is not None
        return {key: data[key] for key in wanted if getattr(self, key) != unset.get(key)}

    def check(self, capabilities: Capabilities) -> None:
        """ConfigError where the device has no such lowering or error mode, or the environment names no debug mode."""
        chosen_lowering(capabilities, self.lowering)
        known = capabilities.capture_error_modes
        if self.error_mode is not None and self.error_mode not in known:
            modes = f"this backend has {', '.join(known)}" if known else "this backend has none: leave it out"
            message = f"error_mode {self.error_mode!r}: {modes}"
            raise ConfigError(message)
        _ = self.modes

    @property
    def modes(self) -> frozenset[str]:
        """The modes of debugging that are on. ConfigError where the environment names an unknown one."""
        return modes_of(self.debug)

    def ladder(self) -> Buckets:
        """The buckets that were given, or the default ladder."""
        if self.buckets:
            return Buckets(self.buckets, self.max_waste)
        return Buckets.ladder(self.max_batch, self.max_waste)

    def token_ladder(self) -> Buckets:
        """The buckets that were given, or the default ones for tokens."""
        if self.buckets:
            return Buckets(self.buckets, self.max_waste)
        return Buckets.doubling(self.max_tokens, self.max_waste)


def _fault(error: BaseException, kind: type | None) -> str:
    """A fault as cattrs words it, and ours, which name the option, in our own words."""
    return str(error) if isinstance(error, ConfigError) else format_exception(error, kind)


def _strict(kind: type) -> Any:
    """A structure hook that takes a kind of value as it is and converts nothing."""
    taken = (int, float) if kind is float else kind

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
            message = f"expected {kind.__name__}, got {value!r}"
            raise ConfigError(message)
        return value

    return hook


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (int, float, bool, str):
        converter.register_structure_hook(kind, _strict(kind))
    converter.register_structure_hook_func(lambda kind: kind == tuple[int, ...], _numbers)
    converter.register_structure_hook(bool | str | tuple[str, ...] | None, _wanted)
    return converter


def _numbers(value: Any, _: Any) -> tuple[int, ...]:
    """Whole numbers, at least one of them."""
    if not isinstance(value, list | tuple | set | frozenset | range) or not value:
        message = f"expected a list or tuple of at least one int, got {value!r}: leave it out for the default"
        raise ConfigError(message)
    strict = _strict(int)
    return tuple(strict(one, int) for one in value)


def _wanted(value: Any, _: Any) -> Any:
    """Debug modes as they were said, several as a tuple."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple | set | frozenset) and all(isinstance(one, str) for one in value):
        return tuple(sorted(value) if isinstance(value, set | frozenset) else value)
    message = f"expected true, false or names of debug modes, got {value!r}"
    raise ConfigError(message)


_CONVERTER = _converter()
