"""Declarations that are wrong: all faults at once, each with the slot and the way out; no class loses a slot."""

import dataclasses
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import attr
import attrs
import numpy as np
import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, EagerRunner, Inputs, computed, constant, copied, keep, output
from slotgraph.dataflow.errors import CycleError, DeclarationError, DeclarationErrors
from slotgraph.errors import ComputeError
from slotgraph.extend import FillRole, Role, Slot, once
from tests.runners.models import PlainInputs, assert_right, plain_step, random_batch


def ids_slot(pad: int = 0) -> Any:
    """A slot over tokens."""
    return copied(TOKENS, dtype=torch.int64, pad=pad)


def of(function: Any) -> Any:
    """A slot over tokens that is computed."""
    return computed(function, shape=TOKENS, dtype=torch.int64)


def declared(base: type[Inputs] | None = None, /, **fields: Any) -> Any:
    """A declaration with these fields beside those of another one."""

    def body(space: dict[str, Any]) -> None:
        space.update(fields, __annotations__=dict.fromkeys(fields, torch.Tensor))

    return types.new_class("Made", (base or Base,), {}, body)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown need": (
        {"total": of(lambda weigths: weigths)},
        r"slot 'total': it needs 'weigths', which is neither .*; did you mean 'weights'\?",
    ),
    "cycle": (
        {"first": of(lambda third: third), "second": of(lambda first: first), "third": of(lambda second: second)},
        r"slots need each other in a circle: .*(first -> third|third -> second|second -> first).*break it",
    ),
    "cycle of one": ({"again": of(lambda again: again)}, r"circle: again -> again"),
    "no tail rule": (
        {"bare": copied(TOKENS, dtype=torch.int64)},
        r"slot 'bare': no tail rule: say pad=value, pad=keep\(.*\) or pad=once\(value\)",
    ),
    "needs an output": (
        {"logits": output(TOKENS, dtype=torch.int64), "best": of(lambda logits: logits)},
        r"slot 'best': it needs 'logits', an output",
    ),
    "frozen host value": (  # a function in the graph would see the step of the capture for ever
        {"shifted": of(lambda ids, step: ids + step.live(BATCH))},
        r"slot 'shifted': .*'step' would be frozen at capture: put what it takes from 'step' into a slot",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_declaration(name: str) -> None:
    """A wrong declaration is refused where it stands, by the slot's name and with the way out; its base goes on."""
    fields, says = WRONG[name]
    with pytest.raises(DeclarationErrors) as refused:
        declared(PlainInputs, **fields)
    [fault] = refused.value.exceptions
    assert re.search(says, str(fault))
    assert isinstance(fault, CycleError) == name.startswith("cycle")
    batch = random_batch(3, seed=1)
    assert_right(EagerRunner(PlainInputs, plain_step, backend="cpu")(batch), batch)


def test_tail_that_the_dtype_cannot_hold() -> None:
    """A tail's value, or a constant, that its dtype cannot hold is refused, not rounded, wrapped or truncated."""
    misfits: list[tuple[torch.dtype, Any]] = [
        *[(torch.int64, pad) for pad in (0.5, 1.0, True, float("nan"))],
        *((torch.int32, 1 << 31), (torch.int8, -129), (torch.uint8, -1), (torch.bool, 2), (torch.bool, 1.0)),
        *((torch.float16, 1e5), (torch.float32, False)),
    ]
    for dtype, pad in misfits:
        fields = {"ids": copied(BATCH, dtype=dtype, pad=pad), "fixed": constant(pad, shape=BATCH, dtype=dtype)}
        faults = refused(lambda: declared(**fields))  # noqa: B023 - called here
        name = str(dtype).removeprefix("torch.")
        for slot, fault in zip(fields, faults, strict=True):
            assert f"slot '{slot}': {pad!r} does not fit {name}: give a value of that type and range" in fault


def test_every_fault_at_once() -> None:
    """All faults of a declaration arrive together, each for its slot."""
    with pytest.raises(DeclarationErrors, match="Wrong breaks 4 rules") as refused:

        class Wrong(Inputs):
            bare: torch.Tensor = copied(TOKENS, dtype=torch.int64)
            large: torch.Tensor = copied(TOKENS, dtype=torch.int8, pad=1000)
            lost: torch.Tensor = computed(lambda nothing: nothing, shape=1, dtype=torch.int64)
            loop: torch.Tensor = computed(lambda loop: loop, shape=1, dtype=torch.int64)

    faults = " | ".join(map(str, refused.value.exceptions))
    assert all(name in faults for name in ("'bare'", "'large'", "'lost'", "loop -> loop"))
    with pytest.raises(TypeError):
        raise refused.value.exceptions[0]


def test_axis_that_nothing_tells() -> None:
    """An axis whose rows no source tells is refused when a runner is made, with what to declare."""

    class Untold(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        pages: torch.Tensor = constant(1, shape=Axis("PAGES"), dtype=torch.int64)

    with pytest.raises(
        DeclarationError, match="no copied slot tells the size of PAGES: declare one with a dim of PAGES"
    ):
        EagerRunner(Untold, lambda view: view.ids, backend="cpu")


T = TypeVar("T")


def rows(pad: int = 0) -> Any:
    """A slot, a new one at each call."""
    return copied(BATCH, dtype=torch.int64, pad=pad)


class Base(Inputs):
    ids: torch.Tensor = rows()
    tag: int = 3


def refused(make: Callable[[], Any]) -> list[str]:
    """What is wrong with a declaration, fault by fault."""
    with pytest.raises(DeclarationErrors) as found:
        make()
    return [str(fault) for fault in found.value.exceptions]


def ids_step(view: Any) -> torch.Tensor:
    """A ids_step."""
    return torch.as_tensor(view.ids + 0)


def assert_filled(inputs: type[Inputs], names: list[str]) -> None:
    """Each slot of these names is declared, and holds the batch's rows and a tail."""
    assert sorted(inputs.slotgraph.slots) == sorted(names)
    runner = DecodeRunner(inputs, ids_step, buckets=[4], backend="cpu", progress=False)
    runner.capture()
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


def test_decorators_that_make_a_class_anew() -> None:
    """They would lose its slots, and are refused by the class's name; the class stays as it was."""
    for decorate in DECORATORS:

        class Made(Base):
            more: torch.Tensor = rows(7)

        assert "Made: a subclass of Inputs is an attrs class already" in refused(lambda: decorate(Made))[0]  # noqa: B023 - called here
        assert_filled(Made, ["ids", "more"])
    for slotted in (True, False):
        made = refused(lambda: attrs.make_class("Made", {"more": rows()}, bases=(Base,), slots=slotted))  # noqa: B023
        assert "leave the decorator out, and write a class" in made[0]
    with pytest.raises(DeclarationErrors, match="Base breaks 1 rule"):
        Base.more = rows()  # pyright: ignore[reportAttributeAccessIssue] - the point


class Plain:
    more: torch.Tensor = rows()


@dataclasses.dataclass
class Data:
    more: torch.Tensor = rows()  # noqa: RUF009 - the point


@attrs.define
class Slotted:
    more: torch.Tensor = rows()  # noqa: RUF009 - the point


@attrs.define(slots=False)
class Attrs:
    more: torch.Tensor = rows(5)  # noqa: RUF009 - the point


class Annotated:
    ids: torch.Tensor


class Property:
    @property
    def ids(self) -> int:
        """What would hide the slot."""
        return 3


class Methods:
    def total(self: Any) -> int:
        """What a plain mixin is for."""
        return int(self.ids.sum())


def test_bases_that_are_no_declarations() -> None:
    """Their slots are taken, or the class is refused by the slot's name, wherever they stand among the bases."""
    for way in (1, -1):
        for mixin in (Plain, Data, Slotted):
            faults = refused(lambda: types.new_class("Made", (mixin, Base)[::way]))  # noqa: B023 - called here
            assert len(faults) == 1
            assert "slot 'more': " in faults[0]
        assert_filled(types.new_class("Made", (Attrs, Base)[::way]), ["ids", "more"])
        assert_filled(types.new_class("Made", (Annotated, Base)[::way]), ["ids"])
        mixed: Any = types.new_class("Made", (Methods, Base)[::way])
        assert mixed(ids=torch.tensor([4, 5])).total() == 9
    assert "slot 'ids': a base has a property" in refused(lambda: types.new_class("Made", (Property, Base)))[0]


def test_generic_declarations() -> None:
    """A declaration may be generic, and its parametrised forms may be subclassed."""

    class Of(Base, Generic[T]):
        more: torch.Tensor = rows(7)

    class OfInts(Of[int]):
        last: torch.Tensor = rows(8)

    assert_filled(OfInts, ["ids", "more", "last"])


def test_annotations_as_texts() -> None:
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


class Fielded(Inputs):
    ids: int = 3


class Other(Inputs):
    ids: torch.Tensor = rows(1)


class Without(Base, drop=["ids"]):
    more: torch.Tensor = rows()


class Again(Without):
    ids: torch.Tensor = rows(2)


def test_bases_that_say_different_things() -> None:
    """A slot beside another, a field or a drop of its name is refused, in either order; a later declaration wins."""
    for rival in (Fielded, Other):
        for bases in ((Base, rival), (rival, Base)):
            faults = refused(lambda: types.new_class("Made", bases))  # noqa: B023 - called here
            assert len(faults) == 1
            assert "'ids': " in faults[0]
            assert "declare it again to say which is meant, or drop it" in faults[0]
    assert_filled(types.new_class("Made", (Again, Without)), ["ids", "more"])
    made: Any = types.new_class("Made", (Other, Without), {"drop": ["ids"]})
    assert list(made.slotgraph.slots) == ["more"]


def test_slots_that_something_else_takes_the_place_of() -> None:
    """A base's slot stays one: a value, a field, an annotation or a method in its place is refused by its name."""

    class Four(Inputs):
        a: torch.Tensor = rows()
        b: torch.Tensor = rows()
        c: torch.Tensor = rows()
        d: torch.Tensor = rows()
        e: int = 3

    def make() -> None:
        class Made(Four):
            a = 3  # type: ignore[assignment] # pyright: ignore - what is refused
            b: int = 3  # type: ignore[assignment] # pyright: ignore - what is refused
            c: torch.Tensor  # pyright: ignore - what is refused

            def d(self) -> int:  # type: ignore[override,misc] # pyright: ignore - what is refused
                """A method of the slot's name."""
                return 3

            e = 5  # pyright: ignore - what is refused

    faults = refused(make)
    assert len(faults) == 5
    for name in "abcde":
        assert any(f"'{name}': a base declares" in fault for fault in faults)

    class Dropped(Four, drop=["a", "b"]):
        b: int = 3  # type: ignore[assignment] # pyright: ignore - another one

    assert list(Dropped.slotgraph.slots) == ["c", "d"]
    assert Dropped.slotgraph.fields == {"b": 3, "e": 3}


def test_slots_that_are_not_written_as_fields() -> None:
    """A specifier without a call, a slot object by itself, one without an annotation: all refused together."""
    kind: Slot = Base.slotgraph.slots["ids"]

    def make() -> None:
        class Made(Inputs):
            a = rows()
            b = kind
            c: torch.Tensor = kind  # type: ignore[assignment] # pyright: ignore - what is refused
            d: torch.Tensor = copied  # type: ignore[assignment] # pyright: ignore - what is refused
            e: ClassVar[torch.Tensor] = rows()
            f: torch.Tensor = attrs.field(default=kind)  # type: ignore[assignment] # pyright: ignore - what is refused
            g = attrs.field()

    faults = refused(make)
    assert len(faults) == 7
    for name in "abcdefg":
        assert any(f"Made.{name}: " in fault for fault in faults)


WRONG_NAMES = ["a.b", "two words", "", "1st", "class", "None", "_ids", "__ids", "__init__", "__class__", "_", "self"]
WRONG_NAMES += [
    "_slotgraph_view",
    "slotgraph",
    "narrow",
    "placeholder",
    "step",
    "settings",
    "out",
    "attr_dict",
    "NOTHING",
]


def test_names() -> None:
    """A name that Python, attrs or the class itself needs is refused, all together; every other one is filled."""

    def body(names: list[str]) -> Callable[[dict[str, Any]], None]:
        return lambda space: space.update(
            {name: rows(place) for place, name in enumerate(names)}, __annotations__=dict.fromkeys(names, torch.Tensor)
        )

    faults = refused(lambda: types.new_class("Made", (Inputs,), {}, body([*WRONG_NAMES, "ids"])))
    assert len(faults) == len(WRONG_NAMES)
    for name in WRONG_NAMES:
        assert any(f"slot {name!r}: the name " in fault for fault in faults)
    odd = ["ids", "ranks", "get", "keys", "items", "object", "dict", "setattr", "type", "match", "cls", "axis", "ß"]
    assert_filled(types.new_class("Made", (Inputs,), {}, body(odd)), odd)


def test_drop() -> None:
    """What is no list of names of a base is refused."""
    wrong = [("ids", "drop='ids'"), (3, "drop=3"), (None, "drop=None"), ([3], "drops 3"), ([[]], "drops []")]
    for drop, said in [*wrong, (["idz"], "Made drops 'idz', which no base declares")]:
        assert said in refused(lambda: types.new_class("Made", (Base,), {"drop": drop}))[0]  # noqa: B023 - called here


def test_zero_and_one_for_bools() -> None:
    """0 and 1 are taken for a bool slot, its tail and its start, by every lowering."""

    class Masks(Inputs):
        ids: torch.Tensor = rows()
        mask: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=1)
        other: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=0, starts=1)
        role: torch.Tensor = copied(BATCH, dtype=Role("mask", torch.bool), pad=1)
        fixed: torch.Tensor = constant(1, shape=BATCH, dtype=torch.bool)
        count: torch.Tensor = computed(lambda step: step.live(BATCH) - 1, shape=1, dtype=torch.bool)

    for lowering in ("slot_by_slot", "foreach", "fused", "in_graph"):
        runner = DecodeRunner(
            Masks, lambda view: view.ids, buckets=[4], backend="cpu", lowering=lowering, progress=False
        )
        runner.capture()
        live = torch.tensor([True, False])
        view = runner.fill({"ids": [5, 6], "mask": live, "other": live, "role": live})
        assert view.mask.tolist() == view.role.tolist() == [True, False, True, True]
        assert view.other.tolist() == [True, False, False, False]
        assert view.fixed.tolist() == [True] * 4
        assert view.count.tolist() == [True]


