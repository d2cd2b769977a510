"""Functions of slots see the live rows and the declared tails of their own step: random declarations beside plain code.

Rules, host functions and device functions are drawn that reduce over rows, read new values, or do not read their own
slot. They run in several buckets, after fuller batches, with poison wherever no rule says what memory holds.
Some read tables that the step goes on writing, and some functions on the host run only if what they read has changed.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, InputBuffers, Inputs, computed, copied, keep, output, staged
from slotgraph.dataflow.axes import Shape, Sizes, Step, extent, shape_of
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.edits import rearrange
from slotgraph.extend import fills, once
from tests.packing import backend_of

PAGES: Final = Axis("PAGES")
BUCKETS: Final = (1, 2, 4, 8)
POISON: Final = 7919
ENTRIES, STARTS = 3, 7
UNREAD: Final = (keep("only rules by row read it"), once(5))
DTYPES: Final = (torch.int64, torch.int32, torch.float64)
HEALTH: Final = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
SHRINKS: Final = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
EXAMPLES: Final = int(os.environ.get("GAMES", "0"))
Tensors = dict[str, torch.Tensor]

# Rules by row, over one slot and another of the same kind, which may be itself; and rules that see all rows of slots.
BY_ROW: Final = (
    "{own} + 1",
    "{own} - 2",
    "{other}",
    "({own} * 3 + {other} + 1).remainder(1009)",
    "{other}.remainder(7)",
)
OVER_ROWS: Final = (
    "({own} + {some}.sum().to({own_dtype})).remainder(1009)",
    "({own} - {own}.amax()).remainder(1009) - 500",
    "({other} - {some}.amin().to({own_dtype})).remainder(1009) - 500",
    "{other} * 0 + {some}.sum().remainder(1009).to({own_dtype})",
    "({other} + {some}.amax().to({own_dtype})).remainder(1009)",
    "{other}.flip({dim})",
    "{other}.cumsum({dim}).remainder(1009).to({own_dtype})",
)
ON_HOST: Final = ("int({some}.amax())", "int({some}.sum()) + step.live(BATCH)", "[int({some}.amin())]")
ON_DEVICE: Final = ("{some}.sum().reshape(1).to(torch.int64)", "({some}.amax() - {some}.amin()).reshape(1).long()")


@attrs.frozen
class Kind:
    """What slots have in common that may stand for one another in a rule."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    host: bool

    @property
    def size(self) -> Shape:
        """The shape as sizes."""
        return shape_of(self.shape)

    @property
    def dim(self) -> int | None:
        """The dim that varies."""
        return next((dim for dim, size in enumerate(self.shape) if isinstance(size, Axis)), None)

    @property
    def axis(self) -> Axis:
        """The axis of that dim."""
        axis: Axis = self.shape[self.dim or 0]
        return axis


@attrs.frozen
class Drawn:
    """A slot of a random declaration. rule: the text of its function, or nothing. written: the step writes it."""

    name: str
    kind: Kind
    pad: Any
    rule: str = ""
    written: bool = False

    @property
    def number(self) -> int:
        """What its tail holds, where it is told."""
        return 0 if self.pad is None or self.pad in UNREAD else self.pad


@attrs.frozen
class Asked:
    """A computed slot of a random declaration.

    text: its function's, or its part of a tuple. host: it is in host memory. like: the slot whose shape and dtype it
    has; by default it is one number. fills: the slots that one call fills. again: what its value depends on.
    """

    text: str
    host: bool
    like: str = ""
    pad: Any = None
    fills: tuple[str, ...] = ()
    again: tuple[str, ...] | None = None


def function(text: str, names: Sequence[str]) -> Any:
    """A function of some slots, by its text."""
    given = sorted({*names}.intersection(re.findall(r"\w+", text)))
    return eval(f"lambda {', '.join(given)}: {text}", {"torch": torch, "BATCH": BATCH})  # noqa: S307 - of texts above


def called(text: str, values: Mapping[str, Any]) -> Any:
    """What such a function returns."""
    made = function(text, [*values])
    code = made.__code__
    return made(**{name: values[name] for name in code.co_varnames[: code.co_argcount]})


def rows_in(live: torch.Tensor) -> tuple[slice, ...]:
    """Where the live rows of a slot are in its padded ones."""
    return tuple(map(slice, live.shape))


