"""Hypothesis strategies: random declarations, sizes, batches and step sequences, and the worlds they play in."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from slotgraph import (
    BATCH,
    CACHE_LOC,
    SEQ_LEN_FILL,
    TOKENS,
    Axis,
    Inputs,
    Step,
    computed,
    constant,
    copied,
    keep,
    output,
    staged,
)
from slotgraph.dataflow.axes import Dim, extent
from slotgraph.dataflow.buffers import Buffers, allocate
from slotgraph.dataflow.capabilities import Capabilities, Placement, resolve_dtype
from slotgraph.dataflow.slots import Constant, Slot
from slotgraph.dataflow.sources import look_up
from slotgraph.dataflow.tails import Keep, Once
from slotgraph.extend import DEVICE, HOST, Group, Role, fills, once, side

PAGES = Axis("PAGES")
HIDDEN = Axis("HIDDEN", fixed=True)
KINDS = Group("full", "sliding")
AXES = (BATCH, TOKENS, PAGES)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (torch.bool, *INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64)
Sizes = dict[Axis, int]
NOTHING_GIVEN: Mapping[str, Any] = {}
Empty = Callable[[tuple[int, ...], torch.dtype, Placement], torch.Tensor]


def empty(shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
    """Uninitialised host memory, as a CPU backend gives it."""
    del placement
    return torch.empty(shape, dtype=dtype)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values over the whole of a small range, zeros as rare as any other."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    low = 0 if dtype == torch.uint8 else -100
    return torch.randint(low, 101, shape, generator=generator, dtype=torch.int64).to(dtype)


def draw(low: int, high: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Random whole numbers from low to high."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes; NaN equals itself here."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    a, b = (one.detach().clone(memory_format=torch.contiguous_format).view(-1) for one in (left, right))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def shapes() -> st.SearchStrategy[tuple[int | Axis | Dim, ...]]:
    """Shapes of one to three dims: constants, axes, expressions, the varying dim anywhere, several varying dims."""
    plain: st.SearchStrategy[int | Axis | Dim] = st.sampled_from(AXES)
    size = st.sampled_from([form for axis in AXES for form in (axis, axis * 2, axis * 3, axis + 1)])
    fixed: st.SearchStrategy[int | Axis | Dim] = st.sampled_from([1, 2, 3, HIDDEN])
    one = [(size,), (size, fixed), (fixed, size), (plain, plain), (fixed, plain, fixed), (fixed,)]
    return st.one_of([st.tuples(*dims) for dims in one])


def numbers(dtype: torch.dtype) -> st.SearchStrategy[bool | int | float]:
    """Numbers that a dtype holds exactly."""
    if dtype == torch.bool:
        return st.booleans()
    if dtype.is_floating_point:
        return st.sampled_from([0.0, 1.0, -2.5, float("inf"), float("nan"), -0.0])
    return st.integers(0 if dtype == torch.uint8 else -100, 100)


@st.composite
def tails(draw: st.DrawFn, dtype: torch.dtype) -> Any:
    """Tail rules: a value, a fixed axis, a role, keep, once."""
    value = draw(numbers(dtype))
    rules: list[Any] = [value, once(value), keep("the test says so")]
    if dtype in (torch.int32, torch.int64):
        rules += [HIDDEN, HIDDEN * 2 + 1, SEQ_LEN_FILL]
    return draw(st.sampled_from(rules))


@st.composite
def copied_slots(draw: st.DrawFn, name: str, *, called: bool = True) -> Any:
    """A copied slot or group of any dtype, shape, tail, source and placement. called: a source may be a function."""
    dtype = draw(st.sampled_from(DTYPES))
    role = dtype == torch.int64 and draw(st.booleans())
    converts = draw(st.sampled_from([(), (torch.int64,), (torch.float32, torch.int32)])) if dtype != torch.bool else ()
    optional: dict[str, Any] = {"default": None} if draw(st.booleans()) else {}
    group = draw(st.sampled_from([None, None, KINDS]))
    pads = [draw(tails(dtype)) for _ in range(1 if group is None else 2)]
    pad = pads[0] if group is None else dict(zip(group.names, pads, strict=True))
    called = called and group is None

    def from_batch(batch: Any) -> Any:
        return look_up(batch, f"called_{name}")

    return copied(
        *draw(shapes()),
        dtype=CACHE_LOC if role else dtype,
        pad=pad,
        starts=None if any(isinstance(one, Once) for one in pads) else draw(st.none() | numbers(dtype)),
        source=draw(st.sampled_from([None, None, f"nested.{name}", side(f"beside.{name}"), *[from_batch] * called])),
        placement=draw(st.sampled_from(["device", "host"])),
        strided=draw(st.booleans()),
        converts=converts,
        rewritten=draw(st.booleans()),
        group=group,
        **optional,
    )


@st.composite
def parameters(draw: st.DrawFn, name: str) -> Any:
    """A host parameter: one number or a row of them."""
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    optional: dict[str, Any] = {"default": None} if draw(st.booleans()) else {}
    rows: list[tuple[Axis | Dim, ...]] = [(), (BATCH,), (TOKENS + 1,), (HIDDEN,)]
    return copied(
        *draw(st.sampled_from(rows)),
        dtype=dtype,
        pad=draw(tails(dtype)),
        source=draw(st.sampled_from([None, side(f"beside.{name}")])),
        argument=f"argument_of_{name}",
        converts=draw(st.sampled_from([(), (torch.int64, torch.int32)])),
        placement="host",
        **optional,
    )


@st.composite
def other_slots(draw: st.DrawFn) -> Any:
    """A staged, constant or output slot."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes())

    def counted(step: Step) -> torch.Tensor:
        sizes = [step.padded(Dim.of(size)) for size in shape]
        return torch.arange(torch.Size(sizes).numel()).reshape(sizes)

    kinds = [
        staged(*shape, dtype=dtype, pad=draw(tails(dtype))),
        staged(3, HIDDEN, dtype=dtype, starts=draw(st.none() | numbers(dtype))),
        constant(draw(numbers(dtype)), shape=shape, dtype=dtype),
        constant(counted, shape=shape, dtype=torch.int64),
        output(*shape, dtype=dtype),
    ]
    return draw(st.sampled_from(kinds))


