"""Where slots' values come from: sources in a batch, which are read together, and functions of other slots."""

import abc
import inspect
import operator
import pickle
from collections.abc import Callable, Collection, KeysView, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, final

import attrs
import torch

from .errors import BatchError

STEP: Final = "step"
SETTINGS: Final = "settings"
RANKS: Final = "ranks"
OUT: Final = "out"
Side: TypeAlias = Mapping[str, Any]
NO_SIDE: Final[Side] = {}
Sources: TypeAlias = tuple[Any, ...]
F = TypeVar("F", bound=Callable[..., Any])
_FILLS: Final = "__slotgraph_fills__"
_KERNEL: Final = "__slotgraph_kernel__"
_NOT_OF_USERS: Final = frozenset({"builtins", "numpy", "torch"})
_IS_MAPPING: Final[dict[type, bool]] = {}  # `issubclass` with an abstract class costs more than the look-up itself


def look_up(holder: object, name: str) -> Any:
    """Look up a name in a mapping or on an object. Return None if it is missing, without calling `__missing__`."""
    kind = type(holder)
    is_mapping = _IS_MAPPING.get(kind)
    if is_mapping is None:
        is_mapping = _IS_MAPPING[kind] = issubclass(kind, Mapping)
    if is_mapping:
        return holder[name] if name in holder else None  # type: ignore[index,operator] # noqa: SIM401 - `get` may ask `__missing__`
    return getattr(holder, name, None)


def keys_of(batch: Any) -> KeysView[str]:
    """Return a batch's keys, or the names of its attributes, in their order.

    Return none for tensors, lists and other library types.
    """
    if isinstance(batch, Mapping):
        return dict.fromkeys(map(str, batch)).keys()
    if type(batch).__module__.partition(".")[0] in _NOT_OF_USERS:
        return dict[str, None]().keys()
    return dict.fromkeys(getattr(batch, "__dict__", None) or dir(batch)).keys()


class Source(abc.ABC):
    """How a slot's value is found in a batch."""

    @abc.abstractmethod
    def read(self, batch: Any, side: Side) -> Any:
        """Return the value from a batch and its side arguments, or None if it is absent."""


class Answering:
    """A stand-in for a batch, which answers what each source would read.

    It is no ABC, since instance checks would take three times as long.
    """

    @abc.abstractmethod
    def answer(self, source: Source) -> Any:
        """Return the source's value, or None if it is absent."""


@final
@attrs.frozen
class Path(Source):
    """A dotted path of attributes and keys that starts at the batch or at the side arguments.

    Attributes:
        parts: The names.
        from_side: Whether the path starts at the side arguments.
    """

    parts: tuple[str, ...]
    from_side: bool = False

    def read(self, batch: Any, side: Side) -> Any:
        """Return the value at the path."""
        found = side if self.from_side else batch
        for name in self.parts:
            if found is None:
                return None
            found = look_up(found, name)
        return found

    def __str__(self) -> str:
        """Return the path as a user writes it."""
        return ("argument " if self.from_side else "batch.") + ".".join(self.parts)


@final
@attrs.frozen
class Call(Source):
    """A function of the batch."""

    function: Callable[[Any], Any]

    def read(self, batch: Any, side: Side) -> Any:
        """Return the function's result."""
        del side
        return batch.answer(self) if isinstance(batch, Answering) else self.function(batch)

    def __str__(self) -> str:
        """Return the function's name."""
        return f"{getattr(self.function, '__qualname__', self.function)}(batch)"


