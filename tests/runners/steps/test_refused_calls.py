"""What `steps()` is given by mistake: each time an error of the library, which names what came, and nothing changes."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied, output
from slotgraph.errors import BatchError, ConfigError, DeclarationErrors, SlotGraphError
from slotgraph.extend import LaunchedStep, side
from tests.runners.models import decoder

LOWERINGS: Final = ["direct", "foreach", "in_graph", "fused", "slot_by_slot"]
JUNK: Final[list[Any]] = [
    *(None, 5, 2.5, True, object(), "req", b"req", "", [], (), {}, {"a": 1}, [[1]], [{}], [None], ["a", ["b"]]),
    *(
        torch.tensor(3),
        torch.tensor([0, 1]),
        np.array(3),
        np.array([[1.5]]),
        {1, 2},
        range(3),
        len,
        int,
        [torch.ones(1)],
    ),
]


class Mixed(Inputs):  # slots of each shape and place that an edit may bring
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1, then=lambda ids: ids + 1)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda lens: lens + 1, limit=500)
    pages: torch.Tensor = copied(BATCH, 3, dtype=torch.int64, pad=0)
    done: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True)
    rope: torch.Tensor = copied(3, TOKENS, dtype=torch.int16, pad=0)
    host: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
    scale: torch.Tensor = copied(1, dtype=torch.float32)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


def mixed_step(view: Mixed) -> torch.Tensor:
    """[BATCH] numbers of all slots."""
    sums = view.ids + view.lens + view.pages.sum(1) + view.done * 7 + view.rope.sum(0) + view.scale.to(torch.int64)
    view.made.copy_(sums)
    return view.made


def mixed(*ids: int) -> dict[str, Any]:
    """A batch of these requests."""
    rows = len(ids)
    rope = [[*ids]] * 3
    return {
        "ids": [*ids],
        "lens": [4] * rows,
        "pages": torch.arange(rows * 3).view(rows, 3),
        "done": [True] * rows,
        "rope": torch.tensor(rope, dtype=torch.int16),
        "host": [2] * rows,
        "scale": torch.tensor([3.0]),
    }


@pytest.fixture(params=["foreach", "in_graph"], scope="module")
def runner(request: pytest.FixtureRequest) -> DecodeRunner[Mixed]:
    """A runner by each lowering, of which each test begins steps anew."""
    made: DecodeRunner[Mixed] = decoder(
        Mixed, mixed_step, backend="cpu-capture", buckets=(2, 4), output_rows=BATCH, lowering=request.param
    )
    return made


def calls_of(junk: Any) -> dict[str, Callable[[Any], Any]]:
    """Every method of a step, with something that is not meant for it."""
    first = {
        "leave": lambda step: step.leave(junk),
        "leave one": lambda step: step.leave([junk]),
        "leave later": lambda step: step.leave(junk, now=False),
        "join": lambda step: step.join(mixed(9), junk),
        "join one": lambda step: step.join(mixed(9), [junk]),
        "join batch": lambda step: step.join(junk, ["c"]),
        "edit": lambda step: step.edit(junk, ids=[3]),
        "edit one": lambda step: step.edit([junk], ids=[3]),
        "needs": lambda step: step.needs(junk),
        "hold": lambda step: step.hold(junk),
    }
    slots = {
        f"edit {name} of {len(keys)}": lambda step, keys=keys, name=name: step.edit(keys, **{name: junk})
        for name in mixed(1)
        for keys in ([], ["a"])
    }
    return first | slots


def test_every_method_takes_or_refuses_junk(runner: DecodeRunner[Mixed]) -> None:
    """Whatever each method is given, it takes it or refuses it; a refused one changes nothing."""
    plain, refused = runner.steps(mixed(10, 20), keys=["a", "b"], needs=["lens"]), 0
    next(plain)
    wanted = next(plain).tokens()
    for junk in JUNK:
        for name, call in calls_of(junk).items():
            loop = runner.steps(mixed(10, 20), keys=["a", "b"], needs=["lens"])
            step = next(loop)
            try:
                call(step)
            except SlotGraphError:
                refused += 1
                assert next(loop).tokens() == wanted, (name, junk)
    assert refused > 250


@pytest.mark.parametrize("place", range(1, len(JUNK)))
def test_junk_arguments_of_steps_are_refused(place: int) -> None:
    """They are refused before anything is run."""
    junk = JUNK[place]
    runner = decoder(Mixed, mixed_step, backend="cpu-capture", buckets=(2,), output_rows=BATCH)
    for argument in ("keys", "needs", "read", "ahead"):
        given: Any = {argument: junk}
        with suppress(SlotGraphError):
            next(runner.steps(mixed(1, 2), **given))
    with pytest.raises(SlotGraphError, match=r"slot '|^a batch is a mapping or an object"):
        runner.steps(junk)


REFUSED: Final[dict[str, Callable[[Any], Any]]] = {
    r"a key is one object: leave\(\['req'\]\)": lambda step: step.leave("req"),
    r"a key is one object: leave\(\[3\]\)": lambda step: step.leave(3),
    r"a key is one object: leave\(\[None\]\)": lambda step: step.leave(None),
    r"a key is one object: join\(batch, \['new'\]\)": lambda step: step.join(mixed(9), "new"),
    r"a key is one object: edit\(\['req'\], \.\.\.\)": lambda step: step.edit("req", ids=[1]),
    r"there is no request 'pool': a key is one object: leave\(\[\('pool', 1\)\]\)": lambda step: step.leave(
        ("pool", 1)
    ),
    r"keys are objects that can be hashed, .* got \[\[1\]\]: unhashable type": lambda step: step.join(mixed(9), [[1]]),
    r"there is no request 'x': it has left, or never joined": lambda step: step.leave(["r", "x"]),
    r"request 'r' is live": lambda step: step.join(mixed(9), ["r"]),
    r"2 keys for 1 requests": lambda step: step.join(mixed(9), [3, 4]),
    r"the largest bucket holds 8; let others leave first": lambda step: step.join(mixed(*range(5)), range(5)),
    r"slot 'done': .* is missing": lambda step: step.join({"lens": [4]}, ["x"]),
    r"slot 'lens': row 0 is 501, over the limit of 500": lambda step: step.join({**mixed(9), "lens": [501]}, ["x"]),
    r"slot 'lens': row 0 is 502, over the limit of 500": lambda step: step.edit(["r"], lens=[502]),
    r"edit names 'idz', which is not a slot .* did you mean 'ids'": lambda step: step.edit(["r"], idz=[1]),
    r"slot 'ids': .*; say whose rows these are: edit\(keys, \.\.\.\)": lambda step: step.edit(ids=[1]),
    r"named twice": lambda step: step.edit(["r", "r"], ids=[1, 2]),
    r"slot 'ids': expected int64 of shape \[1\]": lambda step: step.edit(["r"], ids=torch.zeros(1)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_refused_call_says_what_to_do(message: str) -> None:
    """It changes nothing. Letters or parts of a key are never taken for keys, even where requests have these names."""
    runner = decoder(Mixed, mixed_step, backend="cpu-capture", buckets=(8,), output_rows=BATCH)
    keys: list[Any] = ["r", "e", "q", ("pool", 1)]
    for step in runner.steps(mixed(1, 2, 3, 4), keys=keys):
        with pytest.raises(BatchError, match=message):
            REFUSED[message](step)
        assert [*dict(step.tokens())] == keys
        if step.number == 1:
            break
    with pytest.raises(BatchError, match=r"a key is one object: steps\(batch, keys=\['reqs'\]\)"):
        runner.steps(mixed(1, 2, 3, 4), keys="reqs")


WHOLE: Final = (
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_of_every_dtype_advance_and_move(cpu: str, dtype: torch.dtype, lowering: str) -> None:
    """They advance up and down beyond their ends, and their rows move, where torch itself adds no such numbers."""
    info = torch.iinfo(dtype)
    size, most = 1 << info.bits, min(info.max, (1 << 63) - 1)

    class Whole(Inputs):
        up: torch.Tensor = copied(BATCH, dtype=dtype, pad=1, then=lambda up: up + most)
        down: torch.Tensor = copied(BATCH, 2, dtype=dtype, pad=1, then=lambda down: down - 3)

    def step(view: Whole) -> torch.Tensor:
        return torch.cat([view.up[:, None].to(torch.int64), view.down.to(torch.int64)], 1)

    def bits_of(rows: Any) -> list[Any]:  # some numbers of uint64 are below 0 as int64
        return [[one % size for one in row] for row in rows]

    runner = decoder(Whole, step, backend=cpu, buckets=(2, 4), output_rows=BATCH, lowering=lowering)
    draw = torch.Generator().manual_seed(3)
    low, high = max(info.min, -(1 << 62)), min(info.max, 1 << 62)
    rows = torch.randint(low, high, (3, 3), generator=draw).tolist()

    def brought(some: list[list[int]]) -> dict[str, torch.Tensor]:
        table = torch.tensor(some)
        return {"up": table[:, 0].contiguous().to(dtype), "down": table[:, 1:].contiguous().to(dtype)}

    gone = set[int]()
    for one in runner.steps(brought(rows), keys=[0, 1, 2]):
        found = dict(one.tokens())
        assert bits_of(found.values()) == bits_of([rows[key] for key in found])
        assert found.keys() == {*one.keys} - {*gone}
        if one.number == 1:
            one.leave([0])
            gone.add(0)
        if one.number == 2:
            rows.append([5, 6, 7])
            one.join(brought(rows[3:]), [3])
            rows[3] = [5 - most, 9, 10]  # as it is advanced below
        if one.number == 3:
            rows[1] = [8 - most, 4, 4]
            one.edit([1], **brought([[8, 1, 1]]))
        if one.number == 5:
            break
        rows = [[row[0] + most, row[1] - 3, row[2] - 3] for row in rows]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_advance_and_move_on_cuda(dtype: torch.dtype, lowering: str) -> None:
    """The same by the compiled kernel, and by torch's own operators."""
    test_whole_numbers_of_every_dtype_advance_and_move("cuda", dtype, lowering)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_rule_that_torch_cannot_run_is_named(cpu: str, lowering: str) -> None:
    """It is named with its line."""

    class Chained(Inputs):
        first: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, then=lambda first: first.reshape(7, 1))
        number: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)

    runner = DecodeRunner(
        Chained, lambda view: view.number, backend=cpu, buckets=(2,), output_rows=BATCH, lowering=lowering
    )

    def two_steps() -> list[LaunchedStep]:
        runner.capture()
        steps = runner.steps({"first": [1], "number": [1]})
        return [*itertools.islice(steps, 2)]

    with pytest.raises(SlotGraphError, match=r"slot 'first': its function .* raised .* at test_refused_calls\.py:\d+"):
        two_steps()


