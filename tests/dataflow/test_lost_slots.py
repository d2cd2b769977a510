"""Declarations that would lose a slot, lie about one or mix up runs: refused by name when the class is defined."""

import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any, Generic, Optional, TypeVar

import attrs
import numpy as np
import pytest
import torch

from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, computed, constant, copied, output
from slotgraph.errors import DeclarationError, DeclarationErrors

T = TypeVar("T")


def rows(**given: Any) -> Any:
    """A slot, a new one at each call."""
    return copied(BATCH, **{"dtype": torch.int64, "pad": 0, **given})


class Ids(Inputs):
    ids: torch.Tensor = rows()


def declared(bases: tuple[type, ...] = (Ids,), /, notes: dict[str, Any] | None = None, **body: Any) -> Any:
    """A declaration with this body and these annotations."""
    return types.new_class("Made", bases, {}, lambda space: space.update(body, __annotations__=notes or {}))


def refused(make: Callable[..., Any], /, *args: Any, **given: Any) -> list[str]:
    """What is wrong with a declaration, fault by fault."""
    with pytest.raises(DeclarationErrors) as found:
        make(*args, **given)
    return [str(fault) for fault in found.value.exceptions]


HELD: dict[str, Callable[[], Any]] = {
    "list": lambda: [rows(), rows()],
    "tuple": lambda: (rows(),),  # what a comma behind a slot makes of it
    "dict": lambda: {"first": rows()},
    "set": lambda: {rows().metadata["slotgraph.slot"]},
    "nested": lambda: [{"first": [1, (rows(),)]}],
}


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("note", [None, list, Any], ids=["bare", "list", "Any"])
def test_slots_in_containers(kind: str, note: Any) -> None:
    """A container of slots declares none of them: in the class, as an attrs default, in a mixin, or set later."""
    notes = {} if note is None else {"layers": note}
    [fault] = refused(declared, notes=notes, layers=HELD[kind]())
    assert "'layers': a " in fault
    assert "of slots" in fault
    assert ("comma" in fault) == (kind == "tuple")
    assert ": torch.Tensor = copied(...)" in fault
    if note is not None and kind != "set":
        [fault] = refused(declared, notes=notes, layers=attrs.field(default=HELD[kind]()))
        assert "'layers': a " in fault
    mixin = type("Mixin", (), {"layers": HELD[kind]()})
    [fault] = refused(declared, (mixin, Ids))
    assert "'layers': Mixin, which is not a declaration, has it" in fault
    [fault] = refused(setattr, declared(), "layers", HELD[kind]())
    assert "would lose slots" in fault


def test_containers_without_slots() -> None:
    """Class attributes of any other kind stay what they are, one that holds itself included."""
    endless: list[Any] = []
    endless.append(endless)
    made = declared(names=["ids"], table={"ids": 1}, endless=endless, text="ids", numbers=range(2**40))
    assert [*made.slotgraph.slots] == ["ids"]
    assert made.names == ["ids"]
    assert made.endless is endless


NONES = [torch.Tensor | None, Optional[torch.Tensor], "torch.Tensor | None", "Optional[Tensor]", "None | Tensor"]  # noqa: UP045 - the point
MAKERS: dict[str, Callable[[], Any]] = {
    "copied": rows,
    "computed": lambda: computed(lambda ids: ids, shape=BATCH, dtype=torch.int64),
    "constant": lambda: constant(1, dtype=torch.int64),
    "output": lambda: output(BATCH, dtype=torch.int64),
}


@pytest.mark.parametrize("note", NONES, ids=repr)
@pytest.mark.parametrize("maker", MAKERS)
def test_annotations_with_none(note: Any, maker: str) -> None:
    """An annotation does not make a slot optional: None in that of a slot which is always there is refused."""
    [fault] = refused(declared, notes={"extra": note}, extra=MAKERS[maker]())
    assert "'extra'" in fault
    assert "default=None or when=" in fault
    [fault] = refused(declared, notes={"extra": note}, extra=rows(pad=None, default=None))
    assert "no tail rule" in fault


@pytest.mark.parametrize("note", NONES, ids=repr)
def test_annotations_of_slots_that_may_be_absent(note: Any) -> None:
    """A slot that is optional, or exists by a setting, may be None; so may any field."""
    notes = {"extra": note, "other": note, "tag": note}
    made = declared(notes=notes, extra=rows(default=None), other=rows(when="on"), tag=None)
    assert {*made.slotgraph.slots} == {"ids", "extra", "other"}


@attrs.frozen
class Frozen:
    size: Any = 3


@attrs.define
class Loose:
    size: int = 3


@dataclasses.dataclass
class Data:
    size: int = 3


class Plain:
    def __init__(self) -> None:
        self.size = 3


class Slotted:
    __slots__ = ("size",)


class Mode(enum.Enum):
    ONE = 1


CHANGEABLE = [
    [1],
    {"a": 1},
    {1},
    bytearray(b"a"),
    ([1],),
    Loose(),
    Data(),
    np.arange(3),
    Frozen([1]),
    Plain(),
    Slotted(),
]
FIXED = [None, 1, "one", 1.5, True, (1, "a"), frozenset({1}), Frozen(), Mode.ONE, len, int, torch.int64, object()]


