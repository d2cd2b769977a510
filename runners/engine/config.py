"""Arguments and options of runners: checks of them, buckets, and configurations from TOML or JSON."""

import bisect
import functools
import inspect
import itertools
import json
import math
import os
import pathlib
import sys
import threading
import tomllib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NoReturn, TypeAlias, get_args

import attrs
import numpy as np
import torch

from ...backends import name_of
from ...dataflow import environment
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
    """Return the value if it is of the kind and, if a number, within the bounds. Else raise ConfigError.

    A bool is not a number.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not right or (isinstance(value, int | float) and not least <= value <= most):
        refuse(argument, expected, value)
    return value


def checked_keys(argument: str, expected: str, given: Any, kind: type) -> dict[Any, Any]:
    """Return a mapping as a dict. Raise ConfigError if it is no mapping, or a key is not of the kind."""
    for key in checked(argument, expected, given, Mapping):
        checked(argument, expected, key, kind)
    return dict(given)


def is_collection(value: object) -> bool:
    """Return whether a value holds several values. A text, a mapping, a tensor and an array do not count."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping | torch.Tensor | np.ndarray)


def declaration_of(inputs: Any) -> Declaration:
    """Return what a declaration class declares. Raise ConfigError if it is not a subclass of Inputs."""
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
    """Raise ConfigError if a step cannot be called, or is a class, a coroutine or a generator."""
    if not callable(step) or isinstance(step, type):
        refuse(argument, f"a function of {takes}", step)
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        raise ConfigError(f"{argument}: expected a function that returns its value, not a coroutine or a generator")


def checked_sizes(sizes: Any, argument: str = "sizes") -> dict[Axis, int]:
    """Return sizes by axis. Raise ConfigError if a key is no axis, or a size is not a whole number of at least 0."""
    found = checked_keys(argument, "a mapping of axes to their sizes, such as {HIDDEN: 64}", sizes, Axis)
    for axis, size in found.items():
        checked(f"{argument} of {axis}", "a whole number, at least 0", size, int, 0)
    return found


def axis_text(axis: Any, known: Collection[Axis]) -> str:
    """Return an axis, or a value that is none, as text. Add the known axis that was probably meant."""
    names = [one.name for one in known]
    if isinstance(axis, str) and axis in names:
        return f"{axis!r}: give the axis itself, {axis}, not its name"
    return f"{axis!r}{did_you_mean(axis, names)}"


def checked_relations(relations: Any) -> dict[Axis, Dim]:
    """Return axes that follow from others.

    Raise ConfigError if a key is not an axis, or its size is not an expression over axes.
    """
    expected = "a mapping of axes to sizes over others, such as {TOKENS: BATCH * 4}"
    what = "an expression over axes"
    found = checked_keys("relations", expected, {} if relations is None else relations, Axis)
    return {axis: Dim.of(checked(f"relations of {axis}", what, size, (Axis, Dim))) for axis, size in found.items()}


def checked_names(argument: str, names: Any) -> tuple[str, ...]:
    """Return names of slots. Raise ConfigError for one bare text, or if not all are texts."""
    expected = "names of slots in a list or tuple"
    if not is_collection(names):
        refuse(argument, expected, names)
    return tuple(checked(argument, expected, name, str) for name in names)


def checked_state(state: Any) -> tuple[torch.Tensor, ...] | None:
    """Return tensors that a step changes besides its slots, or None to find them. Raise ConfigError for others."""
    if state is None:
        return None
    is_list = isinstance(state, Iterable) and not isinstance(state, str | torch.Tensor)
    tensors: list[Any] = [*state] if is_list else [None]
    if not all(isinstance(one, torch.Tensor) for one in tensors):
        refuse("state", "a list of the tensors that the step changes besides its slots", state)
    return tuple(tensors)


def check_seconds(argument: str, seconds: Any) -> None:
    """Raise ConfigError if a value is not a number of seconds that a wait can take."""
    most = threading.TIMEOUT_MAX
    checked(argument, f"seconds, more than 0 and at most {most:g}", seconds, (int, float), sys.float_info.min, most)


