"""Where slots' values come from: places in a batch, which are read all at once, and functions of other slots."""

import abc
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import attrs

from .errors import BatchError

STEP: Final = "step"
SETTINGS: Final = "settings"
RANKS: Final = "ranks"
OUT: Final = "out"
Side: TypeAlias = Mapping[str, Any]
NO_SIDE: Final[Side] = {}
Sources: TypeAlias = tuple[Any, ...]
_NOT_OF_USERS: Final = frozenset({"builtins", "numpy", "torch"})
_IS_MAPPING: Final[dict[type, bool]] = {}  # asking an abstract class costs more than the look-up itself


def look_up(holder: object, name: str) -> Any:
    """One name in a mapping or on an object; None where it is not there, without `__missing__` of a `defaultdict`."""
    kind = type(holder)
    is_mapping = _IS_MAPPING.get(kind)
    if is_mapping is None:
        is_mapping = _IS_MAPPING[kind] = issubclass(kind, Mapping)
    if is_mapping:
        return holder[name] if name in holder else None  # type: ignore[index,operator] # noqa: SIM401 - `get` may ask `__missing__`
    return getattr(holder, name, None)


def keys_of(batch: Any) -> set[str]:
    """The names of what a batch has: of its keys, or of its attributes; none of a tensor's, a list's and the like."""
    if isinstance(batch, Mapping):
        return {*map(str, batch)}
    if type(batch).__module__.partition(".")[0] in _NOT_OF_USERS:
        return set()
    return {*(getattr(batch, "__dict__", None) or dir(batch))}


class Source(abc.ABC):
    """How a slot's value is found in a batch."""

    @abc.abstractmethod
    def read(self, batch: Any, side: Side) -> Any:
        """The value in a batch and its side arguments; None where it is absent."""


class Answering:
    """A batch that stands in for one of another class; no ABC, whose instance checks would take three times as long."""

    @abc.abstractmethod
    def answer(self, source: Source) -> Any:
        """What the source finds; None where it is absent."""


@final
@attrs.frozen
class Path(Source):
    """A dotted path, names on objects or in mappings: into the batch, or `beside` it into the keyword arguments."""

    parts: tuple[str, ...]
    beside: bool = False

    def read(self, batch: Any, side: Side) -> Any:
        """What stands at the path."""
        found = side if self.beside else batch
        for name in self.parts:
            if found is None:
                return None
            found = look_up(found, name)
        return found

    def __str__(self) -> str:
        """The path as one writes it."""
        return ("argument " if self.beside else "batch.") + ".".join(self.parts)


@final
@attrs.frozen
class Call(Source):
    """A function of the batch."""

    function: Callable[[Any], Any]

    def read(self, batch: Any, side: Side) -> Any:
        """What the function returns."""
        del side
        return batch.answer(self) if isinstance(batch, Answering) else self.function(batch)

    def __str__(self) -> str:
        """The function's name."""
        return f"{getattr(self.function, '__qualname__', self.function)}(batch)"


@final
@attrs.frozen(eq=False)
class Field:
    """A field of a declaration that is no slot, and what attrs does to its values.

    owner: the declaration, whose constructor has converted what its objects have. attribute: its own description of the
    field. convert: its converter, or None. default: as declared; attrs.NOTHING where there is none.
    """

    name: str
    owner: type
    attribute: Any
    convert: Callable[[Any], Any] | None
    default: Any

    @classmethod
    def of(cls, owner: type, attribute: Any) -> "Field":
        """The field that attrs made."""
        convert = attribute.converter
        if isinstance(convert, attrs.Converter):
            said: Any = convert  # its type has no attributes
            make = said.converter
            convert = (lambda value: make(value, attribute)) if said.takes_field else make
            convert = None if said.takes_self else convert  # which its class is refused for
        return cls(attribute.name, owner, attribute, convert, attribute.default)

    def read(self, batch: Any) -> Any:
        """The batch's own value, else the default, converted; None where there is neither.

        BatchError where the converter raises. It must take what it has made, as `attrs.evolve` asks of it, too.
        """
        value = look_up(batch, self.name)
        if value is None:
            if self.default is attrs.NOTHING:
                return None
            value = self.default.factory() if is_factory(self.default) else self.default
        elif isinstance(batch, self.owner):
            return value
        if self.convert is None:
            return value
        try:
            return self.convert(value)
        except Exception as error:
            raise BatchError(self.refusal(error)) from error

    def refusal(self, error: Exception) -> str:
        """What to say where the converter or the validator raised; attrs' own errors begin with the sentence."""
        return f"field {self.name!r}: {error.args[0] if error.args else type(error).__name__}"


def is_factory(default: Any) -> bool:
    """Whether a field's default is made anew for each batch."""
    return isinstance(default, attrs.Factory)  # type: ignore[arg-type] # a class


