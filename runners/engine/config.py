"""Arguments and options of runners: checks of them, buckets, and configurations from TOML or JSON."""

import bisect
import functools
import inspect
import json
import math
import os
import pathlib
import sys
import threading
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, Final, NoReturn, TypeAlias, get_args

import attrs
import numpy as np
import torch

from ...backends import name_of
from ...dataflow.axes import Axis, Dim
from ...dataflow.capabilities import AUTO, Capabilities, chosen_lowering
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, DeclarationError, did_you_mean, hint, kind_text
from ...dataflow.inputs import Inputs


def refuse(argument: str, expected: str, value: object) -> NoReturn:
    """Raise ConfigError for an argument of the wrong kind."""
    got = kind_text(value) if isinstance(value, type) else f"{value!r:.80} of type {kind_text(value)}"
    raise ConfigError(f"{argument}: expected {expected}, got {got}")


def checked(
    argument: str,
    expected: str,
    value: Any,
    kind: type | tuple[type, ...],
    least: float = -math.inf,
    most: float = math.inf,
) -> Any:
    """The value, of a kind, and a number within bounds. ConfigError where it is not; a bool is not a number."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not right or (isinstance(value, int | float) and not least <= value <= most):
        refuse(argument, expected, value)
    return value


def checked_keys(argument: str, expected: str, given: Any, kind: type) -> dict[Any, Any]:
    """A mapping whose keys are of a kind. ConfigError where it is none."""
    for key in checked(argument, expected, given, Mapping):
        checked(argument, expected, key, kind)
    return dict(given)


def is_collection(value: object) -> bool:
    """Whether it holds several values; a text is one, and so is a tensor or an array."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping | torch.Tensor | np.ndarray)


def declaration_of(inputs: Any) -> Declaration:
    """What a declaration class declares. ConfigError where it is not a subclass of Inputs."""
    if not (isinstance(inputs, type) and issubclass(inputs, Inputs) and inputs is not Inputs):
        refuse("inputs", "a declaration, a subclass of Inputs", inputs)
    declaration = vars(inputs).get("slotgraph")
    if not isinstance(declaration, Declaration):
        raise DeclarationError(
            f"{inputs.__name__} is no valid declaration: its class statement raised an error, or a base overrides "
            "__init_subclass__ and does not call super().__init_subclass__()"
        )
    return declaration


def check_step(argument: str, step: Any, takes: str = "the view") -> None:
    """ConfigError where a step cannot be called."""
    if not callable(step):
        refuse(argument, f"a function of {takes}", step)


def checked_sizes(sizes: Any, argument: str = "sizes") -> dict[Axis, int]:
    """Sizes by axis. ConfigError where one is not a whole number of at least 0, or its key no axis."""
    found = checked_keys(argument, "a mapping of axes to their sizes, such as {HIDDEN: 64}", sizes, Axis)
    for axis, size in found.items():
        checked(f"{argument} of {axis}", "a whole number, at least 0", size, int, 0)
    return found


def axis_text(axis: Any, known: Collection[Axis]) -> str:
    """An axis, or what came in its place, and the known axis that was meant, if one is near."""
    names = [one.name for one in known]
    if isinstance(axis, str) and axis in names:
        return f"{axis!r}: give the axis itself, {axis}, not its name"
    return f"{axis!r}{did_you_mean(axis, names)}"


def checked_relations(relations: Any) -> dict[Axis, Dim]:
    """Axes that follow from others. ConfigError where a key is not an axis, or its size no expression over axes."""
    expected, what = "a mapping of axes to sizes over others, such as {TOKENS: BATCH * 4}", "an expression over axes"
    found = checked_keys("relations", expected, {} if relations is None else relations, Axis)
    return {axis: Dim.of(checked(f"relations of {axis}", what, size, (Axis, Dim))) for axis, size in found.items()}


def checked_names(argument: str, names: Any) -> tuple[str, ...]:
    """Names of slots. ConfigError where it is one bare text, or not all are texts."""
    expected = "names of slots in a list or tuple"
    if not is_collection(names):
        refuse(argument, expected, names)
    return tuple(checked(argument, expected, name, str) for name in names)