@st.composite
def declarations(draw: st.DrawFn, axes: Sequence[Axis | None], width: int, *, correct: bool = False) -> "World":
    """A few kinds of slots, one or two slots of each, with rules over them. correct: none depends on the bucket."""
    kinds = list[Kind]()
    for axis in draw(st.lists(st.sampled_from(axes), min_size=1, max_size=3)):
        shapes = [(axis,), (axis, 2), (2, axis)] if axis is not None else [(3,), (1,)]
        on_host = width > 0 and draw(st.integers(0, 3)) == 0  # a graph alone advances no slot on the host
        kinds.append(Kind(draw(st.sampled_from(shapes)), draw(st.sampled_from(DTYPES)), on_host))
    kinds.append(Kind((BATCH,), torch.int64, host=False))
    slots, members = list[Drawn](), dict[Kind, list[str]]()
    for number, kind in enumerate(kind for kind in kinds for _ in range(draw(st.integers(1, 2)))):
        name = f"s{number}"
        members.setdefault(kind, []).append(name)
        pad = draw(st.sampled_from([0, 1, -3, 900, *UNREAD])) if kind.dim is not None else None
        written = pad not in UNREAD and not kind.host and draw(st.integers(0, 5)) == 0
        slots.append(Drawn(name, kind, pad, written=written))
    unread = {one.name for one in slots if one.pad in UNREAD}
    read = [one.name for one in slots if not (one.kind.host or one.name in unread or correct)]
    tables = {f"t{number}": draw(st.sampled_from([*read, ""])) for number in range(draw(st.sampled_from([0, 1, 1, 2])))}
    rank = {one.name: place for place, one in enumerate(draw(st.permutations(slots)))}
    advancing = {one.name for one in slots if draw(st.integers(0, 2))} or {slots[-1].name}
    ruled = list[Drawn]()
    for one in slots:
        if one.name not in advancing:
            ruled.append(one)
            continue
        # A rule reads slots that stay, and new values of those before it, so that there is no circle.
        before = [other.name for other in slots if other.name not in advancing or rank[other.name] < rank[one.name]]
        alike = [name for name in members[one.kind] if name in before] + [one.name]
        side = [other.name for other in slots if other.kind.host == one.kind.host]
        told = {other.name for other in slots if not correct or not other.number} - unread
        some = [name for name in before if name in side and name in told] + [*([] if one.kind.host else tables)]
        others = [name for name in alike if name not in unread]
        if some and others and one.name not in unread and draw(st.integers(0, 3)):
            texts = [text for text in OVER_ROWS if not correct or re.search("cumsum|some}.sum", text)]
            text, other = draw(st.sampled_from(texts)), draw(st.sampled_from(others))
        else:
            text, other = draw(st.sampled_from(BY_ROW)), draw(st.sampled_from(alike))
        places = {"own": one.name, "other": other, "own_dtype": one.kind.dtype, "dim": one.kind.dim or 0}
        text = text.format(**places, some=draw(st.sampled_from(some)) if some else "")
        if one.kind == Kind((BATCH,), torch.int64, host=False) and draw(st.integers(0, 3)) == 0:
            text = draw(st.sampled_from(["made", "made.remainder(97)", f"({one.name} + made).remainder(1009)"]))
        ruled.append(attrs.evolve(one, rule=text))
    functions = dict[str, Asked]()
    for number in range(draw(st.integers(0, 3))):
        on_host = draw(st.booleans())
        some = [one.name for one in ruled if one.kind.host == on_host and one.name not in unread]
        some += [] if on_host else tables
        if some:
            name = draw(st.sampled_from(some))
            text = draw(st.sampled_from(ON_HOST if on_host else ON_DEVICE)).format(some=name)
            again = (name,) if on_host and draw(st.booleans()) else None
            functions[f"c{number}"] = Asked(text, on_host and draw(st.booleans()), again=again)
    whole = [one for one in ruled if one.kind.dim is not None and one.name not in unread]
    for name in draw(st.sampled_from([(), ("r0",), ("r0", "r1")])) if whole else ():
        functions |= draw(padded(name, draw(st.sampled_from(whole)), correct=correct))
    state = {name: torch.full((ENTRIES,), STARTS) for name in tables}
    return World({one.name: one for one in ruled}, functions, width, tables, state)


