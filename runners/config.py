"""A runner's configuration: from Python, TOML or JSON, with every key and type checked."""

import difflib
import json
import math
import pathlib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import attrs
import cattrs
from cattrs.errors import ClassValidationError
from cattrs.v import format_exception

from ..dataflow.capabilities import AUTO
from ..dataflow.errors import ConfigError
from .buckets import Buckets


class Options(TypedDict, total=False):
    """A runner's keywords beside `backend`, for type checkers; the same as the fields of `RunnerConfig`."""

    buckets: tuple[int, ...] | list[int]
    max_batch: int
    max_tokens: int
    max_waste: float
    width: int
    warmups: int
    progress: bool
    debug: bool
    no_copy: bool | None
    sharing: bool
    graphs: bool
    lowering: str
    lazy: bool
    error_mode: str | None


def _within(least: float, most: float = math.inf) -> Callable[[Any, Any, Any], None]:
    """A validator for a number, or each of several, between two bounds."""

    def check(_: Any, field: Any, value: Any) -> None:
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(least <= number <= most for number in numbers):
            bounds = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            message = f"option {field.name!r}: expected {bounds}, got {value!r}"
            raise ConfigError(message)

    return check


@attrs.frozen(kw_only=True)
class RunnerConfig:
    """How a runner runs.

    backend: a backend's name, or "auto". buckets: padded request counts to capture; a default ladder up to
    `max_batch` where none are given; of a prefill runner token counts, up to `max_tokens`, for `max_batch` requests
    at most. max_waste: the largest share of padding worth a replay. width: tokens a request has in each step.
    warmups: runs before each capture. progress: whether capture may show a bar (on a terminal only). debug: catch
    stale outputs and moved addresses at each replay. no_copy: an eager runner hands the batch through; None asks
    the environment, SLOTGRAPH_EAGER_NO_COPY=1. sharing: whether runners may share input buffers, where the backend
    can (none does so yet in this release). graphs: whether steps are captured at all; without, nothing is, and all
    run eagerly. lowering: how fills are run, one of the backend's `lowerings`, or "auto" for the first of them.
    lazy: capture a bucket when the first batch comes for it. error_mode: the mode that captures run in, one of the
    backend's `capture_error_modes`; None for its default.
    A runner takes them as keywords: `DecodeRunner(Inputs, step, **RunnerConfig.load("runner.toml").as_data())`.
    """

    backend: str = "auto"
    buckets: tuple[int, ...] = attrs.field(default=(), validator=_within(1))
    max_batch: int = attrs.field(default=32, validator=_within(1))
    max_tokens: int = attrs.field(default=2048, validator=_within(1))
    max_waste: float = attrs.field(default=1.0, validator=_within(0, 1))
    width: int = attrs.field(default=1, validator=_within(1))
    warmups: int = attrs.field(default=1, validator=_within(0))
    progress: bool = True
    debug: bool = False
    no_copy: bool | None = None
    sharing: bool = True
    graphs: bool = True
    lowering: str = AUTO
    lazy: bool = False
    error_mode: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "RunnerConfig":
        """Check a mapping's keys and types. ConfigError names the nearest known key, or the value and its type."""
        known = [field.name for field in attrs.fields(cls)]
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                message = f"unknown option {key!r}: {hint}"
                raise ConfigError(message)
        try:
            return _CONVERTER.structure(options, cls)
        except ClassValidationError as group:
            raise ConfigError("; ".join(cattrs.transform_error(group, format_exception=_fault))) from group

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "RunnerConfig":
        """Read a `.toml` or `.json` file. ConfigError where it does not parse or has unknown keys."""
        file = pathlib.Path(path)
        read = {".toml": tomllib.loads, ".json": json.loads}.get(file.suffix)
        if read is None:
            message = f"{file.name}: configuration is a .toml or .json file"
            raise ConfigError(message)
        try:
            data = read(file.read_text(encoding="utf-8"))
        except ValueError as error:
            message = f"{file.name}: {error}"
            raise ConfigError(message) from error
        if not isinstance(data, dict):
            message = f"{file.name}: expected keys and values, got {type(data).__name__}"
            raise ConfigError(message)
        return cls.of(data)

    def as_data(self) -> dict[str, Any]:
        """Plain data that `of` reads back, for TOML or JSON."""
        data: dict[str, Any] = _CONVERTER.unstructure(self)
        return {key: value for key, value in data.items() if value is not None}

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
    return converter


_CONVERTER = _converter()
