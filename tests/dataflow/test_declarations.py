"""Declarations that are wrong: all faults at once, each with the slot and the way out; no class loses a slot."""

import dataclasses
import enum
import functools
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar, Generic, Optional, TypeVar

import attr
import attrs
import numpy as np
import pytest
import torch

from slotgraph import BATCH, Axis, DecodeRunner, EagerRunner, Inputs, computed, constant, copied, keep, output
from slotgraph.dataflow.errors import CycleError, DeclarationError, DeclarationErrors
from slotgraph.extend import FillRole, Role, once
from tests.runners.models import PlainInputs, assert_right, decoder, plain_step, random_batch


def rows(pad: Any = 0, **given: Any) -> Any:
    """A slot, a new one at each call."""
    return copied(BATCH, **{"dtype": torch.int64, "pad": pad, **given})


class Base(Inputs):
    ids: torch.Tensor = rows()
    tag: int = 3


def declared(base: type[Inputs] = Base, /, annotated: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A declaration with these fields beside those of another one, as tensors unless told otherwise."""
    notes = dict.fromkeys(fields, torch.Tensor) if annotated is None else annotated
    return types.new_class("Made", (base,), {}, lambda body: body.update(fields, __annotations__=notes))


def refused(make: Callable[..., Any], /, *args: Any, **given: Any) -> list[str]:
    """What is wrong with a declaration, fault by fault."""
    with pytest.raises(DeclarationErrors) as found:
        make(*args, **given)
    return [str(fault) for fault in found.value.exceptions]


def test_slots_in_a_circle_are_refused_with_the_path() -> None:
    """Slots that need each other in a circle are refused with the path, from any of them on; the base goes on."""
    slots: dict[str, Any] = {
        "first": computed(lambda third: third, dtype=torch.int64),
        "second": computed(lambda first: first, dtype=torch.int64),
        "third": computed(lambda second: second, dtype=torch.int64),
    }
    again = {"again": computed(lambda again: again, dtype=torch.int64)}
    for fields, path in ((slots, "(first -> third|third -> second|second -> first)"), (again, "again -> again")):
        with pytest.raises(DeclarationErrors) as found:
            declared(PlainInputs, **fields)
        [fault] = found.value.exceptions
        assert isinstance(fault, CycleError)
        assert isinstance(fault, TypeError)
        assert re.search(f"slots need each other in a circle: .*{path}.*; break it", str(fault))
    batch = random_batch(3, seed=1)
    assert_right(EagerRunner(PlainInputs, plain_step, backend="cpu")(batch), batch)


T = TypeVar("T")


def assert_filled(inputs: type[Inputs], names: list[str]) -> None:
    """Each slot of these names is declared, and holds the batch's rows and a tail."""
    assert sorted(inputs.slotgraph.slots) == sorted(names)
    runner = decoder(inputs, lambda view: view.ids + 0)
    batch = {name: torch.randint(1, 99, (3,)) for name in names}
    view = runner.fill(batch)
    for name in names:
        kind: Any = inputs.slotgraph.slots[name]
        assert getattr(view, name).tolist() == [*batch[name].tolist(), kind.pad.value]


DECORATORS: list[Any] = [
    attrs.define,
    attrs.define(slots=False),
    attrs.frozen,
    attrs.mutable(kw_only=True),
    attr.s,
    attr.s(auto_attribs=True),
    attr.dataclass,
    dataclasses.dataclass,
    dataclasses.dataclass(slots=True, kw_only=True),
    dataclasses.dataclass(frozen=True),
]


def test_decorators_that_make_a_class_anew_are_refused() -> None:
    """They would lose its slots, and are refused by the class's name; the class stays as it was."""
    for decorate in DECORATORS:

        class Made(Base):
            more: torch.Tensor = rows(7)

        assert "Made: a subclass of Inputs is an attrs class already" in refused(decorate, Made)[0]
        assert_filled(Made, ["ids", "more"])
    for slotted in (True, False):
        made = refused(attrs.make_class, "Made", {"more": rows()}, bases=(Base,), slots=slotted)
        assert "leave the decorator out, and write a class" in made[0]
    with pytest.raises(DeclarationErrors, match="Base breaks 1 rule"):
        Base.more = rows()  # pyright: ignore[reportAttributeAccessIssue] - the point


def mixin() -> type[Any]:
    """A class that is not a declaration, with a slot."""
    return type("Mixin", (), {"more": rows(5), "__annotations__": {"more": torch.Tensor}})


class Annotated:
    ids: torch.Tensor


class Property:
    @property
    def ids(self) -> int:
        return 3


class Methods:
    def total(self: Any) -> int:
        return int(self.ids.sum())


def test_slots_of_other_bases_are_taken_or_refused() -> None:
    """Their slots are taken, or the class is refused by the slot's name, wherever they stand among the bases."""
    for way in (1, -1):
        for wrong in (mixin(), dataclasses.dataclass(mixin()), attrs.define(mixin())):
            [fault] = refused(types.new_class, "Made", (wrong, Base)[::way])
            assert "slot 'more': " in fault
        taken = attrs.define(slots=False)(mixin())
        assert_filled(types.new_class("Made", (taken, Base)[::way]), ["ids", "more"])
        assert_filled(types.new_class("Made", (Annotated, Base)[::way]), ["ids"])
        mixed: Any = types.new_class("Made", (Methods, Base)[::way])
        assert mixed(ids=torch.tensor([4, 5])).total() == 9
    assert "slot 'ids': a base has a property" in refused(types.new_class, "Made", (Property, Base))[0]


def test_a_declaration_may_be_generic() -> None:
    """A declaration may be generic, and its parametrised forms may be subclassed."""

    class Of(Base, Generic[T]):
        more: torch.Tensor = rows(7)

    class OfInts(Of[int]):
        last: torch.Tensor = rows(8)

    assert_filled(OfInts, ["ids", "more", "last"])


def test_annotations_may_be_texts() -> None:
    """Under `from __future__ import annotations`, slots and class variables are what they are without."""
    lines = """
        from __future__ import annotations
        class Made(Base):
            more: torch.Tensor = rows(7)
            COUNT: ClassVar[int] = 3
        def wrong():
            class Wrong(Base):
                more: ClassVar[torch.Tensor] = rows()
    """
    found: dict[str, Any] = {"Base": Base, "rows": rows, "torch": torch, "ClassVar": ClassVar, "__name__": __name__}
    exec(compile(textwrap.dedent(lines), "made", "exec"), found)  # noqa: S102 - its annotations are texts there
    assert_filled(found["Made"], ["ids", "more"])
    assert "slot 'more': it has no annotation as a tensor" in refused(found["wrong"])[0]


def test_bases_that_say_different_things_are_refused() -> None:
    """A slot beside another, a field or a drop of its name is refused, in either order; a later declaration wins."""
    for rival in (declared(Inputs, annotated={"ids": int}, ids=3), declared(Inputs, ids=rows(1))):
        for bases in ((Base, rival), (rival, Base)):
            [fault] = refused(types.new_class, "Made", bases)
            assert re.search("'ids': .*declare it again to say which is meant, or drop it", fault)
    without: Any = types.new_class("Without", (declared(more=rows()),), {"drop": ["ids"]})
    assert_filled(types.new_class("Made", (declared(without, ids=rows(2)), without)), ["ids", "more"])
    made: Any = types.new_class("Made", (rival, without), {"drop": ["ids"]})
    assert list(made.slotgraph.slots) == ["more"]
    wrong = [("ids", "drop='ids'"), (3, "drop=3"), (None, "drop=None"), ([3], "drops 3"), ([[]], "drops []")]
    for drop, said in [*wrong, (["idz"], "Made drops 'idz', which no base declares")]:
        assert said in refused(types.new_class, "Made", (Base,), {"drop": drop})[0]


def test_a_base_before_its_own_subclass_is_refused() -> None:
    """Python could not order the two; the subclass has all slots of its base. Behind the subclass the base may be."""
    more = declared(more=rows())
    for bases, why in (
        ((Base, more), "is a base of Made, which has all of it: name Made alone"),
        ((Base, Base), "twice"),
    ):
        [fault] = refused(types.new_class, "Torn", bases)
        assert fault.startswith("Torn: its base Base")
        assert why in fault
    made: Any = types.new_class("Whole", (more, Base))
    assert [*made.slotgraph.slots] == ["ids", "more"]


def test_nothing_else_takes_the_place_of_a_bases_slot() -> None:
    """A base's slot stays one: a value, a field, an annotation or a method in its place is refused by its name."""
    slots = {name: rows() for name in "abcd"}
    base = declared(Inputs, annotated={**dict.fromkeys(slots, torch.Tensor), "e": int}, **slots, e=3)
    notes = {"b": int, "c": torch.Tensor}
    faults = sorted(refused(declared, base, annotated=notes, a=3, b=3, d=max, e=5))
    for name, fault in zip("abcde", faults, strict=True):
        assert f"'{name}': a base declares" in fault
    dropped: Any = types.new_class(
        "Made", (base,), {"drop": ["a", "b"]}, lambda body: body.update(b=3, __annotations__={"b": int})
    )
    defaults = {name: field.default for name, field in dropped.slotgraph.fields.items()}
    assert (list(dropped.slotgraph.slots), defaults) == (["c", "d"], {"b": 3, "e": 3})


def test_slots_that_are_not_written_as_fields_are_refused() -> None:
    """A specifier without a call, a slot object by itself, one without an annotation: all refused together."""
    kind, notes = Base.slotgraph.slots["ids"], {**dict.fromkeys("cdf", torch.Tensor), "e": ClassVar[torch.Tensor]}
    wrong = {"a": rows(), "b": kind, "c": kind, "d": copied, "e": rows()}
    wrong |= {"f": attrs.field(default=kind), "g": attrs.field()}
    for name, fault in zip(wrong, sorted(refused(declared, Inputs, annotated=notes, **wrong)), strict=True):
        assert f"Made.{name}: " in fault


WRONG_NAMES = """a.b|two words||1st|class|None|_ids|__ids|__init__|__class__|_|self|_slotgraph_view|slotgraph|narrow
placeholder|step|settings|out|attr_dict|NOTHING""".replace("\n", "|").split("|")


def test_names_that_python_or_attrs_needs_are_refused() -> None:
    """A name that Python, attrs or the class itself needs is refused, all together; every other one is filled."""
    faults = refused(declared, Inputs, **{name: rows() for name in [*WRONG_NAMES, "ids"]})
    assert len(faults) == len(WRONG_NAMES)
    for name in WRONG_NAMES:
        assert any(f"slot {name!r}: the name " in fault for fault in faults)
    odd = ["ids", "ranks", "get", "keys", "items", "object", "dict", "setattr", "type", "match", "cls", "axis", "ß"]
    assert_filled(declared(Inputs, **{name: rows(place) for place, name in enumerate(odd)}), odd)


def test_wrong_axes_are_refused_where_they_are_made() -> None:
    """A name that is not an identifier, and a flag that is none, are refused where the axis is made."""
    for name in ("two words", "", "1st", None, 3, torch.tensor(1)):
        with pytest.raises(ValueError, match="the name of an axis is an identifier"):
            Axis(name)  # type: ignore[arg-type] # pyright: ignore - what is refused
    for fixed in ("no", 1, None):
        with pytest.raises(TypeError, match="axis 'PAGES': fixed is True or False"):
            Axis("PAGES", fixed=fixed)  # type: ignore[arg-type] # pyright: ignore - what is refused


NO_DTYPES: list[Any] = [
    *("int64", "torch.int64", int, np.int64, None, 3, [torch.int64], torch.quint8),
    *(Role("mine", "int64"), Role("mine", torch.int16, accepts=torch.int64), Role(3, torch.int64)),  # type: ignore[arg-type]
    *(Role("mine", torch.quint8), Role("mine", torch.int16, accepts=("int64",))),  # type: ignore[arg-type]
]


async def coroutine(one: Any) -> Any:
    """What would hand out a coroutine, and no value."""
    return one


def generator(one: Any) -> Iterator[Any]:
    """What would hand out an iterator, and no value."""
    yield one


def function(of: str) -> Any:
    """A function with these parameters."""
    return eval(f"lambda {of}: 1")  # noqa: S307 - a text of this file


NO_FUNCTIONS: list[Any] = [function(""), function("one, two"), function("*, one"), coroutine, generator]
NO_VALUES: list[Any] = [
    *("zero", b"0", 1j, torch.tensor(0), [0], (0,), {}, object(), np.array(0), np.datetime64(0, "s"), torch.int64),
    *(FillRole("mine", "0"), FillRole("mine", None), FillRole(3, 0)),  # type: ignore[arg-type]
]
NO_FLAGS: list[Any] = ["no", "yes", "", 0, 1, None, np.True_, [], torch.tensor(True)]  # noqa: FBT003 - the point
NO_SIZES: list[Any] = [-1, 1.5, True, None, "BATCH", [BATCH], (BATCH,), 2**63, np.float64(2), torch.tensor(2)]
BAD: dict[str, list[Any]] = {
    "dtype": NO_DTYPES,
    "shape": NO_SIZES,
    "pad": [*NO_VALUES, *NO_FUNCTIONS, *map(once, NO_VALUES)],
    "starts": [*NO_VALUES, *NO_FUNCTIONS, once(0), keep("why")],
    "poison": ["old", "", [0], 3, True, {0}, *NO_FUNCTIONS, *((value,) for value in NO_VALUES)],
    "value": [*NO_VALUES, None, *NO_FUNCTIONS],
    "placement": ["gpu", "cuda", "DEVICE", None, 3, True, ["host"], torch.device("cpu")],
    "when": [True, False, 3, "", "deep.", ".on", ["on"], torch.tensor(1), *NO_FUNCTIONS],
    "source": [3, True, "", "two words", "a..b", "a.", ["ids"], torch.int64, torch.tensor(1), *NO_FUNCTIONS],
    "converts": [torch.int32, [torch.int32], ("int32",), (torch.qint8,), (torch.int32, None), None, 3, "int32"],
    "limit": [-1, 1.5, "4", True, [4], (4,), np.float32(3), np.int8(-1), 2**70],
    "argument": [3, True, "two words", "", "lambda", "None", b"lens", ["lens"], torch.int64],
    "default": [0, False, "None", torch.zeros(4), attrs.Factory(list), []],
    "init": [True, 1, "no", torch.tensor(1), "False"],
    "function": [3, "step", None, max, print, torch.add, coroutine, generator, *map(function, ("*a", "**a", "a, /"))],
    **dict.fromkeys(("strided", "rewritten", "restored"), NO_FLAGS),
}


def test_every_unsuitable_value_is_told_by_its_slot() -> None:
    """One class with a slot for each unsuitable value there is: all faults at once, in order, each by its slot."""
    every = [(parameter, value) for parameter, values in BAD.items() for value in values]
    makers: dict[str, Any] = {
        "argument": functools.partial(copied, BATCH, pad=0, placement="host"),
        **dict.fromkeys(("value", "init"), lambda value=0, **given: constant(value, **given)),
        "function": computed,
        "shape": lambda shape, **given: copied(shape, pad=0, **given),
    }
    usual = functools.partial(copied, BATCH, pad=0)
    fields = {
        f"slot_{place}": makers.get(parameter, usual)(**{"dtype": torch.int64, parameter: value})
        for place, (parameter, value) in enumerate(every)
    }
    faults = refused(declared, **fields)
    assert len(faults) == len(every)
    for place, fault in enumerate(faults):
        assert f"slot 'slot_{place}': {every[place][0]}=" in fault


def test_dtypes_that_torch_cannot_fill_are_refused() -> None:
    """A dtype that torch fills and copies on the CPU, without a warning, is taken; every other one is refused."""
    for dtype in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
        with nullcontext() if is_filled_and_copied(dtype) else pytest.raises(DeclarationErrors):
            declared(ids=copied(BATCH, dtype=dtype, pad=keep("the test says so")))


def is_filled_and_copied(dtype: torch.dtype) -> bool:
    """Ask torch."""
    if dtype == torch.complex32:  # torch warns of it, but only once
        return False
    try:
        filled = torch.empty(3, dtype=dtype, device="cpu").fill_(1)
        copy_each: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - what fills call
        copy_each([torch.empty_like(filled)], [filled])
        return torch.equal(torch.empty_like(filled).copy_(filled), filled)
    except (RuntimeError, UserWarning):
        return False


HELD: dict[str, Callable[[], Any]] = {
    "list": lambda: [rows(), rows()],
    "tuple": lambda: (rows(),),  # what a comma behind a slot makes of it
    "dict": lambda: {"first": rows()},
    "set": lambda: {rows().metadata["slotgraph.slot"]},
    "nested": lambda: [{"first": [1, (rows(),)]}],
}


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("note", [None, list, Any], ids=["bare", "list", "Any"])
def test_slots_in_containers_are_refused(kind: str, note: Any) -> None:
    """A container of slots declares none of them: in the class, as an attrs default, in a mixin, or set later."""
    notes = {} if note is None else {"layers": note}
    [fault] = refused(declared, annotated=notes, layers=HELD[kind]())
    assert "'layers': a " in fault
    assert "of slots" in fault
    assert ("comma" in fault) == (kind == "tuple")
    assert ": torch.Tensor = copied(...)" in fault
    if note is not None and kind != "set":
        [fault] = refused(declared, annotated=notes, layers=attrs.field(default=HELD[kind]()))
        assert "'layers': a " in fault
    mixin = type("Mixin", (), {"layers": HELD[kind]()})
    [fault] = refused(types.new_class, "Made", (mixin, Base))
    assert "'layers': Mixin, which is not a declaration, has it" in fault
    [fault] = refused(setattr, declared(), "layers", HELD[kind]())
    assert "would lose slots" in fault


def test_containers_without_slots_stay_what_they_are() -> None:
    """Class attributes of any other kind stay what they are, one that holds itself included."""
    endless: list[Any] = []
    endless.append(endless)
    made = declared(annotated={}, names=["ids"], table={"ids": 1}, endless=endless, text="ids", numbers=range(2**40))
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
def test_an_annotation_makes_no_slot_optional(note: Any, maker: str) -> None:
    """An annotation does not make a slot optional: None in that of a slot which is always there is refused."""
    [fault] = refused(declared, annotated={"extra": note}, extra=MAKERS[maker]())
    assert "'extra'" in fault
    assert "default=None or when=" in fault
    [fault] = refused(declared, annotated={"extra": note}, extra=rows(pad=None, default=None))
    assert "no tail rule" in fault


@pytest.mark.parametrize("note", NONES, ids=repr)
def test_slots_that_may_be_absent_may_be_annotated_with_none(note: Any) -> None:
    """A slot that is optional, or exists by a setting, may be None; so may any field."""
    notes = {"extra": note, "other": note, "label": note}
    made = declared(annotated=notes, extra=rows(default=None), other=rows(when="on"), label=None)
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
def test_a_default_that_can_be_changed_is_refused(default: Any) -> None:
    """A field's default that can be changed in place is refused: a graph could not tell what it was captured with."""
    for value in (default, attrs.field(default=default)):
        [fault] = refused(declared, annotated={"options": object}, options=value)
        assert f"field 'options': its default, of type {type(default).__name__}, " in fault


@pytest.mark.parametrize("default", FIXED, ids=lambda one: type(one).__name__)
def test_a_default_that_cannot_be_changed_is_taken(default: Any) -> None:
    """A default that cannot be changed, or is an identity, is the value that graphs are captured with."""
    made = declared(annotated={"options": object}, options=default)
    assert made.slotgraph.fields["options"].default is default


def test_a_factorys_default_is_compared_by_value() -> None:
    """A factory's default is compared by value: a batch that changes its own runs eagerly, and no other batch does."""
    made = declared(annotated={"options": dict[str, int]}, options=attrs.field(factory=lambda: {"scale": 2}))

    def step(view: Any) -> torch.Tensor:
        scaled: torch.Tensor = view.ids * view.options["scale"]
        return scaled

    runner = decoder(made, step, buckets=[4], backend="cpu-capture")
    ids = torch.tensor([3, 5])
    batch = made(ids=ids)
    for scale, path in ((2, "graph"), (7, "eager"), (2, "graph")):
        batch.options["scale"] = scale
        assert runner.decide(batch).path == path
        assert runner(batch).tolist() == [3 * scale, 5 * scale]
        view = runner.fill({"ids": ids})
        view.options["scale"] = 11  # this view's own
        assert runner({"ids": ids}).tolist() == [6, 10]


def test_factories_that_take_the_object_are_refused() -> None:
    """What needs an object of the class cannot be made for a mapping."""
    for value in (
        attrs.field(default=attrs.Factory(lambda self: self.ids, takes_self=True)),
        attrs.field(default=1, converter=attrs.Converter(lambda value, self: value, takes_self=True)),
    ):
        [fault] = refused(declared, annotated={"options": object}, options=value)
        assert "field 'options': its " in fault
        assert "leave takes_self out" in fault


def deaf() -> type[Inputs]:
    """A declaration whose subclasses are not made."""

    class Deaf(Base):
        def __init_subclass__(cls, **_: Any) -> None:
            """Forget super()."""

    return Deaf


SUBCLASSES: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown keyword": (lambda: types.new_class("Made", (Base,), {"dorp": ["ids"]}), "did you mean 'drop'?"),
    "two of one alias": (
        lambda: declared(annotated={"a": int, "b": int}, a=attrs.field(default=1), b=attrs.field(default=1, alias="a")),
        "attrs cannot make a class of it",
    ),
    "alias that is no name": (
        lambda: declared(annotated={"a": int}, a=attrs.field(default=1, alias="not one")),
        "attrs cannot make a class of it",
    ),
    "attribute hooks": (
        lambda: declared(annotated={"a": int}, a=attrs.field(default=1, converter=int), __setattr__=lambda *_: None),
        "attrs cannot make a class of it",
    ),
    "no annotation's name": (lambda: declared(annotated={5: int}), "attrs cannot make a class of it"),  # type: ignore[dict-item]
    "converter": (
        lambda: declared(annotated={"a": int}, a=attrs.field(default="x", converter=int)),
        "field 'a': its converter does not take its default: field 'a': invalid literal for int()",
    ),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_what_attrs_refuses_is_a_fault_of_the_declaration(name: str) -> None:
    """Whatever is wrong with a subclass is a fault of the declaration, also where Python or attrs says it first."""
    make, said = SUBCLASSES[name]
    [fault] = refused(make)
    assert fault.startswith("Made")
    assert said in fault


@pytest.mark.parametrize("make", [EagerRunner, DecodeRunner])
def test_a_runner_refuses_a_class_that_was_not_made(make: Any) -> None:
    """A runner refuses a class whose definition failed, and one that a base kept from being made."""
    refused(declared, annotated={"wrong": torch.Tensor}, wrong=rows(pad=None))
    broken = Base.__subclasses__()[-1]
    assert broken.__name__ == "Made"

    class Lost(deaf()):  # type: ignore[misc] # a class made at run time
        other: torch.Tensor = rows()

    for kind in (broken, Lost):
        with pytest.raises(DeclarationError, match=f"{kind.__name__} is no valid declaration"):
            make(kind, lambda view: view.ids, backend="cpu")


def test_every_fault_is_shown() -> None:
    """The text of the group has each fault on a line of its own: loggers and short reports show nothing else."""
    notes: dict[str, Any] = dict.fromkeys(("a", "b", "c"), torch.Tensor)
    with pytest.raises(DeclarationErrors) as found:
        declared(annotated=notes, a=rows(pad=None), b=rows(dtype="int"), c=[rows()])
    lines = str(found.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("Made breaks 3 rules: ")
    for fault in found.value.exceptions:
        assert sum(str(fault) in line for line in lines) == 1
    part = found.value.subgroup(lambda error: isinstance(error, DeclarationError) and "'b'" in str(error))
    assert part is not None
    assert "'b'" in str(part)
    assert "'a'" not in str(part)