@st.composite
def padded(draw: st.DrawFn, name: str, like: Drawn, *, correct: bool) -> dict[str, Asked]:
    """A function of all rows of a slot, perhaps with a number by the same call, and with one computed of the rows."""
    runs_on_host = like.kind.host
    hosts = st.booleans() if runs_on_host else st.just(value=False)
    one_number = "int({}.sum())" if runs_on_host else "{}.sum().reshape(1).to(torch.int64)"
    made = {name: Asked(f"({like.name} * 2 + 1)", draw(hosts), like.name, draw(st.sampled_from([None, 0, 7, -3])))}
    if draw(st.booleans()):
        text = "step.live(BATCH)" if runs_on_host else "torch.ones_like({}).sum().reshape(1).to(torch.int64)"
        text = one_number if not correct else text if runs_on_host else "{}.reshape(-1)[:1].to(torch.int64)"
        made[f"{name}_once"] = Asked(text.format(like.name), draw(hosts))
        names = tuple(draw(st.permutations(sorted(made))))
        made = {one: attrs.evolve(asked, fills=names) for one, asked in made.items()}
    if not correct and draw(st.booleans()):
        text = "int({}.sum())" if made[name].host else "{}.sum().reshape(1).to(torch.int64)"
        made[f"{name}_all"] = Asked(text.format(name), made[name].host)
    return made