def check_seconds(argument: str, seconds: Any) -> None:
    """ConfigError where it is not a number of seconds that a wait can take."""
    most = threading.TIMEOUT_MAX
    checked(argument, f"seconds, more than 0 and at most {most:g}", seconds, (int, float), sys.float_info.min, most)


def patterns_of(declaration: Declaration, absent: Any) -> set[frozenset[str]]:
    """Patterns of absent slots to capture: none absent, and those given, without slots that settings switch off."""
    expected = "a list of patterns, each a collection of slots' names, such as [{'embeds'}, {'embeds', 'mask'}]"
    if not is_collection(absent) or not all(map(is_collection, absent)):
        refuse("absent", expected, absent)
    patterns = [frozenset(checked_names("absent", one)) - {*declaration.disabled} for one in absent]
    declaration.check_names("absent", sorted(frozenset().union(*patterns)), "optional")
    return {frozenset(), *patterns}


MOST: Final = 1 << 24
"""Rows that a bucket may have: more are a slip of the keyboard."""
VARIABLE: Final = "SLOTGRAPH_DEBUG"
"""The environment variable that says which debug modes are on, where a runner is not told."""
GENERATIONS: Final = "generations"
ADDRESSES: Final = "addresses"
KEYS: Final = "keys"
POISON: Final = "poison"
PARITY: Final = "parity"
MODES: Final = (GENERATIONS, ADDRESSES, KEYS, POISON, PARITY)
"""Stale outputs; moved memory; keys that no slot reads; tails that reach live rows; graphs unlike their step."""
CHEAP: Final = frozenset({GENERATIONS, ADDRESSES, KEYS})
"""What `True` means: the modes that run no step a second time."""
Wanted: TypeAlias = bool | str | Collection[str] | None
_WORDS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}


def switch_of(variable: str, *, or_names: bool = False) -> bool | str:
    """Whether an environment variable is on: off where it is not set. or_names: hand out any other text as it is.

    ConfigError for a text that is neither 1, true, yes, on nor 0, false, no, off, in whatever case.
    """
    text = os.environ.get(variable, "").strip()
    found = _WORDS.get(text.lower(), text)
    if isinstance(found, bool) or or_names:
        return found
    raise ConfigError(f"{variable}={text!r:.80}: say 1, true, yes or on, else 0, false, no or off, or unset it")


def modes_of(wanted: Wanted) -> frozenset[str]:
    """The debug modes that are on: of a bool, of names, of one text with commas, or, for None, of the environment."""
    said = "option 'debug'"
    if wanted is None:
        said = VARIABLE
        wanted = switch_of(VARIABLE, or_names=True)
    if isinstance(wanted, bool):
        return CHEAP if wanted else frozenset()
    names: Any = wanted.split(",") if isinstance(wanted, str) else wanted
    if not is_collection(names) or not all(isinstance(name, str) for name in names):
        refuse(said, "true, false or names of debug modes", wanted)
    found = frozenset(name.strip() for name in names) - {""}
    for name in sorted(found.difference(MODES)):
        instead = hint(name, MODES, f"modes are {', '.join(MODES)}")
        raise ConfigError(f"{said}: unknown debug mode {name!r}: {instead}")
    return found


def _option(kind: type, default: Any, least: float = -math.inf, most: float = math.inf) -> Any:
    """An option of a kind, or a number between two bounds; it may be None if that is its default."""
    bounds = f", at least {least}" * (most == math.inf) or f" between {least} and {most}"
    expected = kind.__name__ + bounds * (least > -math.inf)

    def check(_: object, field: Any, value: Any) -> None:
        if value is not None or default is not None:
            checked(f"option {field.name!r}", expected, value, (int, float) if kind is float else kind, least, most)

    return attrs.field(default=default, validator=check)


def _one_of(*words: str) -> Any:
    """An option that is one of some words; by default the first."""

    def check(_: object, field: Any, value: Any) -> None:
        if value not in words:
            refuse(f"option {field.name!r}", " or ".join(map(repr, words)), value)

    return attrs.field(default=words[0], validator=check)