def rule_of(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A rule that adds a number."""
    return lambda x: x - -number if number % 2 else number + x


FITS: Final = {
    torch.int8: (127, -128),
    torch.uint8: (255, -255),
    torch.int16: (32767, -32768),
    torch.uint16: (65535, -65535),
    torch.int32: (2**31 - 1, -(2**31)),
    torch.uint32: (2**32 - 1, 1 - 2**32),
    torch.int64: (2**63 - 1, -(2**63)),
    torch.float16: (65504, -65504),
    torch.bool: (1,),
}


@pytest.mark.parametrize("dtype", FITS, ids=str)
def test_a_constant_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype) -> None:
    """It is refused with the class, and the largest that it holds is not."""
    for number in FITS[dtype]:

        class Right(Inputs):
            x: torch.Tensor = copied(BATCH, dtype=dtype, pad=0, then=rule_of(number))

        for wrong in [number + (1 if number > 0 else -1), 2**70, -(2**70)]:
            with pytest.raises(DeclarationErrors) as caught:

                class _Wrong(Inputs):
                    x: torch.Tensor = copied(BATCH, dtype=dtype, pad=0, then=rule_of(wrong))

            (fault,) = caught.value.exceptions
            name = str(dtype).removeprefix("torch.")
            assert f"slot 'x': its then= adds {wrong}, which {name} cannot hold" in str(fault)


def test_a_sum_of_constants_is_what_counts() -> None:
    """What a rule adds on the way need not fit."""

    class Back(Inputs):
        x: torch.Tensor = copied(BATCH, dtype=torch.int8, pad=0, then=lambda x: x + 300 - 299)

    runner = decoder(Back, lambda view: view.x, backend="cpu-capture", buckets=(2,), output_rows=BATCH)
    assert [
        step.tokens() for step in itertools.islice(runner.steps({"x": torch.tensor([4], dtype=torch.int8)}), 3)
    ] == [
        [(0, 4)],
        [(0, 5)],
        [(0, 6)],
    ]


class Beside(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)
    lens: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None, then=lambda lens: lens + 1)
    biases: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None, source=side("more.biases"))


class Needed(Beside):
    biases: torch.Tensor = copied(  # pyright: ignore[reportIncompatibleVariableOverride] - what is optional is needed
        BATCH, dtype=torch.int64, pad=0, source=side("more.biases")
    )


def test_what_no_batch_of_steps_can_bring_is_named(cpu: str) -> None:
    """A slot that a side argument brings, unless it is optional; and one that is absent has no needs."""
    runner = decoder(Beside, lambda view: view.ids * 1, backend=cpu, absent=[{"lens", "biases"}])
    assert next(runner.steps({"ids": [1]})).tokens() == [(0, 1)]
    with pytest.raises(ConfigError, match="needs names 'lens', an optional slot that this batch lacks"):
        runner.steps({"ids": [1]}, needs=["lens"])
    runner = decoder(Needed, lambda view: view.ids * 1, backend=cpu)
    with pytest.raises(ConfigError, match=r"'biases' is read from argument more.biases, which steps\(\) does not take"):
        runner.steps({"ids": [1], "lens": [1]})


def test_holds_need_a_reason() -> None:
    """An empty one would hold nothing."""
    runner = decoder(Mixed, mixed_step, backend="cpu-capture", buckets=(2,), output_rows=BATCH)
    step = next(runner.steps(mixed(1)))
    for wrong in ("", 5, None):
        with pytest.raises(ConfigError, match="hold: expected a reason"):
            step.hold(wrong)