@final
@attrs.frozen(eq=False)
class Field:
    """A field of a declaration that is not a slot, and how attrs treats its values.

    Attributes:
        name: The field's name.
        owner: The declaration, whose constructor has already converted the values of its objects.
        attribute: The attribute that attrs made.
        convert: Its converter, or None.
        default: The default as declared, or attrs.NOTHING if there is none.
    """

    name: str
    owner: type
    attribute: Any
    convert: Callable[[Any], Any] | None
    default: Any

    @classmethod
    def of(cls, owner: type, attribute: Any) -> "Field":
        """Make the field of an attribute that attrs made."""
        convert = attribute.converter
        if isinstance(convert, attrs.Converter):
            wrapped: Any = convert  # attrs declares no attributes on its type
            make = wrapped.converter
            convert = (lambda value: make(value, attribute)) if wrapped.takes_field else make
            convert = None if wrapped.takes_self else convert  # `Inputs` rejects such a class
        return cls(attribute.name, owner, attribute, convert, attribute.default)

    def read(self, batch: Any) -> Any:
        """Return the batch's value, or else the default, converted. Return None if there is neither.

        Raises BatchError if the converter raises. A converter must accept its own results, as `attrs.evolve` also
        requires.
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
        """Describe an error of a converter or validator. Errors of attrs have the message as first argument."""
        return f"field {self.name!r}: {error.args[0] if error.args else type(error).__name__}"


def is_factory(default: Any) -> bool:
    """Return whether a factory makes a new default for each batch."""
    return isinstance(default, attrs.Factory)  # type: ignore[arg-type] # a class


def plain_name(source: Source | None) -> str | None:
    """Return the name of a source that is one key or attribute of the batch, or None for any other source."""
    return source.parts[0] if isinstance(source, Path) and len(source.parts) == 1 and not source.from_side else None


def _parts(path: str) -> tuple[str, ...]:
    parts = tuple(path.split(".")) if isinstance(path, str) else ()
    if not parts or not all(map(str.isidentifier, parts)):
        raise ValueError(f"a source path is made of names and dots, got {path!r}")
    return parts


def side(path: str) -> Path:
    """Make a source among the side arguments: `side("pp_proxy.hidden_states")` reads `runner(batch, pp_proxy=...)`."""
    return Path(_parts(path), from_side=True)


def optional_source(source: str | Source | Callable[[Any], Any] | None) -> Source | None:
    """Convert a declaration's `source=` to a source, or None if none was given.

    Raise TypeError or ValueError otherwise.
    """
    if source is None or isinstance(source, Source):
        return source
    if isinstance(source, str):
        return Path(_parts(source))
    return Call(one_argument(source, "a dotted path, side(path) or a function of the batch"))


def chosen(places: Sequence[int]) -> Callable[[Sources], Sources]:
    """Make a function that selects some sources in a given order, and always returns a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    first = places[0] if places else 0
    return operator.itemgetter(slice(first, first + len(places)))