def _rows(value: Any) -> tuple[int, ...]:
    """Buckets in ascending order."""
    several = isinstance(value, list | tuple | set | frozenset | range) and len(value) > 0
    if not several or not all(type(one) is int and 1 <= one <= MOST for one in value) or len({*value}) < len(value):
        expected = f"a list or tuple of at least one int between 1 and {MOST}, each once"
        refuse("option 'buckets'", expected, value)
    return tuple(sorted(value))


@attrs.frozen
class Buckets:
    """Padded row counts in ascending order, and the largest share of padding that is worth a replay.

    max_waste: a batch of which more than this share of the padded rows would be padding runs eagerly.
    """

    sizes: tuple[int, ...] = attrs.field(converter=_rows)
    max_waste: float = _option(float, 1.0, 0, 1)

    @classmethod
    def ladder(cls, largest: int, max_waste: float = 1.0) -> "Buckets":
        """A default ladder up to `largest` rows: powers of two to 8, then by 8 to 256, by 16 to 512, by 32 beyond."""
        steps = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, largest, 32))
        return cls({largest, *(size for size in steps if size < largest)}, max_waste)

    @classmethod
    def doubling(cls, largest: int, max_waste: float = 1.0) -> "Buckets":
        """Buckets for tokens: 16, 32, then two for each power of two (48 and 64, 96 and 128, ...) up to `largest`.

        At most a third of a batch of more than 16 tokens is padding; a graph of many tokens is dear to keep.
        """
        powers = [1 << power for power in range(5, max(largest, 1).bit_length())]
        steps = {16, *powers, *(power * 3 // 2 for power in powers)}
        return cls({largest, *(size for size in steps if size < largest)}, max_waste)

    @property
    def largest(self) -> int:
        """The largest bucket."""
        return self.sizes[-1]

    def fit(self, rows: int) -> int | None:
        """The smallest bucket that holds `rows`, or None where none does; no rows go to the smallest."""
        index = bisect.bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def waste(self, rows: int, bucket: int) -> float:
        """The share of a bucket's rows that would be padding; none for the batch of an idle rank, which has no rows."""
        return (bucket - rows) / bucket if rows else 0.0


def json_data(text: str) -> Any:
    """What a JSON text says; ValueError for what is none, for NaN and infinity, and for what is nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number in JSON")


@attrs.frozen(kw_only=True)
class RunnerConfig:
    """How a runner runs: options of which each runner uses some, and refuses the others.

    backend: a backend's name, or "auto". buckets: padded request counts to capture; a default ladder up to
    `max_batch` where none are given; of a prefill runner token counts, up to `max_tokens`, for `max_batch` requests
    at most. max_waste: the largest share of padding worth a replay. width: tokens a request has in each step.
    warmups: runs before each capture. progress: whether capture may show a bar (on a terminal only). debug: modes of
    debugging, by name, or True for those that run no step twice; None asks the environment, SLOTGRAPH_DEBUG. no_copy:
    an eager runner hands the batch through; None asks the environment, SLOTGRAPH_EAGER_NO_COPY. sharing: whether a
    runner shares input memory with others of its pool; None for what the backend's record says. graphs: whether steps
    are captured at all; without, nothing is, and all run eagerly. lowering: how fills are run, one of the backend's
    `lowerings`, or "auto" for the first of them. lazy: capture a bucket when the first batch comes for it. error_mode:
    the mode that captures run in, one of the backend's `capture_error_modes`; None for its default. outputs: "view" for
    the graph's own memory, which the next step overwrites, or "copy" for tensors that are the caller's own. told:
    options that `as_data` gives even where they are the default: those that a mapping or file named, or that a runner
    uses.
    A runner takes them as keywords: `DecodeRunner(Inputs, step, **RunnerConfig.load("runner.toml").as_data())`.
    ConfigError names the option, what was expected and what came; nothing is converted.
    """

    backend: str = _option(str, AUTO)
    buckets: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_rows))
    max_batch: int = _option(int, 32, 1, MOST)
    max_tokens: int = _option(int, 2048, 1, MOST)
    max_waste: float = _option(float, 1.0, 0, 1)
    width: int = _option(int, 1, 1, MOST)
    warmups: int = _option(int, 1, 0)
    progress: bool = _option(bool, default=True)
    debug: frozenset[str] | None = attrs.field(default=None, converter=attrs.converters.optional(modes_of))
    no_copy: bool | None = _option(bool, None)
    sharing: bool | None = _option(bool, None)
    graphs: bool = _option(bool, default=True)
    lowering: str = _option(str, AUTO)
    lazy: bool = _option(bool, default=False)
    error_mode: str | None = _option(str, None)
    outputs: str = _one_of("view", "copy")
    told: frozenset[str] = attrs.field(default=frozenset(), eq=False, repr=False)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "RunnerConfig":
        """Check a mapping's keys and values. ConfigError names the nearest known key, or all values that are wrong."""
        known, faults = cls.options(), list[str]()
        for key, value in checked("options", "a mapping of options", options, Mapping).items():
            if key not in known:
                raise ConfigError(f"unknown option {key!r}: {hint(str(key), known, 'known are ' + ', '.join(known))}")
            try:
                cls(**{key: value})
            except ConfigError as error:
                faults.append(str(error))
        if faults:
            raise ConfigError("; ".join(faults))
        return cls(**options, told=frozenset(options))

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(field.name for field in attrs.fields(cls) if field.name != "told")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RunnerConfig":
        """Read a `.toml` or `.json` file. ConfigError where it cannot be read, does not parse or has unknown keys."""
        file = pathlib.Path(checked("path", "the path of a .toml or .json file", path, (str, os.PathLike)))
        readers: dict[str, Any] = {".toml": tomllib.loads, ".json": json_data}
        read = readers.get(file.suffix)
        if read is None:
            raise ConfigError(f"{file.name}: configuration is a .toml or .json file")
        try:
            data = read(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file.name}: {error}") from error
        return cls.of(checked(file.name, "keys and values", data, dict))

    def as_data(self) -> dict[str, Any]:
        """Plain data that `of` reads back, for TOML or JSON, without defaults that no mapping or file named."""
        default = RunnerConfig()
        values = {name: getattr(self, name) for name in self.options()}
        return {
            name: sorted(value) if isinstance(value, tuple | frozenset) else value
            for name, value in values.items()
            if value is not None and (name in self.told or value != getattr(default, name))
        }

    def check(self, capabilities: Capabilities) -> None:
        """ConfigError where the device has no such lowering or error mode, or the environment names no debug mode."""
        chosen_lowering(capabilities, self.lowering)
        known = capabilities.capture_error_modes
        if self.error_mode is not None and self.error_mode not in known:
            modes = f"this backend has {', '.join(known)}" if known else "this backend has none: leave it out"
            raise ConfigError(f"error_mode {self.error_mode!r}: {modes}{did_you_mean(self.error_mode, known)}")
        _ = self.modes

    @property
    def modes(self) -> frozenset[str]:
        """The modes of debugging that are on. ConfigError where the environment names an unknown one."""
        return modes_of(None) if self.debug is None else self.debug

    def ladder(self, *, of_tokens: bool = False) -> Buckets:
        """The buckets that were given, or the default ones."""
        if self.buckets:
            return Buckets(self.buckets, self.max_waste)
        make, largest = (Buckets.doubling, self.max_tokens) if of_tokens else (Buckets.ladder, self.max_batch)
        return make(largest, self.max_waste)


def config_of(kind: type, options: Mapping[str, Any]) -> RunnerConfig:
    """The configuration of a runner of this class from all its keywords, with every option that the class uses."""
    used, every = keywords_of(kind), RunnerConfig.options()
    for name in sorted(options.keys() - used):
        if name in every:
            raise ConfigError(f"{kind.__name__} does not use option {name!r}: leave it out")
        instead = hint(name, {*used, *every}, f"known are {', '.join(sorted(used))}")
        raise ConfigError(f"{kind.__name__}: unknown option {name!r}: {instead}")
    known = used.intersection(every)
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