def _twice(step: Step) -> list[int]:
    return [2 * row + step.live(TOKENS) for row in range(step.padded(BATCH))]


def _twice_and_once(step: Step) -> tuple[list[int], int]:
    return _twice(step), step.live(TOKENS)


def _pairs(step: Step) -> torch.Tensor:
    rows, columns = step.padded(BATCH), step.padded(PAGES)
    return torch.arange(rows * columns, dtype=torch.int16).view(rows, columns) + step.live(BATCH)


@st.composite
def computed_slots(draw: st.DrawFn, name: str, bases: Mapping[str, Slot | Mapping[str, Slot]]) -> dict[str, Any]:
    """A computed slot, or two by one call: from sizes, a field or a required slot or group, with or without tails."""

    def made(function: Any, dtype: Any, shape: Any = (), placement: Placement = DEVICE, **options: Any) -> Any:
        varies = any(Dim.of(size).varies for size in (shape if isinstance(shape, tuple) else (shape,)))
        number = torch.int64 if isinstance(dtype, Role) else dtype
        values = tails(number).filter(lambda pad: not isinstance(pad, Keep | Once))
        pad = draw(st.none() | values) if varies else None
        return computed(function, shape=shape, dtype=dtype, pad=pad, placement=placement, **options)

    plain: list[tuple[Any, ...]] = [
        (lambda step: step.live(TOKENS) + 100 * step.padded(TOKENS), torch.int32, 1),
        (_twice, torch.int64, BATCH, HOST),
        (_twice, torch.int64, BATCH),
        (_pairs, torch.int16, (BATCH, PAGES)),
        (lambda tag, step: tag + step.live(BATCH), torch.int64),
    ]
    found = {n: [*kind.values()] if isinstance(kind, Mapping) else [kind] for n, kind in bases.items()}
    needed = {n: s for n, s in found.items() if not s[0].optional and (s[0].reads(n) or s[0].computes())}
    need = draw(st.sampled_from(["", *needed]))
    if not need and draw(st.booleans()):
        function, *like = draw(st.sampled_from(plain))
        again = draw(st.sampled_from([None, ("tag",) if "tag" in inspect.signature(function).parameters else ()]))
        return {name: made(function, *like, again=again)}
    out, names = draw(st.booleans()), draw(st.permutations([name, f"and_{name}"]))
    if not need:
        several = fills(*names)(_twice_and_once if names[0] == name else lambda step: _twice_and_once(step)[::-1])
        places: list[Placement] = [draw(st.sampled_from([DEVICE, HOST])) for _ in names]
        return {
            name: made(several, torch.int64, BATCH, places[0]),
            f"and_{name}": made(several, torch.int64, 1, places[1]),
        }
    slot, given = needed[need][0], ", out" if out else ""
    is_group = len(needed[need]) > 1
    flipped = f"{need}.flip([*range({need}.dim())])"
    like = slot.dtype, slot.shape, slot.placement
    options: dict[str, Any] = {"group": KINDS} if is_group else {}
    if slot.placement == HOST and not is_group:
        options["again"] = draw(st.sampled_from([None, (need,)]))
    if is_group or draw(st.booleans()):
        function = eval(f"lambda {need}{given}: {f'out.copy_({flipped})' if out else flipped}")  # noqa: S307 - a function's parameter must have the slot's own name
        return {name: made(function, *like, **options)}
    texts = {name: flipped, f"and_{name}": f"{need}.clone()"}
    parts = [f"out[{one!r}].copy_({texts[one]})" if out else texts[one] for one in names]
    several = fills(*names)(eval(f"lambda {need}{given}: ({', '.join(parts)})"))  # noqa: S307 - as above
    return {one: made(several, *like, **options) for one in texts}