@attrs.frozen
class World:
    """A random declaration, and what it does in plain code.

    functions: of each computed slot. width: tokens of a request; 0 if they are free. tables: by name a slot that a step
    adds to the table, or nothing. state: what the tables hold.
    """

    slots: Mapping[str, Drawn]
    functions: Mapping[str, Asked]
    width: int
    tables: Mapping[str, str]
    state: Tensors

    def inputs(self) -> type[Inputs]:
        """The class."""
        names = [*self.slots, *self.functions, *self.tables, "made", "step"]
        groups = dict[tuple[str, ...], Any]()
        body: dict[str, Any] = {"made": output(BATCH, dtype=torch.int64)}
        body |= {name: staged(ENTRIES, dtype=torch.int64, starts=STARTS) for name in self.tables}
        for name, one in self.slots.items():
            options: dict[str, Any] = {"placement": "host"} if one.kind.host else {}
            options |= {"then": function(one.rule, names)} if one.rule else {}
            options |= {"pad": one.pad} if one.kind.dim is not None else {}
            body[name] = copied(*one.kind.shape, dtype=one.kind.dtype, rewritten=one.written, **options)
        for name, asked in self.functions.items():
            made = function(asked.text, names)
            if asked.fills:
                text = f"({', '.join(self.functions[other].text for other in asked.fills)})"
                made = groups.setdefault(asked.fills, fills(*asked.fills)(function(text, names)))
            kind = self.slots[asked.like].kind if asked.like else Kind((1,), torch.int64, host=False)
            options = {"placement": "host"} if asked.host else {}
            options |= {"pad": asked.pad, "again": asked.again}
            body[name] = computed(made, shape=kind.shape, dtype=kind.dtype, **options)
        return type("DrawnInputs", (Inputs,), {"__annotations__": dict.fromkeys(body, torch.Tensor), **body})

    def run(self, view: Mapping[str, torch.Tensor]) -> None:
        """The step: it makes a number of each request's rows, and writes the slots that it may write."""
        made = torch.zeros_like(view["made"])
        for name, one in self.slots.items():
            value = view[name]
            if not one.kind.host and self.width and one.kind.dim is not None:
                made += value.to(torch.int64).movedim(one.kind.dim, 0).reshape(len(made), -1).sum(1)
            if one.written:
                value.add_(1)
        for name, asked in self.functions.items():
            if not asked.host and not asked.like:
                made += view[name]
            elif not asked.host and self.width:
                rows = view[name].to(torch.int64).movedim(self.slots[asked.like].kind.dim or 0, 0)
                made += rows.reshape(len(made), -1).sum(1)
        view["made"].copy_(made.remainder(10007))
        for name, some in self.tables.items():
            more = view[some].sum().to(torch.int64) if some else 1
            view[name].mul_(3).add_(more).remainder_(1009)

    def step(self, view: Any) -> torch.Tensor:
        """The same as runners call it."""
        self.run({name: getattr(view, name) for name in (*self.slots, *self.functions, *self.tables, "made")})
        made: torch.Tensor = view.made
        return made

    def padded(self, name: str, live: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """A slot as functions see it: live rows, and its declared tail."""
        one = self.slots[name]
        whole = torch.full(extent(one.kind.size, sizes), one.number, dtype=one.kind.dtype)
        whole[rows_in(live)] = live
        return whole

    def advanced(self, rows: Tensors, made: torch.Tensor, sizes: Sizes) -> Tensors:
        """What slots hold in the next step, each rule after those that it reads."""
        new = dict[str, torch.Tensor]()
        while len(new) < len(rows):
            for name, one in self.slots.items():
                needs = {*self.slots}.intersection(re.findall(r"\w+", one.rule)) - {name}
                if name not in new and needs <= new.keys():
                    seen = {need: self.padded(need, {**rows, **new}[need], sizes) for need in (*needs, name)}
                    value = called(one.rule, {**seen, **self.state, "made": made}) if one.rule else seen[name]
                    new[name] = value[rows_in(rows[name])].clone()
        return new

    def stepped(self, rows: Tensors, step: Step) -> tuple[Tensors, Tensors, torch.Tensor]:
        """What slots hold after a step, what computed slots hold, and what it made, padded rows and all."""
        view = {name: self.padded(name, rows[name], step.padded_sizes) for name in self.slots} | self.state
        found = Tensors()
        for name, one in self.functions.items():
            value = called(one.text, {**view, **found, "step": step})
            if not one.like:
                found[name] = torch.as_tensor(value, dtype=torch.int64).reshape(1)
                continue
            found[name] = value if one.pad is None else torch.full_like(value, one.pad)
            inside = rows_in(rows[one.like])
            found[name][inside] = value[inside]
        made = torch.zeros(step.padded_sizes[BATCH], dtype=torch.int64)
        self.run({**view, **found, "made": made})
        return {name: view[name][rows_in(rows[name])] for name in rows}, found, made

    def poison(self, buffers: Any, sizes: Sizes | None) -> None:
        """Write a number wherever no rule says what memory holds: beyond a bucket; at first everywhere."""
        for name, one in self.slots.items():
            tensor = buffers[name].tensor
            whole = torch.full_like(tensor, POISON)
            if sizes is not None:
                inside = tuple(map(slice, extent(one.kind.size, sizes)))
                whole[inside] = tensor[inside]
            tensor.copy_(whole)

    def compare(self, buffers: Any, rows: Tensors, found: Tensors, padded: Sizes) -> None:
        """Hold all slots of a bucket to what they must be."""
        for name, one in self.slots.items():
            mine, right = buffers[name].view(padded).cpu(), self.padded(name, rows[name], padded)
            if one.pad in UNREAD or one.written:
                mine, right = mine[rows_in(rows[name])], rows[name]
            assert torch.equal(mine, right), (name, mine, right)
        for name, right in found.items():
            mine = buffers[name].view(padded).cpu()
            assert torch.equal(mine, right), (name, mine, right)
        for name, right in self.state.items():
            assert torch.equal(buffers[name].tensor.cpu(), right), (name, buffers[name].tensor, right)

    def values(self, seed: int, sizes: Sizes) -> Tensors:
        """Rows of all slots, negative ones too."""
        generator, made = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
        for name, one in self.slots.items():
            made[name] = torch.randint(-60, 60, extent(one.kind.size, sizes), generator=generator).to(one.kind.dtype)
        return made

    def on(self, rows: Tensors, device: torch.device) -> Tensors:
        """Rows where slots are."""
        return {name: value if self.slots[name].kind.host else value.to(device) for name, value in rows.items()}


SEEDS: Final = st.integers(0, 1 << 20)


class Steps:
    """A loop of steps, and the same in plain code."""

    def __init__(self, draw: Any, backend: str, lowering: str) -> None:
        width = draw(st.sampled_from([1, 1, 2]))
        self.draw = draw
        self.world: World = draw(declarations((BATCH, TOKENS, None), width=width))
        self.each = {BATCH: 1, TOKENS: width}
        options: Any = {"backend": backend, "lowering": lowering, "width": width, "output_rows": BATCH}
        self.runner: Any = DecodeRunner(self.world.inputs(), self.world.step, buckets=BUCKETS, **options)
        self.runner.capture()
        self.buffers, self.device = self.runner.graphs.buffers, self.runner.stage.backend.device
        self.world.poison(self.buffers, None)
        self.buffers.distrust()
        if draw(st.booleans()):  # a fuller batch before
            rows, sizes = self.rows(BUCKETS[-1]), self.sizes(BUCKETS[-1])
            self.runner(self.world.on(rows, self.device))
            self.world.stepped(rows, Step(sizes, sizes))

    def sizes(self, requests: int) -> dict[Axis, int]:
        """Those of so many requests."""
        return {axis: requests * each for axis, each in self.each.items()}

    def rows(self, requests: int) -> Tensors:
        """Rows of new requests."""
        made: Tensors = self.world.values(self.draw(SEEDS), self.sizes(requests))
        return made

    def chosen(self, rows: Tensors, places: Sequence[int]) -> Tensors:
        """The rows of some requests."""
        found = dict(rows)
        for name, one in self.world.slots.items():
            if one.kind.dim is not None:
                each = self.each[one.kind.axis]
                at = [place * each + part for place in places for part in range(each)]
                found[name] = rows[name].index_select(one.kind.dim, torch.tensor(at, dtype=torch.int64))
        return found

    def play(self) -> None:
        """Run a loop, with what is drawn between its steps."""
        draw, ahead, count = self.draw, self.draw(st.sampled_from([0, 0, 2])), self.draw(st.integers(1, BUCKETS[-1]))
        self.keys: tuple[Any, ...] = tuple(range(count))
        self.row_of: dict[Any, int] = {key: key for key in self.keys}
        self.next_key, self.alive = count, [*range(count)]
        self.live, self.found, self.made, self.bucket = self.rows(count), Tensors(), torch.zeros(0), 0
        self.news, self.history = dict[int, list[News]](), list[dict[Any, int]]()
        shrinks = draw(st.booleans())
        loop = self.runner.steps(self.world.on(self.live, self.device), keys=self.keys, ahead=ahead)
        for _ in range(draw(st.integers(2, 7))):
            step = next(loop)
            while len(self.history) < step.lands:
                self.follow()
            assert dict(zip(step.keys, step.outputs.tolist(), strict=True)) == self.history[step.number]
            if not ahead:
                padded = self.sizes(self.bucket)
                self.world.compare(self.buffers, self.live, self.found, padded)
                self.world.poison(self.buffers, padded)
            if draw(st.integers(0, 2)):
                self.edit(step, joins=not shrinks)
        loop.close()

    def follow(self) -> None:
        """Do in plain code what the next step does."""
        if self.history:
            self.live = self.world.advanced(self.live, self.made, self.sizes(self.bucket))
        for news in self.news.pop(len(self.history), ()):
            before = self.row_of | {key: len(self.keys) + row for row, key in enumerate(news.keys)}
            self.keys, _ = rearrange(self.keys, self.row_of, news.leaving, news.keys)
            rows = {name: self.joined(name, self.live, news.rows) for name in self.live}
            self.live = self.chosen(rows, [before[key] for key in self.keys])
            for name, value in news.changed.items():
                dim = self.world.slots[name].kind.dim
                if dim is None:
                    self.live[name] = value
                    continue
                for place, key in enumerate(news.edited):
                    row = self.chosen({**self.live, name: value}, [place])[name]
                    each, start = row.shape[dim], self.row_of[key]
                    self.live[name].narrow(dim, start * each, each).copy_(row)
        requests = len(self.keys)
        self.bucket = next(rows for rows in BUCKETS if rows >= requests)
        step = Step(self.sizes(requests), self.sizes(self.bucket))
        self.live, self.found, self.made = self.world.stepped(self.live, step)
        self.history.append(dict(zip(self.keys, self.made.tolist(), strict=False)))

    def joined(self, name: str, rows: Tensors, more: Tensors) -> torch.Tensor:
        """The rows of a slot, and those of requests that join."""
        dim = self.world.slots[name].kind.dim
        return rows[name] if dim is None else torch.cat([rows[name], more[name]], dim)

    def edit(self, step: Any, *, joins: bool) -> None:
        """Have requests leave, join and change."""
        draw, world = self.draw, self.world
        leaving = draw(st.lists(st.sampled_from(self.alive), unique=True, max_size=len(self.alive) - 1))
        self.alive = [key for key in self.alive if key not in leaving]
        step.leave(leaving)
        edited = draw(st.lists(st.sampled_from(self.alive), unique=True, min_size=1))
        changed = self.rows(len(edited))
        names = draw(st.lists(st.sampled_from(sorted(world.slots)), unique=True, max_size=2))
        changed = {name: changed[name] for name in names}
        if changed:
            step.edit(edited, **world.on(changed, self.device))
        count = draw(st.integers(0, BUCKETS[-1] - len(self.alive))) if joins else 0
        rows, keys = self.rows(count), [*range(self.next_key, self.next_key + count)]
        if count:
            step.join(world.on(rows, self.device), keys)
        self.next_key, self.alive = self.next_key + count, [*self.alive, *keys]
        self.news.setdefault(step.lands, []).append(News(leaving, keys, rows, edited, changed))


@attrs.frozen
class News:
    """What an edit says: who leaves, who joins with which rows, and what slots of whom are changed."""

    leaving: list[int]
    keys: list[int]
    rows: Tensors
    edited: list[int]
    changed: Tensors


def play_graphs(draw: Any, backend: Any) -> None:
    """Graphs of one's own that begin with a fill: each replay behind the first advances the slots."""
    world = draw(declarations((BATCH, TOKENS, PAGES, None), width=0))
    most = {BATCH: 6, TOKENS: 9, PAGES: 4}
    inputs = world.inputs()
    capacity = {axis: most[axis] for axis in inputs.slotgraph.varying}
    buffers: Any = InputBuffers(inputs, capacity, backend=backend, lowering="in_graph")
    world.poison(buffers._layer.buffers, None)
    buffers._layer.buffers.distrust()
    graphs = list[tuple[Sizes, Any]]()
    for _ in range(draw(st.integers(1, 3))):
        padded = {axis: draw(st.integers(1, size)) for axis, size in capacity.items()}
        buffers.prepare(padded)

        def captured(padded: Any = padded) -> Any:
            buffers.fill_in_graph(padded)
            return world.step(buffers.view(padded))

        graphs.append((padded, backend.capture(captured)))
    for name, table in world.state.items():  # a capture of one's own may run the step
        table.copy_(buffers._layer.buffers[name].tensor)
    for _ in range(draw(st.integers(1, 4))):
        padded, graph = draw(st.sampled_from(graphs))
        step = Step({axis: draw(st.integers(0, size)) for axis, size in padded.items()}, padded)
        rows = world.values(draw(SEEDS), step.live_sizes)
        buffers.fill(world.on(rows, backend.device), padded, live=step.live_sizes)
        graph.replay()
        rows, found, made = world.stepped(rows, step)
        for _ in range(draw(st.integers(0, 3))):
            backend.synchronize()
            world.poison(buffers._layer.buffers, padded)
            graph.replay()
            rows, found, made = world.stepped(world.advanced(rows, made, padded), step)
        backend.synchronize()
        world.compare(buffers._layer.buffers, rows, found, padded)


def played(game: Any, examples: int) -> None:
    """Play a game so many times."""

    @settings(
        max_examples=EXAMPLES or examples,
        deadline=None,
        suppress_health_check=HEALTH,
        phases=[Phase.generate, *([Phase.shrink] if SHRINKS else [])],
    )
    @given(st.data())
    def run(data: Any) -> None:
        game(data.draw)

    run()


WAYS: Final = [("cpu-capture", lowering) for lowering in LADDER] + [("cpu", "in_graph"), ("cpu", "foreach")]


@pytest.mark.parametrize(("backend", "lowering"), WAYS)
def test_functions_see_their_own_step_in_loops(backend: str, lowering: str) -> None:
    """No output and no slot differs, whatever requests leave, join and change."""
    played(lambda draw: Steps(draw, backend, lowering).play(), 20)


@pytest.mark.parametrize("backend", ["cpu-capture", "cpu"])
def test_functions_see_their_own_step_in_graphs_of_one_s_own(backend: str) -> None:
    """No slot differs after any number of replays, on axes that are free of one another."""
    played(lambda draw: play_graphs(draw, backend_of(backend)), 30)


@pytest.mark.cuda
@pytest.mark.parametrize("lowering", LADDER)
def test_functions_see_their_own_step_in_loops_on_cuda(lowering: str) -> None:
    """The same by the compiled kernel, and by torch's own operators."""
    backend_of("cuda", lowering)
    played(lambda draw: Steps(draw, "cuda", lowering).play(), 25)


@pytest.mark.cuda
def test_functions_see_their_own_step_in_graphs_of_one_s_own_on_cuda() -> None:
    """The same for graphs that the caller captures."""
    backend = backend_of("cuda", "in_graph")
    played(lambda draw: play_graphs(draw, backend), 25)
