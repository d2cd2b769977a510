"""Random parameters of every specifier, suitable ones and others: each fault is told at the class, and all else runs.

A parameter is drawn as one that suits or as one that does not. Where some do not, the class is refused with one fault
for each, by the slot's name and the parameter's. Where all do, a batch runs through every lowering to the same bytes.
"""

import types
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotgraph import (
    BATCH,
    TOKENS,
    Axis,
    DecodeRunner,
    FillRole,
    Inputs,
    Role,
    Slot,
    computed,
    constant,
    copied,
    host_parameter,
    keep,
    once,
    output,
    side,
    staged,
)
from slotgraph.errors import DeclarationErrors
from tests.strategies import noise, same_bytes

HIDDEN, CONTEXT = Axis("HIDDEN", fixed=True), Axis("CONTEXT", fixed=True)
SIZES = {HIDDEN: 2, CONTEXT: 500}
SETTINGS = {"on": True, "deep": {"on": 1}}
LIVE = 3
LOWERINGS = ("slot_by_slot", "foreach", "fused", "in_graph")
BOTH = [(backend, lowering) for backend in ("cpu", "cpu-capture") for lowering in LOWERINGS]


int64: Any = np.int64
copy_each: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - what fills call


def named(*names: str) -> list[torch.dtype]:
    """The dtypes of these names that this torch has."""
    return [dtype for name in names if isinstance(dtype := getattr(torch, name, None), torch.dtype)]