@st.composite
def declarations(draw: st.DrawFn, *, called: bool = True) -> type[Inputs]:
    """A random declaration that tells every axis, its slots in a random order. called: sources may be functions."""
    fields: dict[str, Any] = {
        f"rows_{axis.name.lower()}": copied(axis, dtype=torch.int64, pad=draw(tails(torch.int64))) for axis in AXES
    }
    for index in range(draw(st.integers(0, 5))):
        name = f"slot_{index}"
        fields[name] = draw(st.one_of(copied_slots(name, called=called), other_slots(), parameters(name)))
    for index in range(draw(st.integers(0, 3))):
        known = {name: field.metadata["slotgraph.slot"] for name, field in fields.items()}
        fields |= draw(computed_slots(f"computed_{9 - index}", known))  # by name the other way round than by need
    names = draw(st.permutations(sorted(fields)))
    return declaration_of({name: fields[name] for name in names})


def _asking(name: str) -> Callable[[Step], list[int]]:
    return lambda step: asked(name, step.live, step.padded, step.padded(BATCH) if "rows" in name else None)


def asked(name: str, live: Any, padded: Any, rows: int | None = None) -> list[int]:
    """What the function of a slot of `one_sided` gives: the sizes that its name says, once or for each of some rows.

    live, padded: a step's methods, or sizes by axis.
    """
    sizes = [one if isinstance(one, dict) else {axis: one(axis) for axis in (BATCH, TOKENS)} for one in (live, padded)]
    told = [one[axis] for one in sizes for axis in (BATCH, TOKENS)]
    if "rows" not in name:
        return told
    return [row * told[0] + 7 * told[1] + 31 * told[2] + 101 * told[3] for row in range(rows or 0)]


@st.composite
def one_sided(draw: st.DrawFn) -> type[Inputs]:
    """A declaration whose copied slots are over BATCH alone, or over TOKENS alone, and whose functions ask for both.

    Slots named `asked...` hold what `asked` gives.
    """
    over = draw(st.sampled_from([BATCH, TOKENS]))
    fields: dict[str, Any] = {}
    for index in range(draw(st.integers(1, 3))):
        shape = draw(st.sampled_from([(over,), (over, 2), (over * 2,)] if index else [(over,), (over, 2)]))
        dtype = draw(st.sampled_from([torch.int64, torch.float32, torch.int32]))
        fields[f"slot_{index}"] = copied(*shape, dtype=dtype, pad=draw(st.integers(0, 9)))
    for index in range(draw(st.integers(1, 3))):
        name = f"asked_{draw(st.sampled_from(['once', 'rows']))}_{index}"
        placement: Placement = draw(st.sampled_from([DEVICE, HOST])) if index else DEVICE
        shape = (BATCH,) if "rows" in name else (4,)
        fields[name] = computed(_asking(name), shape=shape, dtype=torch.int64, placement=placement)
    names = draw(st.permutations(sorted(fields)))
    return declaration_of({name: fields[name] for name in names})


def declaration_of(fields: Mapping[str, Any], name: str = "Drawn") -> type[Inputs]:
    """A declaration class made from fields, with one field `tag` that is not a slot."""

    def body(namespace: dict[str, Any]) -> None:
        namespace["__annotations__"] = {**dict.fromkeys(fields, torch.Tensor), "tag": int}
        namespace.update(fields, tag=3)

    made: type[Inputs] = types.new_class(name, (Inputs,), {}, body)
    return made


