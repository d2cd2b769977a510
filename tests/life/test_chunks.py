"""Several steps in one launch beside single steps: the same tokens, slots and caches, by any rules and news."""

import os
import random
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, TOKENS, Axis, DecodeRunner, Inputs, computed, copied, output
from slotgraph.backends import Backend
from slotgraph.extend import LaunchedStep
from tests.packing import NAME, backend_of

PAGES, PAIRS = Axis("PAGES", fixed=True), Axis("PAIRS", fixed=True)
WIDE, PAGE, MOST, MODULUS, END = 6, 4, 4, 997, 3
CHUNKS: Final = (2, 3, 8)
THOROUGH: Final = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
RUNS: Final = 20_000 if THOROUGH else 120
Act = Callable[[LaunchedStep], object]
Rule = Callable[..., torch.Tensor]


def place(pages: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Where a request's token is stored; positions beyond its last page stay in that."""
    inside = positions.clamp(0, WIDE * PAGE - 1)
    page = pages.gather(1, (inside // PAGE)[:, None])[:, 0]
    out.copy_(page * PAGE + inside % PAGE)


class Base(Inputs):
    """What all declarations of the game have: ids, positions, pages, who is done, and a cache location."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda made: made)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda positions: positions + 1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int64, pad=0)
    done: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, then=lambda made: made % 16 == END)
    places: torch.Tensor = computed(place, shape=TOKENS, dtype=CACHE_LOC)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


RULES: Final[Mapping[str, tuple[Any, tuple[Rule | None, ...]]]] = {
    "lens": ((BATCH,), (None, lambda lens: lens + 1, lambda lens, positions: lens + positions % 3)),
    "rope": ((3, TOKENS), (None, lambda rope: rope - 2, lambda rope, made: rope + made)),
    "scale": ((BATCH,), (None, lambda scale, lens: scale * 0.5 + lens, lambda scale: scale + 0.25)),
    "pair": ((BATCH, PAIRS), (None, lambda pair: pair.flip(1), lambda pair, ids: pair + ids[:, None])),
    "seed": ((1,), (None, lambda seed: seed + 7, lambda seed: (seed * 5 + 1) % 101)),
    "whole": ((BATCH,), (None, lambda lens, whole: whole + lens.sum(), lambda whole, positions: positions)),
}
DTYPES: Final = {"scale": (torch.float32, torch.bfloat16), "pair": (torch.int64, torch.complex128)}


def declared(draw: random.Random) -> type[Inputs]:
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
        slots[name] = copied(*shape, dtype=dtype, rewritten=draw.random() < 0.2 and name != "seed", **given)
    namespace = {"__annotations__": dict.fromkeys(slots, torch.Tensor), "__module__": __name__, **slots}
    return type("Drawn", (Base,), namespace)


@attrs.define(eq=False)
class Game:
    """One runner with rules drawn at random, its cache, and a step of all its slots."""

    runner: DecodeRunner[Any]
    cache: torch.Tensor
    device: torch.device

    @classmethod
    def of(cls, draw: random.Random, backend: Backend, lowering: str, *, in_slot: bool) -> "Game":
        """Draw a declaration. in_slot: Whether the step returns a slot, which the next step writes again."""
        cache = torch.zeros((1 + MOST * 3) * WIDE * PAGE, dtype=torch.int64, device=backend.device)

        def step(view: Any) -> torch.Tensor:
            cache[view.places.long()] = view.ids * 3 + view.positions
            seen = cache.view(-1, PAGE)[view.pages].flatten(1)
            live = torch.arange(seen.shape[1], device=seen.device) <= view.positions[:, None]
            other = view.lens + view.rope.sum(0) + view.scale.to(torch.int64) + view.pair.real.to(torch.int64).sum(1)
            view.made.copy_(((seen * live).sum(1) * 7 + other + view.seed + view.whole + view.ids) % MODULUS)
            made: torch.Tensor = view.made
            return made if in_slot else made * 1

        runner: DecodeRunner[Any] = DecodeRunner(
            declared(draw),
            step,
            sizes={PAGES: WIDE, PAIRS: 2},
            buckets=[1, 2, MOST],
            output_rows=BATCH,
            chunks=CHUNKS,
            done=draw.choice(["done", None]),
            lowering=lowering,
            backend=backend,
        )
        runner.capture()
        return cls(runner, cache, backend.device)

    def rows(self, draw: random.Random, pages: list[list[int]]) -> dict[str, torch.Tensor]:
        """A batch of one row for each list of pages."""
        declaration, count, found = self.runner.stage.declaration, len(pages), dict[str, torch.Tensor]()
        for name in declaration.sources:
            dtype = declaration.slots[name].dtype
            shape = {"seed": (1,), "rope": (3, count), "pair": (count, 2)}.get(name, (count,))
            numbers = torch.tensor([draw.randrange(1, 90) for _ in range(max(1, torch.Size(shape).numel()))])
            numbers = numbers[: torch.Size(shape).numel()].view(shape)
            assert isinstance(dtype, torch.dtype)
            found[name] = (numbers % 9 if name == "positions" else numbers).to(dtype)
        found |= {"pages": torch.tensor(pages).view(count, WIDE), "done": torch.zeros(count, dtype=torch.bool)}
        return {name: rows.to(self.device) for name, rows in found.items()}


@attrs.define(eq=False)
class Told:
    """What a loop handed out, and what it left. rows: by step, its tokens. slots: what all slots hold at the end."""

    rows: list[dict[Hashable, int]] = attrs.field(factory=list)
    slots: dict[str, torch.Tensor] = attrs.field(factory=dict)
    cache: torch.Tensor | None = None


class Schedule:
    """Acts by the step that they reach: drawn while a loop of chunks runs, and done again while single steps run."""

    def __init__(self, game: Game, draw: random.Random) -> None:
        self.game, self.draw = game, draw
        self.tables = [[row * WIDE + page + 1 for page in range(WIDE)] for row in range(MOST * 2)]
        self.draw.shuffle(self.tables)
        self.acts = dict[int, list[Act]]()
        self.live, self.next_key = list[int](), 0
        self.first = self.joining(draw.randrange(1, MOST + 1))

    def joining(self, count: int) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Keys and rows of new requests."""
        keys = [*range(self.next_key, self.next_key + count)]
        self.next_key += count
        self.live += keys
        return keys, self.game.rows(self.draw, [self.tables[key % len(self.tables)] for key in keys])

    def invent(self, step: LaunchedStep) -> None:
        """Draw acts for the step that an act made now reaches, and do them."""
        draw, found = self.draw, list[Act]()
        if draw.random() < 0.3 and len(self.live) > 1:
            gone = draw.sample(self.live, draw.randrange(1, len(self.live)))
            self.live = [key for key in self.live if key not in gone]
            found.append(lambda step: step.leave(gone, now=False))
        if draw.random() < 0.3 and len(self.live) < MOST and self.next_key < len(self.tables):
            most = min(MOST - len(self.live), len(self.tables) - self.next_key)
            new, rows = self.joining(draw.randrange(1, most + 1))
            found.append(lambda step: step.join(rows, new))
        if draw.random() < 0.3:
            keys = draw.sample(self.live, draw.randrange(1, len(self.live) + 1))
            name = draw.choice(["ids", "lens", "rope", "scale", "pair"])
            values = self.game.rows(draw, [[0] * WIDE] * len(keys))[name]
            found.append(lambda step: step.edit(keys, **{name: values}))
        for act in found:
            act(step)
        self.acts.setdefault(step.lands, []).extend(found)

    def repeat(self, step: LaunchedStep) -> None:
        """Do the acts for the step that an act made now reaches."""
        for act in self.acts.get(step.lands, ()):
            act(step)


def run(schedule: Schedule, act: Act, steps: int | None, **options: Any) -> Told:
    """Run a loop until a chunk ends after so many steps, with one turn of acts for each step that they can reach."""
    game, told, (keys, rows) = schedule.game, Told(), schedule.first
    game.cache.zero_()
    loop, told_of = game.runner.steps(rows, keys=keys, needs=["positions"], **options), 0
    step: Any = None
    lands, needed, reserved = 0, dict[Hashable, int](), dict[Hashable, int]()
    for step in loop:
        if step.lands > lands:
            lands, reserved = step.lands, needed  # what was said last before the launch
        told.rows.append(dict(step.tokens()))
        if steps is not None and step.number + 1 >= steps:
            break
        if step.lands > told_of:
            told_of = step.lands
            act(step)
        needed = step.needs("positions")
    buffers = game.runner.graphs.buffers
    chain: Any = step._loop._chain
    count, told.cache = len(chain._keys), game.cache[PAGE:].cpu()
    for name, slot in game.runner.stage.declaration.slots.items():
        view = buffers[name].tensor
        for dim in slot.varying:
            view = view.narrow(dim, 0, count)
        told.slots[name] = view.cpu().clone()
    for key, position in zip(chain._keys, told.slots["positions"].tolist(), strict=True):
        assert position <= reserved.get(key, position)
    told.rows += [dict[Hashable, int]() for _ in range(step.lands - len(told.rows))]
    return told


def play(game: Game, seed: int) -> None:
    """Run chunks with random news, and single steps with the same news: nothing differs."""
    draw = random.Random(seed)
    schedule, chunk, ahead = Schedule(game, draw), draw.choice((1, *CHUNKS)), draw.randrange(3)
    steps = draw.randrange(2, 30)
    several = run(schedule, schedule.invent, steps, chunk=chunk, ahead=ahead)
    handed = steps
    single = run(schedule, schedule.repeat, len(several.rows), chunk=1, ahead=0)
    assert several.rows[:handed] == single.rows[:handed]
    assert several.cache is not None
    assert single.cache is not None
    assert torch.equal(several.cache, single.cache)
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


def play_all(ways: Any, runs: int, each: int = 40) -> None:
    """Play so many games on each way, with other rules after some."""
    for way in ways:
        for number in range(0, runs, each):
            draw = random.Random(number)
            game = Game.of(draw, backend_of(*way), way[1], in_slot=number // each % 2 == 0)
            for seed in range(number, min(number + each, runs)):
                play(game, seed)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_chunks_do_what_single_steps_do(way: tuple[str, str]) -> None:
    """Random rules, ends, joins, leaves and edits: tokens, slots and caches are those of single steps."""
    play_all([way], RUNS // len(WAYS), each=250 if THOROUGH else 10)


@pytest.mark.cuda
@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
def test_chunks_do_what_single_steps_do_on_cuda(lowering: str) -> None:
    """The same by graphs of a device."""
    play_all([("cuda", lowering)], RUNS // 2, each=250 if THOROUGH else 15)