WHOLE = named("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = named("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
DTYPES: list[Any] = [*WHOLE, *FLOATS, torch.bool, torch.complex64, Role("mine", torch.int16, accepts=(torch.int64,))]
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
NO_SIZES: list[Any] = [
    -1,
    1.5,
    True,
    None,
    "BATCH",
    [BATCH],
    (BATCH,),
    2**63,
    np.float64(2),
    torch.tensor(2),
    np.int8(-2),
]
SIZES_OF_SHAPES: list[Any] = [1, 3, np.int64(2), np.uint8(1), HIDDEN, HIDDEN * 2 + 1]
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


def numbers(dtype: torch.dtype) -> list[Any]:
    """Values that slots of a dtype can be full of."""
    if dtype == torch.bool:
        return [True, False, 0, 1, np.True_, np.int64(1), FillRole("mine", default=True), FillRole("mine", 0)]
    found: list[Any] = [0, 1, 7, np.int8(3), np.uint64(5), FillRole("mine", 2), FillRole("mine", int64(4)), HIDDEN]
    return found if dtype in WHOLE else [*found, 0.5, -2.0, np.float32(0.25), np.float64(-1.5), np.longdouble(2)]


def misfits(dtype: torch.dtype) -> list[Any]:
    """Numbers that they cannot be full of."""
    if dtype == torch.bool:
        return [2, -1, 0.0, 1.0, np.float32(1), FillRole("mine", 2)]
    if dtype in WHOLE:
        return [0.5, 1.0, True, np.True_, np.float64(2), 2**64, -(2**63) - 1, FillRole("mine", default=True)]
    return [True, False, np.False_, 10**400]


@attrs.define
class Drawn:
    """One slot's parameters, and what the faults say of those among them that do not suit."""

    draw: Any
    given: dict[str, Any] = attrs.field(factory=dict)
    planted: list[str] = attrs.field(factory=list)

    def one_of(self, values: list[Any]) -> Any:
        """Draw a value."""
        return self.draw(st.sampled_from(values))

    def may(self, chance: int) -> bool:
        """True once in so many times."""
        return bool(self.draw(st.integers(1, chance)) == 1)

    def parameter(self, name: str, good: list[Any], *, always: bool = False, misfit: list[Any] | None = None) -> Any:
        """Draw a parameter, or leave it out."""
        if self.may(12):
            self.planted.append(f"{name}=")
            self.given[name] = self.one_of(BAD[name])
        elif misfit and "does not fit" not in self.planted and self.may(15):
            self.planted.append("does not fit")
            self.given[name] = (self.one_of(misfit),) if name == "poison" else self.one_of(misfit)
        elif always or self.may(2):
            self.given[name] = self.one_of(good)
        return self.given.get(name)

    def shape(self, *, dims: int = 2) -> tuple[Any, ...]:
        """Draw the sizes of a slot of so many dims at most."""
        leads: list[Any] = [BATCH, TOKENS, BATCH * 2, TOKENS + 1, *SIZES_OF_SHAPES]
        sizes = [self.one_of(SIZES_OF_SHAPES if place else leads) for place in range(self.draw(st.integers(0, dims)))]
        if self.may(12):
            self.planted.append("shape=")
            sizes.insert(self.draw(st.integers(0, len(sizes))), self.one_of(BAD["shape"]))
        return tuple(sizes)

    def dtype(self, good: list[Any]) -> torch.dtype | None:
        """Draw the dtype; None where it is none, so that no value can be held to it."""
        found = self.parameter("dtype", good, always=True)
        if "dtype=" in self.planted:
            return None
        return found.default if isinstance(found, Role) else found


def copy_of(drawn: Drawn, name: str, *, parameter: bool) -> Any:
    """A slot that is copied from the batch."""
    shape = drawn.shape(dims=1 if parameter else 2)
    dtype = drawn.dtype([torch.int32, torch.int64] if parameter else DTYPES)
    values, misfit = numbers(dtype or torch.int64), misfits(dtype) if dtype else []
    drawn.parameter("pad", [*values, *map(once, values), keep("the test says so")], always=True, misfit=misfit)
    is_once = isinstance(drawn.given["pad"], type(once(0)))
    if not is_once:
        drawn.parameter("starts", [None, *values], misfit=misfit)
    drawn.parameter("poison", [None, "stale", (), tuple(values)], misfit=misfit)
    called = [lambda batch: batch.get(f"called_{name}")]
    drawn.parameter("source", [None, f"nested.{name}", side(f"beside.{name}"), *called])
    drawn.parameter("strided", [True, False])
    drawn.parameter("converts", [(), (torch.int32,), (torch.int64, torch.uint8)])
    drawn.parameter("when", [None, "on", "deep.on", lambda found: found["on"]])
    drawn.parameter("default", [None])
    if dtype in WHOLE:
        drawn.parameter("limit", [None, 300, np.int16(300), CONTEXT, CONTEXT * 2])
    if parameter:
        drawn.parameter("argument", [None, f"argument_of_{name}"])
        return host_parameter(*shape, **drawn.given)
    drawn.parameter("placement", ["device", "host"])
    if drawn.parameter("rewritten", [True, False]) is not True and not is_once:
        drawn.parameter("restored", [True, False])
    return copied(*shape, **drawn.given)


def other_of(drawn: Drawn, kind: str) -> Any:
    """A slot that no batch brings."""
    shape, dtype = drawn.shape(), drawn.dtype(DTYPES)
    values, misfit = numbers(dtype or torch.int64), misfits(dtype) if dtype else []
    drawn.parameter("placement", ["device", "host"])
    drawn.parameter("when", [None, "on", lambda found: found["on"]])
    drawn.parameter("init", [False])
    if kind == "staged":
        drawn.parameter("pad", [*values, keep("the test says so")], always=True, misfit=misfit)
        drawn.parameter("poison", [None, "stale", (), tuple(values)], misfit=misfit)
        return staged(*shape, **drawn.given)
    if kind == "output":
        return output(*shape, **drawn.given)
    if kind == "constant":
        drawn.parameter("value", values, always=True, misfit=misfit)
        return constant(drawn.given.pop("value"), shape=shape, **drawn.given)
    functions = [lambda out: out.fill_(1), lambda step, out: out.fill_(step.live(BATCH) > 0)]
    drawn.parameter("function", functions, always=True)
    return computed(drawn.given.pop("function"), shape=shape, **drawn.given)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Fields of a declaration that tells its axes, and what is wrong with them: pairs of a slot's name and a fault."""
    fields: dict[str, Any] = {
        "rows": copied(BATCH, dtype=torch.int64, pad=0),
        "ids": copied(TOKENS, dtype=torch.int64, pad=0),
    }
    planted: list[tuple[str, str]] = []
    kinds = ["copied", "copied", "parameter", "staged", "output", "constant", "computed"]
    for index in range(draw(st.integers(1, 4))):
        name, kind, drawn = f"slot_{index}", draw(st.sampled_from(kinds)), Drawn(draw)
        is_copied = kind in ("copied", "parameter")
        fields[name] = copy_of(drawn, name, parameter=kind == "parameter") if is_copied else other_of(drawn, kind)
        planted += [(name, fault) for fault in drawn.planted]
    return fields, planted


def declaration_of(fields: dict[str, Any]) -> type[Inputs]:
    """A declaration class of these fields."""

    def body(namespace: dict[str, Any]) -> None:
        namespace["__annotations__"] = dict.fromkeys(fields, torch.Tensor)
        namespace.update(fields)

    made: type[Inputs] = types.new_class("Made", (Inputs,), {}, body)
    return made


def told(fields: dict[str, Any]) -> list[str]:
    """The faults of a declaration of these fields; none where it is good."""
    try:
        declaration_of(fields)
    except DeclarationErrors as refused:
        return [str(fault) for fault in refused.exceptions]
    return []


@given(bodies(), st.integers(0, 1000))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_each_fault_is_told(drawn: tuple[dict[str, Any], list[tuple[str, str]]], seed: int) -> None:
    """A class is refused with one fault for each parameter that does not suit, and no other."""
    fields, planted = drawn
    faults = told(fields)
    for name, fault in planted:
        assert any(f"slot {name!r}: " in one and fault in one for one in faults), (name, fault, faults)
    assert len(faults) == len(planted), (faults, planted)
    if not planted:
        run(declaration_of(fields), seed)


def test_every_unsuitable_value() -> None:
    """One class with a slot for each unsuitable value there is: all faults at once, in order, each by its slot."""
    every = [(parameter, value) for parameter, values in BAD.items() for value in values]
    fields: dict[str, Any] = {}
    for place, (parameter, value) in enumerate(every):
        given: dict[str, Any] = {"dtype": torch.int64, parameter: value}
        if parameter == "argument":
            fields[f"slot_{place}"] = host_parameter(BATCH, pad=0, **given)
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


def source_of(kind: Slot, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random data for a slot, of a dtype and a layout that it takes."""
    own = kind.dtype.default if isinstance(kind.dtype, Role) else kind.dtype
    dtypes = [own, *kind.converts_from()]
    data = noise((*shape, 2), dtypes[seed % len(dtypes)], seed)[..., 0]
    return data if kind.takes_strided() and seed % 3 else data.contiguous()


def batch_of(inputs: type[Inputs], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch of LIVE requests and what comes beside it; every third optional slot is left out."""
    live = {BATCH: LIVE, TOKENS: LIVE, **SIZES}
    batch: dict[str, Any] = {"nested": {}}
    beside: dict[str, Any] = {}
    for place, (name, kind) in enumerate(inputs.slotgraph.slots.items()):
        if kind.reads(name) is None or (kind.optional and (seed + place) % 3 == 0):
            continue
        data = source_of(kind, tuple(size.at(live) for size in kind.shape), seed + place)
        where = str(kind.reads(name))
        batch[name] = batch["nested"][name] = batch[f"called_{name}"] = data
        beside |= {name: data} if where.startswith("argument") else {}
    reads = [str(kind.reads(name)) for name, kind in inputs.slotgraph.slots.items()]
    return batch, {"beside": beside} if any(source.startswith("argument") for source in reads) else {}


def tripled(view: Any) -> torch.Tensor:
    """A step."""
    return torch.as_tensor(view.rows * 3)


def run(inputs: type[Inputs], seed: int) -> None:
    """A batch through each lowering of the backends on the CPU: the bytes that slot by slot leaves, and no error."""
    batch, beside = batch_of(inputs, seed)
    absent = {name for name, kind in inputs.slotgraph.slots.items() if kind.optional}
    shown: list[dict[str, Any]] = []
    for backend, lowering in BOTH:
        runner = DecodeRunner(
            inputs,
            tripled,
            buckets=[4],
            backend=backend,
            lowering=lowering,
            sizes={axis: size for axis, size in SIZES.items() if axis in inputs.slotgraph.axes},
            settings=SETTINGS,
            progress=False,
            absent=[{name} for name in absent],
        )
        runner.capture()
        view = runner.fill(batch, **beside)
        assert torch.equal(runner.replay(view), batch["rows"] * 3)
        shown.append({name: getattr(view, name) for name in inputs.slotgraph.slots})
    for other in shown[1:]:
        for name, tensor in shown[0].items():
            assert (tensor is None) == (other[name] is None)
            assert tensor is None or same_bytes(tensor, other[name]), name