def patterns_of(declaration: Declaration, absent: Any) -> set[frozenset[str]]:
    """Return the patterns of absent slots to capture: no slot absent, and each given pattern.

    Slots that settings switch off are left out of the patterns.
    """
    expected = "a list of patterns, each a collection of slots' names, such as [{'embeds'}, {'embeds', 'mask'}]"
    if not is_collection(absent) or not all(map(is_collection, absent)):
        refuse("absent", expected, absent)
    patterns = [frozenset(checked_names("absent", one)) - {*declaration.disabled} for one in absent]
    declaration.check_names("absent", sorted(frozenset().union(*patterns)), "optional")
    return {frozenset(), *patterns}


MOST_ROWS: Final = 1 << 24
"""The most rows of a bucket: a larger number is taken for a typing error."""
GENERATIONS: Final = "generations"
ADDRESSES: Final = "addresses"
KEYS: Final = "keys"
POISON: Final = "poison"
PARITY: Final = "parity"
MODES: Final = (GENERATIONS, ADDRESSES, KEYS, POISON, PARITY)
"""Debug modes, by what they find.

In this order: stale outputs, moved memory, keys that no slot reads, tails that reach live rows, and graphs that differ
from their step.
"""
CHEAP: Final = frozenset({GENERATIONS, ADDRESSES, KEYS})
"""The modes that `True` selects: those that run no step twice."""
Wanted: TypeAlias = bool | str | Collection[str] | None


def modes_of(wanted: Wanted) -> frozenset[str]:
    """Return the debug modes that a bool, names, or one text with commas selects. None reads the environment."""
    source = "option 'debug'"
    if wanted is None:
        source = environment.DEBUG
        wanted = environment.switch_of(source, or_names=True)
    if isinstance(wanted, bool):
        return CHEAP if wanted else frozenset()
    names: Any = wanted.split(",") if isinstance(wanted, str) else wanted
    if not is_collection(names) or not all(isinstance(name, str) for name in names):
        refuse(source, "true, false or names of debug modes", wanted)
    found = frozenset(name.strip() for name in names) - {""}
    for name in sorted(found.difference(MODES)):
        instead = hint(name, MODES, f"modes are {', '.join(MODES)}")
        raise ConfigError(f"{source}: unknown debug mode {name!r}: {instead}")
    return found


def _option(kind: type, default: Any, least: float = -math.inf, most: float = math.inf) -> Any:
    """Make an option of a kind, or a number between two bounds. It may be None if that is its default."""
    bounds = f", at least {least}" * (most == math.inf) or f" between {least} and {most}"
    expected = kind.__name__ + bounds * (least > -math.inf)

    def check(_: object, field: Any, value: Any) -> None:
        if value is not None or default is not None:
            checked(f"option {field.name!r}", expected, value, (int, float) if kind is float else kind, least, most)

    return attrs.field(default=default, validator=check)


def _check_outputs(_: object, field: Any, value: Any) -> None:
    if value not in ("view", "copy"):
        refuse(f"option {field.name!r}", "'view' or 'copy'", value)


def _rows(value: Any, argument: str = "option 'buckets'") -> tuple[int, ...]:
    """Return buckets in ascending order."""
    several = isinstance(value, list | tuple | set | frozenset | range) and len(value) > 0
    if (
        not several
        or not all(type(one) is int and 1 <= one <= MOST_ROWS for one in value)
        or len({*value}) < len(value)
    ):
        expected = f"a list or tuple of at least one int between 1 and {MOST_ROWS}, each once"
        refuse(argument, expected, value)
    return tuple(sorted(value))


def _buckets(value: Any) -> tuple[int, ...] | tuple[dict[str, int], ...]:
    """Return buckets of rows, or those that a mapping of axes to sizes, or a list of such mappings, describes."""
    if isinstance(value, Mapping):
        return _grid(value)
    if not is_collection(value) or not any(isinstance(one, Mapping) for one in value):
        return _rows(value)
    found = [bucket for one in value for bucket in _grid(one, one_each=True)]
    known = {frozenset(one.items()) for one in found}
    if len(known) < len(found) or any(one.keys() != found[0].keys() for one in found):
        refuse("option 'buckets'", "sizes on the same axes for each bucket, and each bucket once", value)
    return tuple(found)