CAPABILITIES = (
    Capabilities(),
    Capabilities(foreach_mixed=True),
    Capabilities(foreach_device=False, arenas=False),
    Capabilities(foreach_chunk=2),
    Capabilities(packed_uploads=True),
    Capabilities(packed_uploads=True, foreach_mixed=True, arenas=False),
    Capabilities(packed_uploads=True, foreach_device=False, foreach_chunk=2),
    Capabilities(roles={"cache_loc": torch.int32}, fills={"seq_len_fill": 0}, pools_inputs=False),
)


@attrs.frozen
class Round:
    """One fill: the bucket's padded sizes, the live sizes, absent slots, and what layout and dtype sources have."""

    padded: Sizes
    live: Sizes
    absent: frozenset[str]
    choices: int
    seed: int


@st.composite
def rounds(draw: st.DrawFn, declaration: type[Inputs], capacity: Sizes) -> Round:
    """A random step within a capacity."""
    padded = {axis: draw(st.integers(0, capacity[axis])) for axis in AXES} | {HIDDEN: capacity[HIDDEN]}
    live = {axis: draw(st.integers(0, padded[axis])) for axis in AXES} | {HIDDEN: capacity[HIDDEN]}
    optional = [name for name, slot in declaration.slotgraph.slots.items() if slot.optional]
    absent = frozenset(draw(st.sets(st.sampled_from(optional)))) if optional else frozenset[str]()
    return Round(padded, live, absent, draw(st.integers(0, 1 << 30)), draw(st.integers(0, 1 << 30)))


def batch_of(
    declaration: type[Inputs], capabilities: Capabilities, turn: Round, given: Mapping[str, Any] = NOTHING_GIVEN
) -> tuple[Any, dict[str, Any]]:
    """A batch and its side arguments with random data, mappings and objects in turn, dtypes and layouts as allowed.

    given: what a slot's source is instead, by slot.
    """
    found: dict[str, Any] = {"tag": turn.seed % 7, "nested": {}}
    beside: dict[str, Any] = {}
    for index, (name, slot) in enumerate(declaration.slotgraph.slots.items()):
        source = slot.reads(name)
        if source is None or name in turn.absent:
            continue
        value = given[name] if name in given else source_for(slot, capabilities, turn, turn.choices >> (2 * index))
        text = str(source)
        holder = beside if text.startswith("argument") else found["nested"] if "nested" in text else found
        group, _, member = name.partition(".")
        if member:
            holder.setdefault(group, {})[member] = value
        else:
            holder[f"called_{name}" if "from_batch" in text else name] = value
    if turn.choices & 1:
        found["nested"] = types.SimpleNamespace(**found["nested"])
    batch = found if turn.choices & 2 else types.SimpleNamespace(**found)
    if not beside:
        return batch, {}
    return batch, {"beside": beside if turn.choices & 4 else types.SimpleNamespace(**beside)}


def source_for(slot: Slot, capabilities: Capabilities, turn: Round, choice: int) -> torch.Tensor:
    """Random data for one slot, of a dtype and a layout that it takes."""
    dtypes = (resolve_dtype(slot.dtype, capabilities), *slot.converts_from())
    shape, dtype = extent(slot.shape, turn.live), dtypes[choice % len(dtypes)]
    value = noise(shape, dtype, turn.seed + choice)
    if slot.strided and choice & 2 and shape:
        wide = noise((*shape[:-1], shape[-1] * 2 + 1), dtype, turn.seed + choice)
        return wide[..., : shape[-1] * 2 : 2] if choice & 4 else wide[..., : shape[-1]]
    return value


def poisoned(
    declaration: type[Inputs], capabilities: Capabilities, capacity: Sizes, seed: int, empty: Empty = empty
) -> Buffers:
    """Buffers whose every byte that no declaration promises is random: all but constants and `once` values."""
    buffers = allocate(declaration.slotgraph.with_live_rows(), capacity, capabilities, empty)
    for index, buffer in enumerate(sorted(buffers, key=lambda one: one.name)):
        if not isinstance(buffer.slot, Constant) and not isinstance(buffer.slot.rule(), Once):
            buffer.tensor.copy_(noise(tuple(buffer.tensor.shape), buffer.tensor.dtype, seed + index))
    buffers.distrust()
    return buffers
