"""Several steps in one launch beside single steps: the same tokens, outputs, slots and caches."""

import os
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import attrs
import pytest
import torch
from torch.utils._pytree import tree_leaves

from slotgraph import BATCH, CACHE_LOC, TOKENS, Axis, DecodeRunner, Inputs, computed, copied, output, staged
from slotgraph.backends import Backend
from slotgraph.extend import LaunchedStep
from tests.packing import NAME, backend_of

PAGES, PAIRS, POOL = Axis("PAGES", fixed=True), Axis("PAIRS", fixed=True), Axis("POOL", fixed=True)
WIDE, PAGE, MOST, MODULUS, END = 6, 4, 4, 997, 3
TABLES: Final = MOST * 2
"""How many requests have pages and a row of state at one time, those that are still launched included."""
CHUNKS: Final = (2, 3, 8)
THOROUGH: Final = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
RUNS: Final = 20_400 if THOROUGH else 72
Act = Callable[[LaunchedStep], object]
Rule = Callable[..., torch.Tensor]


def place(pages: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Where a request's token is stored; positions beyond its last page stay in that."""
    inside = positions.clamp(0, WIDE * PAGE - 1)
    page = pages.gather(1, (inside // PAGE)[:, None])[:, 0]
    out.copy_(page * PAGE + inside % PAGE)


def pages_of(positions: Any) -> Any:
    """How many pages a request has at a position; of a NumPy array or a tensor."""
    return positions.clip(max=WIDE * PAGE - 1) // PAGE + 1


class Base(Inputs):
    """What all declarations of the game have: ids, positions, pages, who is done, places in a cache and in a state."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda made: made)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda positions: positions + 1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int64, pad=0)
    own: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    done: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, then=lambda made: made % 16 == END)
    places: torch.Tensor = computed(place, shape=TOKENS, dtype=CACHE_LOC)
    starts: torch.Tensor = computed(
        lambda positions: torch.nn.functional.pad(positions.cumsum(0), (1, 0)), shape=BATCH + 1, dtype=torch.int64
    )
    table: torch.Tensor = staged(POOL, dtype=torch.int64)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


class OfHost(Base):
    """With a function that the host computes."""

    weight: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
    double: torch.Tensor = computed(lambda weight: weight * 2, shape=BATCH, dtype=torch.int64, pad=0)


RULES: Final[Mapping[str, tuple[Any, tuple[Rule | None, ...]]]] = {
    "lens": ((BATCH,), (None, lambda lens: lens + 1, lambda lens, positions: lens + positions % 3)),
    "rope": ((3, TOKENS), (None, lambda rope: rope - 2, lambda rope, made: rope + made)),
    "scale": ((BATCH,), (None, lambda scale, lens: scale * 0.5 + lens, lambda scale: scale + 0.25)),
    "pair": ((BATCH, PAIRS), (None, lambda pair: pair.flip(1), lambda pair, ids: pair + ids[:, None])),
    "seed": ((1,), (None, lambda seed: seed + 7, lambda seed: (seed * 5 + 1) % 101)),
    "whole": ((BATCH,), (None, lambda lens, whole: whole + lens.sum(), lambda whole, positions: positions)),
    "bias": ((BATCH,), (None, lambda bias, ids: bias ^ ids, lambda bias: bias * 3 % 31)),
}
DTYPES: Final = {"scale": (torch.float32, torch.bfloat16), "pair": (torch.int64, torch.complex128)}
EDITED: Final = ("ids", "lens", "rope", "scale", "pair", "seed", "positions", "done", "whole", "bias", "weight")


def declared(draw: random.Random, *, ragged: bool) -> Any:
    """A declaration with further slots of random rules, tails and dtypes."""
    slots = dict[str, Any]()
    for name, (shape, rules) in RULES.items():
        rule, dtype = draw.choice(rules), draw.choice(DTYPES.get(name, (torch.int64,)))
        if name == "pair" and dtype == torch.complex128 and rule is not None:
            rule = None if rule is rules[2] else rule
        pad = 0 if name in {"lens", "whole"} else draw.choice([0, 1, 5])
        given: dict[str, Any] = {} if name == "seed" else {"pad": pad}
        if rule is not None:
            given["then"] = rule
        if name == "bias":
            given["default"] = None
        slots[name] = copied(*shape, dtype=dtype, rewritten=draw.random() < 0.2 and name != "seed", **given)
    if ragged:
        slots["pages"] = copied(BATCH, PAGES, dtype=torch.int64, pad=0, ragged=pages_of)
    annotations = dict.fromkeys(slots, torch.Tensor) | {"bias": torch.Tensor | None}
    namespace = {"__annotations__": annotations, "__module__": __name__, **slots}
    return type("Drawn", (draw.choice([Base, Base, OfHost]),), namespace)


def returned(view: Any, made: torch.Tensor, form: str) -> Any:
    """What a step returns: a slot, which the next step writes again, memory of its own, or several of many dtypes."""
    if form != "several":
        return made if form == "slot" else made * 1
    parts = made[:, None] * torch.arange(1, 4, device=made.device)
    return {
        "tokens": made,
        "parts": (parts.to(torch.bfloat16), parts > MODULUS),
        "of slots": [view.lens, view.rope[0] + 0, view.pair],
        "half": made.to(torch.float16) / 2,
        "byte": (made % 256).to(torch.uint8),
    }


@attrs.define(eq=False)
class Game:
    """One runner with rules drawn at random, and a step of all its slots.

    Attributes:
        runner: The runner.
        cache: The cache.
        device: Its device.
        chunks: The numbers of steps that it has graphs for, besides 1.
        form: What the step returns.
        ragged: Whether requests get their pages only when they need them.
    """

    runner: DecodeRunner[Any]
    cache: torch.Tensor
    device: torch.device
    chunks: tuple[int, ...]
    form: str
    ragged: bool

    @classmethod
    def of(cls, draw: random.Random, backend: Backend, lowering: str) -> "Game":
        """Draw a declaration and a step."""
        cache = torch.zeros((1 + TABLES * WIDE) * PAGE, dtype=torch.int64, device=backend.device)
        form, ragged, random_numbers = draw.choice(["slot", "own", "several"]), draw.random() < 0.5, draw.random() < 0.3
        rewritten = list[str]()
        chunks = tuple(sorted(draw.sample(CHUNKS, draw.randrange(1, 3))))

        def step(view: Any) -> Any:
            cache[view.places.long()] = view.ids * 3 + view.positions
            view.table[view.own] = view.table[view.own] * 3 % MODULUS + view.ids
            seen = cache.view(-1, PAGE)[view.pages].flatten(1)
            live = torch.arange(seen.shape[1], device=seen.device) <= view.positions[:, None]
            other = (
                view.lens
                + view.lens.sum()
                + view.rope.sum(0)
                + view.scale.to(torch.int64)
                + view.pair.real.to(torch.int64).sum(1)
            )
            other = other + view.table[view.own] + view.starts[1:] + (0 if view.bias is None else view.bias)
            if hasattr(view, "double"):
                other = other + view.double
            if random_numbers:
                other = other + torch.randint(0, 50, other.shape, device=other.device)
            reduced = view.lens.sum() + view.whole.sum()
            view.made.copy_(((seen * live).sum(1) * 7 + other + view.seed + reduced + view.ids) % MODULUS)
            for name in rewritten:
                getattr(view, name).add_(1)  # in padded rows, too
            return returned(view, view.made, form)

        runner: DecodeRunner[Any] = DecodeRunner(
            declared(draw, ragged=ragged),
            step,
            sizes={PAGES: WIDE, PAIRS: 2, POOL: TABLES + 1},
            buckets=[1, 2, MOST],
            output_rows=BATCH,
            chunks=chunks,
            done=draw.choice(["done", None]),
            absent=[{"bias"}],
            outputs=draw.choice(["copy", "view"]),
            lowering=lowering,
            backend=backend,
        )
        rewritten += [name for name in RULES if runner.stage.declaration.slots[name].rewritten and name != "bias"]
        runner.capture()
        return cls(runner, cache, backend.device, chunks, form, ragged)

    def rows(self, draw: random.Random, count: int, names: Sequence[str]) -> dict[str, Any]:
        """So many rows of slots, with random numbers."""
        declaration, found = self.runner.stage.declaration, dict[str, Any]()
        for name in names:
            slot = declaration.slots[name]
            shape = torch.Size({"seed": (1,), "rope": (3, count), "pair": (count, 2)}.get(name, (count,)))
            numbers = torch.tensor([draw.randrange(1, 90) for _ in range(shape.numel())]).view(shape)
            assert isinstance(slot.dtype, torch.dtype)
            numbers = numbers % 9 if name == "positions" else numbers
            found[name] = numbers.to("cpu" if slot.placement == "host" else self.device, slot.dtype)
        return found


@attrs.define(eq=False)
class Told:
    """What a loop handed out, and what it left.

    Attributes:
        rows: By step, its tokens.
        outputs: By step, all that it returned, flat.
        keys: By step, the requests in order.
        slots: What slots hold at the end, and the cache.
        launched: How many steps were launched.
    """

    rows: list[dict[Hashable, Any]] = attrs.field(factory=list)
    outputs: list[list[torch.Tensor]] = attrs.field(factory=list)
    keys: list[tuple[Any, ...]] = attrs.field(factory=list)
    slots: dict[str, torch.Tensor] = attrs.field(factory=dict)
    launched: int = 0

    def note(self, step: LaunchedStep) -> None:
        """Note a step that was handed out."""
        leaves = tree_leaves(step.outputs)
        self.keys.append(step.keys)
        self.outputs.append([leaf.clone() for leaf in leaves])
        self.rows.append(dict(step.tokens()) if len(leaves) == 1 else {})

    def look(self, game: Game, step: Any, reserved: Mapping[Hashable, int]) -> None:
        """Note what the last launch left. reserved: By request, the position that was reserved for."""
        chain: Any = step._loop._chain
        self.launched, self.slots["cache"] = step.lands, game.cache[PAGE:].cpu()
        count, absent = len(chain._keys), chain._absent
        for name, slot in game.runner.stage.declaration.slots.items():
            view = game.runner.graphs.buffers[name].tensor
            for dim in slot.varying:
                view = view.narrow(dim, 0, count)
            if name not in absent:
                self.slots[name] = view.cpu().clone()
        self.slots["table"][0] = 0  # padded rows and those that are done write it
        positions = self.slots["positions"]
        for key, position in zip(chain._keys, positions.tolist(), strict=True):
            assert position <= reserved.get(key, position)
        if game.ragged:  # what was reserved beyond this step depends on the number of steps
            beyond = torch.arange(WIDE) >= pages_of(positions)[:, None]
            self.slots["pages"].masked_fill_(beyond, 0)


class Schedule:
    """Acts by the step that they reach: drawn while a loop of chunks runs, and done again while single steps run.

    Attributes:
        acts: By step, what is done before it.
        dropped: Requests that left at once, and the launched steps whose tokens of them are not handed out.
        tables: By request, which pages and which row of state it has. Others get them when it has left.
        began: By request, how many pages it has when it begins.
    """

    def __init__(self, game: Game, draw: random.Random, seed: int, further: int) -> None:
        """further: For how many steps behind its first one the first batch has pages."""
        self.game, self.draw, self.seed = game, draw, seed
        self.free = [*range(TABLES)]
        draw.shuffle(self.free)
        self.acts = dict[int, list[Act]]()
        self.dropped = list[tuple[int, range]]()
        self.live, self.next_key = list[int](), 0
        self.tables, self.began = dict[int, int](), dict[int, int]()
        self.names = [*game.runner.stage.declaration.sources.keys() - {"pages", "own"}]
        self.names.sort()
        if draw.random() < 0.5:
            self.names.remove("bias")
        self.first = self.joining(draw.randrange(1, MOST + 1), further)

    def pages(self, key: int, count: int = WIDE, start: int = 0) -> list[int]:
        """Pages of a request, in order."""
        return [self.tables[key] * WIDE + page + 1 for page in range(start, start + count)]

    def joining(self, count: int, further: int = 0) -> tuple[list[int], dict[str, Any]]:
        """Keys and rows of new requests."""
        keys = [*range(self.next_key, self.next_key + count)]
        self.next_key += count
        self.live += keys
        self.tables |= {key: self.free.pop() for key in keys}
        rows = self.game.rows(self.draw, count, self.names)
        rows["done"] = torch.zeros(count, dtype=torch.bool, device=self.game.device)
        rows["own"] = torch.tensor([self.tables[key] + 1 for key in keys], device=self.game.device)
        if self.game.ragged:
            counts = pages_of(rows["positions"] + further).tolist()
            rows["pages"] = [self.pages(key, number) for key, number in zip(keys, counts, strict=True)]
            self.began |= dict(zip(keys, counts, strict=True))
        else:
            rows["pages"] = torch.tensor([self.pages(key) for key in keys], device=self.game.device)
        return keys, rows

    def invent(self, step: LaunchedStep) -> None:
        """Draw acts for the step that an act made now reaches, and do them."""
        draw, found = self.draw, list[Act]()
        if draw.random() < 0.3:
            gone = draw.sample(self.live, draw.randrange(1 if len(self.live) > 1 else 0, len(self.live) + 1))
            self.live = [key for key in self.live if key not in gone]
            now = draw.random() < 0.5
            if now:
                self.dropped += [(key, range(step.number + 1, step.lands)) for key in gone]
            self.free += [self.tables[key] for key in gone]
            found.append(lambda step: step.leave(gone, now=now))
        if draw.random() < 0.4 and len(self.live) < MOST and self.free:
            new, rows = self.joining(draw.randrange(1, min(MOST - len(self.live), len(self.free)) + 1))
            found.append(lambda step: step.join(rows, new))
        if draw.random() < 0.3 and self.live:
            keys = draw.sample(self.live, draw.randrange(1, len(self.live) + 1))
            names = draw.sample([name for name in self.names if name in EDITED], draw.randrange(1, 3))
            values = self.game.rows(draw, len(keys), names)
            found.append(lambda step: step.edit(keys, **values))
        for act in found:
            act(step)
        self.acts.setdefault(step.lands, []).extend(found)
        if draw.random() < 0.1:
            step.hold("game")

    def repeat(self, step: LaunchedStep) -> None:
        """Do the acts for the step that an act made now reaches."""
        for act in self.acts.get(step.lands, ()):
            act(step)


def reserve(step: LaunchedStep, schedule: Schedule, reserved: dict[Any, int]) -> None:
    """Append the pages that requests need until the next turn. reserved: How many each has beyond its first ones."""
    needs, lists = step.needs("pages"), list[list[int]]()
    for key, count in needs.items():
        more = reserved.setdefault(key, schedule.began[key])
        lists.append(schedule.pages(key, count, more))
        reserved[key] += count
    step.append([*needs], pages=lists)


def run(schedule: Schedule, act: Act, steps: int, *, ahead: int, **options: Any) -> Told:
    """Run a loop until a chunk ends after so many steps, with one turn of acts for each step that they can reach."""
    game, told, (keys, rows) = schedule.game, Told(), schedule.first
    buffers = game.runner.graphs.buffers
    game.cache.zero_()
    buffers["table"].tensor.zero_()
    torch.manual_seed(schedule.seed)
    needs = ["positions", "pages"] if game.ragged else ["positions"]
    loop = game.runner.steps(rows, keys=keys, needs=needs, ahead=ahead, **options)
    step: Any = None
    lands, told_of, pages = 0, 0, dict[Any, int]()
    needed, reserved = dict[Hashable, int](), dict[Hashable, int]()
    for step in loop:
        if step.lands > lands:
            lands, reserved = step.lands, needed  # what was said last before the launch
        told.note(step)
        if step.number + 1 >= steps:
            break
        if step.lands > told_of:
            told_of = step.lands
            act(step)
        if game.ragged:
            reserve(step, schedule, pages)
        needed = step.needs("positions")
    told.look(game, step, reserved)
    return told


def check_ends(rows: list[dict[Hashable, Any]]) -> None:
    """Assert that no request has a token behind its end."""
    ended = set[Hashable]()
    for row in rows:
        assert ended.isdisjoint(row)
        ended.update(key for key, token in row.items() if token % 16 == END)


def play(game: Game, seed: int) -> None:
    """Run chunks with random edits, and single steps with the same edits: nothing differs."""
    draw = random.Random(seed)
    chunk: Any = draw.choice((1, *game.chunks, *game.chunks, "auto"))
    ahead, steps = draw.randrange(3), draw.randrange(2, 30)
    options: dict[str, Any] = {}
    if game.form == "several" and draw.random() < 0.5:
        options["read"] = lambda outputs: outputs["tokens"]
    schedule = Schedule(game, draw, seed, ahead * (game.chunks[-1] if chunk == "auto" else chunk))
    several = run(schedule, schedule.invent, steps, chunk=chunk, ahead=ahead, **options)
    single = run(schedule, schedule.repeat, several.launched, chunk=1, ahead=0, **options)
    if game.runner.stage.declaration.done:
        check_ends(single.rows)
    handed = len(several.keys)
    for key, numbers in schedule.dropped:
        for number in numbers[: max(0, handed - numbers.start)]:
            single.rows[number].pop(key, None)
    assert (several.keys, several.rows) == (single.keys[:handed], single.rows[:handed])
    for number, (mine, other) in enumerate(zip(several.outputs, single.outputs, strict=False)):
        assert len(mine) == len(other)
        for one, expected in zip(mine, other, strict=True):
            assert one.dtype == expected.dtype
            assert torch.equal(one, expected), number
    for name, rows in single.slots.items():
        assert torch.equal(several.slots[name], rows), name


WAYS: Final = (
    ("cpu", "auto"),
    ("cpu", "in_graph"),
    ("cpu-capture", "auto"),
    ("cpu-capture", "foreach"),
    ("cpu-capture", "in_graph"),
    (NAME, "foreach"),
)


def play_all(ways: Any, runs: int, each: int) -> None:
    """Play so many games on each way, with other rules after some."""
    for way in ways:
        for number in range(0, runs, each):
            game = Game.of(random.Random(number), backend_of(*way), way[1])
            for seed in range(number, min(number + each, runs)):
                try:
                    play(game, seed)
                except Exception as error:
                    error.add_note(f"game {number} on {way}, run {seed}")
                    raise


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_chunks_do_what_single_steps_do(way: tuple[str, str]) -> None:
    """Random rules, ends, joins, leaves and edits: tokens, outputs, slots and caches are those of single steps."""
    play_all([way], RUNS // len(WAYS), each=100 if THOROUGH else 10)


@pytest.mark.cuda
@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
def test_chunks_do_what_single_steps_do_on_cuda(lowering: str) -> None:
    """The same by graphs of a device."""
    play_all([("cuda", lowering)], RUNS // 2, each=250 if THOROUGH else 15)