def test_values_that_only_a_runner_knows() -> None:
    """Sizes that do not fit a slot, and functions that raise, are refused as the runner is made, by the slot's name."""
    width = Axis("WIDE", fixed=True)

    def fail(_: Any) -> Any:
        raise KeyError("nothing")

    wide: list[dict[str, Any]] = [
        {"pad": width},
        {"pad": width, "starts": 0},
        {"pad": 0, "starts": width},
        {"pad": 0, "poison": (width,)},
    ]
    for given in wide:
        made = declared(lens=copied(TOKENS, dtype=torch.int8, **given))
        with pytest.raises(ComputeError, match="slot 'lens': 300 does not fit int8"):
            DecodeRunner(made, lambda view: view.ids, backend="cpu", max_batch=4, sizes={width: 300})
    for field, error in (
        (constant(fail, shape=BATCH, dtype=torch.int8), ComputeError),
        (copied(BATCH, dtype=torch.int8, pad=0, when=fail), DeclarationError),
    ):
        with pytest.raises(error, match=r"slot 'lens': its function.* raised KeyError.*: 'nothing'"):
            DecodeRunner(declared(lens=field), lambda view: view.ids, backend="cpu", max_batch=4, settings={})


def test_axes() -> None:
    """A name that is no identifier, and a flag that is none, are refused where the axis is made."""
    for name in ("two words", "", "1st", None, 3, torch.tensor(1)):
        with pytest.raises(ValueError, match="the name of an axis is an identifier"):
            Axis(name)  # type: ignore[arg-type] # pyright: ignore - what is refused
    for fixed in ("no", 1, None):
        with pytest.raises(TypeError, match="axis 'PAGES': fixed is True or False"):
            Axis("PAGES", fixed=fixed)  # type: ignore[arg-type] # pyright: ignore - what is refused