def plain_name(source: Source | None) -> str | None:
    """The batch's own name for a source, where that is all there is to look up."""
    return source.parts[0] if isinstance(source, Path) and len(source.parts) == 1 and not source.beside else None


def _parts(path: str) -> tuple[str, ...]:
    parts = tuple(path.split(".")) if isinstance(path, str) else ()
    if not parts or not all(map(str.isidentifier, parts)):
        raise ValueError(f"a source path is made of names and dots, got {path!r}")
    return parts


def side(path: str) -> Path:
    """A source beside the batch: `side("pp_proxy.hidden_states")` reads `runner(batch, pp_proxy=...)`."""
    return Path(_parts(path), beside=True)


def optional_source(source: str | Source | Callable[[Any], Any] | None) -> Source | None:
    """A declaration's `source=`: a dotted path, a side argument, a function or None. TypeError, ValueError else."""
    if source is None or isinstance(source, Source):
        return source
    if isinstance(source, str):
        return Path(_parts(source))
    return Call(one_argument(source, "a dotted path, side(path) or a function of the batch"))


def chosen(places: Sequence[int]) -> Callable[[Sources], Sources]:
    """A call that takes some sources out of all, in a given order, always as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    first = places[0] if places else 0
    return operator.itemgetter(slice(first, first + len(places)))


class Gather:
    """Reads a fixed list of sources from batches; an absent one comes as None."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        names = [plain_name(source) for source in sources]
        self._names = tuple(name for name in names if name is not None) if None not in names else ()
        self._getters: dict[type, Callable[[Any], Sources]] = {}

    def __call__(self, batch: Any, side: Side) -> Sources:
        """The sources' values, in order."""
        if self._names:
            getter = self._getters.get(type(batch)) or self._getter(type(batch))
            try:
                return getter(batch)
            except (AttributeError, KeyError):
                return self._one_by_one(batch, side)
        return self._one_by_one(batch, side)

    def _one_by_one(self, batch: Any, side: Side) -> Sources:
        return tuple([source.read(batch, side) for source in self._sources])

    def _getter(self, kind: type) -> Callable[[Any], Sources]:
        names = self._names
        if hasattr(kind, "__missing__"):  # which an index would call

            def getter(batch: Any) -> Sources:
                return tuple([look_up(batch, name) for name in names])

        else:
            make = operator.itemgetter if issubclass(kind, Mapping) else operator.attrgetter
            many = make(*names)
            getter = many if len(names) > 1 else lambda batch: (many(batch),)  # type: ignore[assignment] # a tuple of all
        self._getters[kind] = getter
        return getter


@attrs.frozen
class Compute:
    """A function and the names that it needs, as pytest fixtures have them.

    needs: parameters in order: slots, fields of the batch, `step`, `settings`, `ranks`. writes_out: whether it takes
    `out`, the slot's own buffer, and fills it instead of returning a value.
    """

    function: Callable[..., Any]
    needs: tuple[str, ...]
    writes_out: bool

    @property
    def name(self) -> str:
        """The function's name, for plans and messages."""
        return str(getattr(self.function, "__qualname__", self.function))


def compute_of(function: Callable[..., Any]) -> Compute:
    """Read a function's parameters; TypeError where they cannot name slots."""
    if isinstance(function, Compute):
        return function
    if not callable(function):
        raise TypeError(f"a computed slot needs a function, got {function!r}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:  # a function in C, or what only looks like one
        raise TypeError(f"its parameters cannot be read ({error}): write a function that calls it") from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{parameter} cannot name a slot: use plain parameters, one for each slot needed")
    names = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    return Compute(_no_coroutine(function), tuple(name for name in names if name != OUT), OUT in names)


@attrs.frozen
class _Term:
    """What stands for a slot where a rule is tried out: it can be added to, and nothing else."""

    slot: str
    add: int = 0

    def __add__(self, number: object) -> "_Term":
        return attrs.evolve(self, add=self.add + number) if type(number) is int else NotImplemented

    __radd__ = __add__

    def __sub__(self, number: object) -> "_Term":
        return self + -number if type(number) is int else NotImplemented


def linear(rule: Compute) -> tuple[str, int] | None:
    """The slot and the number whose sum a rule is; None where it is anything else."""
    try:
        made = rule.function(**{need: _Term(need) for need in rule.needs})
    except Exception:  # noqa: BLE001 - it does more with what it is given than to add a number
        return None
    return (made.slot, made.add) if isinstance(made, _Term) else None


def one_argument(function: Callable[..., Any], expected: str) -> Callable[..., Any]:
    """A function that can be called with one argument. TypeError, which tells what was `expected`, where it is none."""
    if not callable(function):
        raise TypeError(f"expected {expected}")
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # a function in C that does not tell its parameters
        return function
    except TypeError as error:
        raise TypeError(f"expected {expected}, called with one argument, which it does not take ({error})") from error
    return _no_coroutine(function)


def _no_coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError("a function that returns its value is called here, no coroutine and no generator")
    return function