def _grid(value: Any, *, one_each: bool = False) -> tuple[dict[str, int], ...]:
    """Return all combinations of sizes in a mapping of axes, or of their names, that has one size of each or several.

    Raise ConfigError if it is none, or names an axis twice.
    """
    expected = "a mapping of at least one axis, each once, such as {BATCH: [1, 2, 4], KV: [1024, 8192]}"
    given = checked("option 'buckets'", expected, value, Mapping)
    ladders = dict[str, tuple[int, ...]]()
    for axis, sizes in given.items():
        name = checked("option 'buckets'", expected, getattr(axis, "name", axis), str)
        ladders[name] = _rows([sizes] if one_each else sizes, f"option 'buckets' of {name}")
    if not given or len(ladders) < len(given):
        refuse("option 'buckets'", expected, value)
    return tuple(dict(zip(ladders, sizes, strict=True)) for sizes in itertools.product(*ladders.values()))


@attrs.frozen
class Buckets:
    """Padded row counts in ascending order, and the largest share of padding that is worth a replay.

    Attributes:
        sizes: The row counts.
        max_waste: A batch runs eagerly if padding would be more than this share of the padded rows.
    """

    sizes: tuple[int, ...] = attrs.field(converter=_rows)
    max_waste: float = _option(float, 1.0, 0, 1)

    @classmethod
    def ladder(cls, largest: int, max_waste: float = 1.0) -> "Buckets":
        """Make a default ladder up to `largest` rows.

        It has powers of two to 8, then steps of 8 to 256, of 16 to 512, and of 32 beyond.
        """
        steps = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, largest, 32))
        return cls({largest, *(size for size in steps if size < largest)}, max_waste)

    @classmethod
    def doubling(cls, largest: int, max_waste: float = 1.0) -> "Buckets":
        """Make buckets for tokens: 16, 32, then two for each power of two (48 and 64, 96 and 128, ...) up to `largest`.

        At most a third of a batch of more than 16 tokens is padding. There are few, because a graph of many tokens
        takes much memory.
        """
        powers = [1 << power for power in range(5, max(largest, 1).bit_length())]
        steps = {16, *powers, *(power * 3 // 2 for power in powers)}
        return cls({largest, *(size for size in steps if size < largest)}, max_waste)

    @property
    def largest(self) -> int:
        """The largest bucket."""
        return self.sizes[-1]

    def fit(self, rows: int) -> int | None:
        """Return the smallest bucket that holds `rows`, or None if none does. No rows go to the smallest."""
        index = bisect.bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    @staticmethod
    def waste(rows: int, bucket: int) -> float:
        """Return the share of a bucket's rows that would be padding.

        It is 0 for an idle rank's batch, which has no rows.
        """
        return (bucket - rows) / bucket if rows else 0.0


def json_data(text: str) -> Any:
    """Parse a JSON text. Raise ValueError if it is invalid, has NaN or infinity, or is nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number in JSON")


@attrs.frozen(kw_only=True)
class RunnerConfig:
    """Options of runners, for `config=`: `DecodeRunner(Inputs, step, config=RunnerConfig.load("runner.toml"))`.

    Runners of different classes may share one: each takes the options that it uses, and ignores the others. Keywords
    beside `config=` win, and must be options that the runner uses.

    Attributes:
        backend: A backend's name, or "auto" for the one that SLOTGRAPH_BACKEND names, or the best that can run here.
        buckets: Padded request counts to capture, or None for a default ladder up to `max_batch`. For a prefill runner
            they are token counts, up to `max_tokens`, with at most `max_batch` requests. For a `GraphRunner` they are a
            mapping of axes, or of their names, to padded sizes, or a list of mappings with one size for each axis.
        max_batch: The largest number of requests in a captured step.
        max_tokens: The largest number of tokens in a captured step of a prefill runner.
        max_waste: The largest share of padding worth a replay.
        width: Tokens that a request has in each step.
        warmups: Runs before each capture.
        progress: Whether capture may show a bar (on a terminal only).
        debug: Debug modes by name, or True for those that run no step twice. None reads the environment,
            SLOTGRAPH_DEBUG.
        no_copy: Whether an eager runner passes the batch's own tensors to the step. None reads the environment,
            SLOTGRAPH_EAGER_NO_COPY.
        sharing: Whether a runner shares input memory with others of its pool. None takes what the backend's record
            says.
        graphs: Whether steps are captured at all. If not, all run eagerly.
        lowering: How fills are run: one of the backend's `lowerings`, or "auto" for the one that SLOTGRAPH_LOWERING
            names, or the first of them.
        compile_computed: Whether the functions of computed slots in a graph are compiled as one by torch.compile. None
            compiles those that make only whole numbers, if the backend's record says so. True also compiles others,
            which may round otherwise.
        lazy: Whether a bucket is captured when the first batch comes for it.
        error_mode: The mode of captures, one of the backend's `capture_error_modes`. None takes its default.
        outputs: "view" for the graph's own memory, which the next step overwrites, or "copy" for tensors of the
            caller's.
        named: Options that `as_data` returns even if they have their default: those that a mapping or file named, or
            that a runner uses.

    Raises:
        ConfigError: An option has a wrong value. The message names it, what was expected and what was given. Nothing is
            converted.
    """

    backend: str = _option(str, AUTO)
    buckets: tuple[int, ...] | tuple[dict[str, int], ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_buckets)
    )
    max_batch: int = _option(int, 32, 1, MOST_ROWS)
    max_tokens: int = _option(int, 2048, 1, MOST_ROWS)
    max_waste: float = _option(float, 1.0, 0, 1)
    width: int = _option(int, 1, 1, MOST_ROWS)
    warmups: int = _option(int, 1, 0)
    progress: bool = _option(bool, default=True)
    debug: frozenset[str] | None = attrs.field(default=None, converter=attrs.converters.optional(modes_of))
    no_copy: bool | None = _option(bool, None)
    sharing: bool | None = _option(bool, None)
    graphs: bool = _option(bool, default=True)
    lowering: str = _option(str, AUTO)
    compile_computed: bool | None = _option(bool, None)
    lazy: bool = _option(bool, default=False)
    error_mode: str | None = _option(str, None)
    outputs: str = attrs.field(default="view", validator=_check_outputs)
    named: frozenset[str] = attrs.field(default=frozenset(), eq=False, repr=False)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "RunnerConfig":
        """Make a configuration from a mapping.

        Raise ConfigError for an unknown key, or naming all values that are wrong.
        """
        known = cls.options()
        faults = list[str]()
        for key, value in checked("options", "a mapping of options", options, Mapping).items():
            if key not in known:
                raise ConfigError(f"unknown option {key!r}: {hint(str(key), known, 'known are ' + ', '.join(known))}")
            try:
                cls(**{key: value})
            except ConfigError as error:
                faults.append(str(error))
        if faults:
            raise ConfigError("; ".join(faults))
        return cls(**options, named=frozenset(options))

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(field.name for field in attrs.fields(cls) if field.name != "named")

    @classmethod
    def load(cls, path: str | os.PathLike[str], table: str = "") -> "RunnerConfig":
        """Read a `.toml` or `.json` file.

        Args:
            path: The file.
            table: The table that has the options, such as "tool.slotgraph", if the file has other tables, too. By
                default the file has options alone.

        Raises:
            ConfigError: It cannot be read or parsed, or it has no such table, unknown keys, or wrong values.
        """
        file = pathlib.Path(checked("path", "the path of a .toml or .json file", path, (str, os.PathLike)))
        readers: dict[str, Any] = {".toml": tomllib.loads, ".json": json_data}
        read = readers.get(file.suffix)
        if read is None:
            raise ConfigError(f"{file.name}: configuration is a .toml or .json file")
        checked("table", "a name, such as 'tool.slotgraph'", table, str)
        try:
            data = read(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file.name}: {error}") from error
        found = checked(file.name, "keys and values", data, dict)
        for key in table.split(".") if table else ():
            if key not in found:
                raise ConfigError(f"{file.name} has no table {table!r}{did_you_mean(key, found)}")
            found = checked(f"{key!r} of {file.name}", "keys and values", found[key], dict)
        return cls.of(found)

    def as_data(self) -> dict[str, Any]:
        """Return plain data that `of` reads back, for TOML or JSON, without defaults that no mapping or file named."""
        default = RunnerConfig()
        values = {name: getattr(self, name) for name in self.options()}
        return {
            name: [*value] if isinstance(value, tuple) else sorted(value) if isinstance(value, frozenset) else value
            for name, value in values.items()
            if value is not None and (name in self.named or value != getattr(default, name))
        }

    def check(self, capabilities: Capabilities) -> None:
        """Raise ConfigError for a lowering or error mode that the device lacks.

        So does an unknown debug mode in the environment.
        """
        chosen_lowering(capabilities, self.lowering)
        known = capabilities.capture_error_modes
        if self.error_mode is not None and self.error_mode not in known:
            modes = f"this backend has {', '.join(known)}" if known else "this backend has none: leave it out"
            raise ConfigError(f"error_mode {self.error_mode!r}: {modes}{did_you_mean(self.error_mode, known)}")
        _ = self.modes

    @property
    def modes(self) -> frozenset[str]:
        """The debug modes that are on. Raises ConfigError if the environment names an unknown one."""
        return modes_of(None) if self.debug is None else self.debug

    def ladder(self, *, of_tokens: bool = False) -> Buckets:
        """Return the buckets that were given, or the default ones. Raise ConfigError if they have several axes."""
        if self.buckets and isinstance(self.buckets[0], dict):
            refuse("option 'buckets'", "numbers of rows, as only a GraphRunner takes sizes by axis", self.buckets)
        if self.buckets:
            return Buckets(self.buckets, self.max_waste)
        make, largest = (Buckets.doubling, self.max_tokens) if of_tokens else (Buckets.ladder, self.max_batch)
        return make(largest, self.max_waste)


def config_of(kind: type, options: Mapping[str, Any]) -> RunnerConfig:
    """Return the configuration of a runner of this class from all its keywords.

    It has every option that the class uses: by its keyword, else from `config=`, whose other options are ignored.
    """
    used = keywords_of(kind)
    every = RunnerConfig.options()
    for name in sorted(options.keys() - used):
        if name in every:
            raise ConfigError(f"{kind.__name__} does not use option {name!r}: leave it out")
        instead = hint(name, {*used, *every}, f"known are {', '.join(sorted(used))}")
        raise ConfigError(f"{kind.__name__}: unknown option {name!r}: {instead}")
    config = options.get("config")
    if config is None:
        config = RunnerConfig()
    checked("config", "a RunnerConfig, such as RunnerConfig.load(path), or None", config, RunnerConfig)
    found = {name: options.get(name, getattr(config, name)) for name in used.intersection(every)}
    return RunnerConfig.of({**found, "backend": name_of(found["backend"])})


@functools.cache
def keywords_of(kind: type) -> frozenset[str]:
    """Return the keywords of a runner's constructor, including its options."""
    parameters = inspect.signature(kind).parameters.values()
    return frozenset(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)


_DEFAULTS: Final[Mapping[str, Any]] = {
    "sizes": {},
    "absent": (),
    "variants": (),
    "bind": {},
    "keep_bound": False,
    "relations": {},
    "output_rows": ...,
    "chunks": (),
}
"""Defaults of the keywords that are not options, except None. Each runner class has its own `output_rows`."""


class KeywordSignature:
    """The signature of runner classes, with every option as a keyword. Runners themselves have that of `__call__`."""

    def __get__(self, runner: object, kind: Any) -> inspect.Signature:
        """Return the signature of a class. Raise AttributeError for a runner."""
        if runner is not None:
            raise AttributeError("__signature__")
        own = inspect.signature(kind.__init__)
        config = RunnerConfig()
        _, *found = own.parameters.values()
        last = found[-1]
        if last.kind is last.VAR_KEYWORD:
            found.pop()
            for name, annotation in get_args(last.annotation)[0].__annotations__.items():
                default = getattr(config, name, _DEFAULTS.get(name))
                found.append(last.replace(name=name, kind=last.KEYWORD_ONLY, default=default, annotation=annotation))
        return own.replace(parameters=found)