class Gather:
    """Reads a fixed list of sources from batches. An absent one becomes None."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        names = [plain_name(source) for source in sources]
        self._names = tuple([name for name in names if name is not None])
        self._others = [(place, sources[place]) for place, name in enumerate(names) if name is None]
        self._getters: dict[type, Callable[[Any], Sources]] = {}

    def __call__(self, batch: Any, side: Side) -> Sources:
        """Return the sources' values, in order."""
        if self._names:
            getter = self._getters.get(type(batch)) or self._getter(type(batch))
            try:
                found = getter(batch)
            except (AttributeError, KeyError):
                return self._one_by_one(batch, side)
            if not self._others:
                return found
            values = [*found]
            for place, source in self._others:
                values.insert(place, source.read(batch, side))
            return tuple(values)
        return self._one_by_one(batch, side)

    def _one_by_one(self, batch: Any, side: Side) -> Sources:
        return tuple([source.read(batch, side) for source in self._sources])

    def _getter(self, kind: type) -> Callable[[Any], Sources]:
        names = self._names
        if hasattr(kind, "__missing__"):  # `__missing__` would be called by indexing

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
    """A function and the names that it needs, like the parameters of pytest fixtures.

    Attributes:
        function: The function.
        needs: Its parameters in order: slots, fields of the batch, `step`, `settings`, `ranks`.
        writes_out: Whether it takes `out`, the slot's own buffer, and fills it instead of returning a value.
        fills: The slots that one call fills, if `fills` names them, else none.
        kernel: Fills these slots in a graph instead, or None.
        again: What says whether it must run again: a function that returns a bool, or `changed`, which returns the
            contents of what is named. None if it runs in each step.
    """

    function: Callable[..., Any]
    needs: tuple[str, ...]
    writes_out: bool
    fills: tuple[str, ...] = ()
    kernel: Callable[..., Any] | None = None
    again: "Compute | None" = None

    @property
    def name(self) -> str:
        """The function's name, for plans and messages."""
        return str(getattr(self.function, "__qualname__", self.function))

    def within(self, groups: Collection[str], member: str) -> "Compute":
        """Return the function of one slot of a group. Names in `groups` mean the member of that group."""

        def named(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple([f"{name}.{member}" if name in groups else name for name in names])

        return attrs.evolve(self, needs=named(self.needs), fills=named(self.fills))

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values of slots by parameter. The parameter for a group's slot is called as the group."""
        return {need.partition(".")[0]: value for need, value in values.items()}

    @property
    def reads(self) -> tuple[str, ...]:
        """What the function and `again` need."""
        return self.needs if self.again is None else tuple(dict.fromkeys((*self.needs, *self.again.needs)))


def fills(*slots: str, kernel: Callable[..., object] | None = None) -> Callable[[F], F]:
    """Let one function fill several computed slots by one call in each step.

    The function returns a tuple with one value for each slot, in this order. If it takes `out`, that is a dict of the
    slots' buffers by name, without slots that are dropped or switched off, and it fills these. Declare each slot by
    `computed(function, ...)`.

    Args:
        slots: The names of the slots.
        kernel: Launches one kernel that writes what the function returns. It takes the function's arguments, and `out`,
            the dict of the buffers. A capture on a CUDA device calls both. If the bytes are the same, the graph has the
            kernel; otherwise, and everywhere else, the function runs.

    Raises:
        TypeError: The names are not at least two texts, all different, or the kernel or what is marked is no function.
    """
    if not len(slots) == len({name for name in slots if isinstance(name, str)}) > 1:
        raise TypeError(f"@fills takes the names of two slots or more, all different, got {slots!r:.80}")
    if kernel is not None and not callable(kernel):
        raise TypeError(f"kernel= of @fills takes a function that launches it, got {kernel!r:.80}")

    def mark(function: F) -> F:
        if not callable(function):
            raise TypeError(f"@fills marks a function, got {function!r:.80}")
        setattr(function, _FILLS, slots)
        setattr(function, _KERNEL, kernel)
        return function

    return mark


def compute_of(function: Callable[..., Any]) -> Compute:
    """Read a function's parameters. Raise TypeError if they cannot name slots."""
    if isinstance(function, Compute):
        return function
    if not callable(function):
        raise TypeError(f"a computed slot needs a function, got {function!r}")
    parameters = parameters_of(function)
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{parameter} cannot name a slot: use plain parameters, one for each slot needed")
    names = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    needs = tuple(name for name in names if name != OUT)
    marks = getattr(function, _FILLS, ()), getattr(function, _KERNEL, None)
    return Compute(_no_coroutine(function), needs, OUT in names, *marks)


def one_value(function: Callable[..., Any]) -> Compute:
    """Read the parameters of a function that returns a single value. Raise TypeError if `fills` marks it."""
    made = compute_of(function)
    if made.fills:
        several = ", ".join(made.fills)
        raise TypeError(f"one call of {made.name} fills {several}, by @fills: give a function of a single value")
    return made


def again_of(value: Any) -> Compute:
    """Convert a tuple of names, or a function that returns a bool, to `Compute.again`. Raise TypeError for others."""
    if isinstance(value, tuple) and all(isinstance(name, str) for name in value):
        return Compute(changed, value, writes_out=False)
    if isinstance(value, Compute):
        return value
    if callable(value):
        return one_value(value)
    raise TypeError("give a tuple of names of slots and fields, such as ('kv_lens',), or a function")


def changed(**values: Any) -> bytes:
    """Return the contents of slots in host memory and of fields, to compare them with those of another step."""
    found = list[Any]()
    for one in values.values():
        is_tensor = isinstance(one, torch.Tensor)  # NumPy has no bfloat16, but all dtypes have bytes
        found.append((tuple(one.shape), one.flatten().contiguous().view(torch.uint8).numpy()) if is_tensor else one)
    try:
        return pickle.dumps(found)
    except Exception as error:
        what = f"again= names {', '.join(values)}, and cannot compare them: {error}"
        raise TypeError(f"{what}; name fields of plain values, or give a function that says whether it runs") from error


def parameters_of(function: Callable[..., Any]) -> Collection[inspect.Parameter]:
    """Return a function's parameters, or those of what it wraps, if it passes keywords on.

    Raise TypeError if they cannot be read.
    """
    try:
        found = inspect.signature(function, follow_wrapped=False).parameters.values()
        passes_on = any(one.kind is one.VAR_KEYWORD for one in found)
        return inspect.signature(function).parameters.values() if passes_on else found
    except (TypeError, ValueError) as error:  # a function in C, or an object that imitates a function
        raise TypeError(f"its parameters cannot be read ({error}): write a function that calls it") from error


@attrs.frozen
class _Term:
    """A symbolic slot, on which `linear` calls a rule. It supports the addition and subtraction of integers."""

    slot: str
    add: int = 0

    def __add__(self, number: object) -> "_Term":
        return attrs.evolve(self, add=self.add + number) if type(number) is int else NotImplemented

    __radd__ = __add__

    def __sub__(self, number: object) -> "_Term":
        return self + -number if type(number) is int else NotImplemented


def linear(rule: Compute) -> tuple[str, int] | None:
    """Return the slot and the number that a rule adds up, or None for any other rule."""
    try:
        made = rule.function(**rule.arguments({need: _Term(need) for need in rule.needs}))
    except Exception:  # noqa: BLE001 - it does more with what it is given than to add a number
        return None
    return (made.slot, made.add) if isinstance(made, _Term) else None


def one_argument(function: Callable[..., Any], expected: str) -> Callable[..., Any]:
    """Check that a function takes one argument. Raise TypeError, which names what was `expected`, if it does not."""
    if not callable(function):
        raise TypeError(f"expected {expected}")
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # a function in C that does not reveal its parameters
        return function
    except TypeError as error:
        raise TypeError(f"expected {expected}, called with one argument, which it does not take ({error})") from error
    return _no_coroutine(function)


def _no_coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError("expected a function that returns its value, not a coroutine or a generator")
    return function