@pytest.mark.parametrize("default", CHANGEABLE, ids=lambda one: type(one).__name__)
def test_defaults_that_can_be_changed(default: Any) -> None:
    """A field's default that can be changed in place is refused: a graph could not tell what it was captured with."""
    for value in (default, attrs.field(default=default)):
        [fault] = refused(declared, notes={"options": object}, options=value)
        assert f"field 'options': its default, of type {type(default).__name__}, " in fault


@pytest.mark.parametrize("default", FIXED, ids=lambda one: type(one).__name__)
def test_defaults_that_cannot_be_changed(default: Any) -> None:
    """A default that cannot be changed, or is an identity, is the value that graphs are captured with."""
    made = declared(notes={"options": object}, options=default)
    assert made.slotgraph.fields["options"].default is default


def test_defaults_made_for_each_batch() -> None:
    """A factory's default is compared by value: a batch that changes its own runs eagerly, and no other batch does."""
    made = declared(notes={"options": dict[str, int]}, options=attrs.field(factory=lambda: {"scale": 2}))

    def step(view: Any) -> torch.Tensor:
        scaled: torch.Tensor = view.ids * view.options["scale"]
        return scaled

    runner = DecodeRunner(made, step, buckets=[4], backend="cpu-capture")
    runner.capture()
    ids = torch.tensor([3, 5])
    batch = made(ids=ids)
    for scale, path in ((2, "graph"), (7, "eager"), (2, "graph")):
        batch.options["scale"] = scale
        assert runner.decide(batch).path == path
        assert runner(batch).tolist() == [3 * scale, 5 * scale]
        view = runner.fill({"ids": ids})
        view.options["scale"] = 11  # this view's own
        assert runner({"ids": ids}).tolist() == [6, 10]


def test_factories_and_converters_that_take_the_object() -> None:
    """What needs an object of the class cannot be made for a mapping."""
    for value in (
        attrs.field(default=attrs.Factory(lambda self: self.ids, takes_self=True)),
        attrs.field(default=1, converter=attrs.Converter(lambda value, self: value, takes_self=True)),  # noqa: ARG005
    ):
        [fault] = refused(declared, notes={"options": object}, options=value)
        assert "field 'options': its " in fault
        assert "leave takes_self out" in fault


def deaf() -> type[Inputs]:
    """A declaration whose subclasses are not made."""

    class Deaf(Ids):
        def __init_subclass__(cls, **_: Any) -> None:
            """Forget super()."""

    return Deaf


SUBCLASSES: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown keyword": (lambda: types.new_class("Made", (Ids,), {"dorp": ["ids"]}), "did you mean 'drop'?"),
    "two of one alias": (
        lambda: declared(notes={"a": int, "b": int}, a=attrs.field(default=1), b=attrs.field(default=1, alias="a")),
        "attrs cannot make a class of it",
    ),
    "alias that is no name": (
        lambda: declared(notes={"a": int}, a=attrs.field(default=1, alias="not one")),
        "attrs cannot make a class of it",
    ),
    "attribute hooks": (
        lambda: declared(notes={"a": int}, a=attrs.field(default=1, converter=int), __setattr__=lambda *_: None),
        "attrs cannot make a class of it",
    ),
    "no annotation's name": (lambda: declared(notes={5: int}), "attrs cannot make a class of it"),  # type: ignore[dict-item]
    "converter": (
        lambda: declared(notes={"a": int}, a=attrs.field(default="x", converter=int)),
        "field 'a': its converter does not take its default: field 'a': invalid literal for int()",
    ),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclasses_that_attrs_refuses(name: str) -> None:
    """Whatever is wrong with a subclass is a fault of the declaration, also where Python or attrs says it first."""
    make, said = SUBCLASSES[name]
    [fault] = refused(make)
    assert fault.startswith("Made")
    assert said in fault


@pytest.mark.parametrize("make", [EagerRunner, DecodeRunner])
def test_classes_that_were_not_made(make: Any) -> None:
    """A runner refuses a class whose definition failed, and one that a base kept from being made."""
    refused(declared, notes={"wrong": torch.Tensor}, wrong=rows(pad=None))
    broken = Ids.__subclasses__()[-1]
    assert broken.__name__ == "Made"

    class Lost(deaf()):  # type: ignore[misc] # a class made at run time
        other: torch.Tensor = rows()

    for kind in (broken, Lost):
        with pytest.raises(DeclarationError, match=f"{kind.__name__} is no valid declaration"):
            make(kind, lambda view: view.ids, backend="cpu")


def test_generic_declarations() -> None:
    """A declaration may be generic."""

    class Made(Inputs, Generic[T]):
        ids: torch.Tensor = rows()

    class Sub(Made[int]):
        other: torch.Tensor = rows()

    assert [*Sub.slotgraph.slots] == ["ids", "other"]


def test_every_fault_is_shown() -> None:
    """The text of the group has each fault on a line of its own: loggers and short reports show nothing else."""
    notes: dict[str, Any] = dict.fromkeys(("a", "b", "c"), torch.Tensor)
    with pytest.raises(DeclarationErrors) as found:
        declared(notes=notes, a=rows(pad=None), b=rows(dtype="int"), c=[rows()])
    lines = str(found.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("Made breaks 3 rules: ")
    for fault in found.value.exceptions:
        assert sum(str(fault) in line for line in lines) == 1
    part = found.value.subgroup(lambda error: isinstance(error, DeclarationError) and "'b'" in str(error))
    assert part is not None
    assert "'b'" in str(part)
    assert "'a'" not in str(part)