copy_each: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - what fills call


def named(*names: str) -> list[torch.dtype]:
    """The dtypes of these names that this torch has."""
    return [dtype for name in names if isinstance(dtype := getattr(torch, name, None), torch.dtype)]


WHOLE = named("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = named("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
NO_DTYPES: list[Any] = [
    *named("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits4x2", "complex32"),
    *named("float4_e2m1fn_x2", "uint1", "uint4", "uint7", "int1", "int4"),
    *("int64", "torch.int64", int, np.int64, None, 3, [torch.int64]),
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


def told(fields: dict[str, Any]) -> list[str]:
    """The faults of a declaration of these fields; none where it is good."""
    try:
        declared(**fields)
    except DeclarationErrors as wrong:
        return [str(fault) for fault in wrong.exceptions]
    return []


def test_every_unsuitable_value() -> None:
    """One class with a slot for each unsuitable value there is: all faults at once, in order, each by its slot."""
    every = [(parameter, value) for parameter, values in BAD.items() for value in values]
    fields: dict[str, Any] = {}
    for place, (parameter, value) in enumerate(every):
        given: dict[str, Any] = {"dtype": torch.int64, parameter: value}
        if parameter == "argument":
            fields[f"slot_{place}"] = copied(BATCH, pad=0, placement="host", **given)
        elif parameter in ("value", "init"):
            fields[f"slot_{place}"] = constant(given.pop("value", 0), **given)
        elif parameter == "function":
            fields[f"slot_{place}"] = computed(given.pop("function"), **given)
        elif parameter == "shape":
            fields[f"slot_{place}"] = copied(given.pop("shape"), pad=0, **given)
        else:
            fields[f"slot_{place}"] = copied(BATCH, **{"pad": 0, **given})
    faults = told(fields)
    assert len(faults) == len(every)
    for place, fault in enumerate(faults):
        assert f"slot 'slot_{place}': {every[place][0]}=" in fault


def test_every_dtype() -> None:
    """A dtype that torch fills and copies on the CPU, without a warning, is taken; every other one is refused."""
    for dtype in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
        faults = told({"ids": copied(BATCH, dtype=dtype, pad=keep("the test says so"))})
        assert bool(faults) == (not is_filled_and_copied(dtype)), dtype


def is_filled_and_copied(dtype: torch.dtype) -> bool:
    """Ask torch."""
    if dtype == torch.complex32:  # torch warns of it, but only once
        return False
    try:
        filled = torch.empty(3, dtype=dtype, device="cpu").fill_(1)
        copy_each([torch.empty_like(filled)], [filled])
        return torch.equal(torch.empty_like(filled).copy_(filled), filled)
    except (RuntimeError, UserWarning):
        return False
