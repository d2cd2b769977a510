"""Batches: sources of every kind are taken right, or refused by the slot's name with nothing changed."""

import collections
import enum
import functools
import importlib
import itertools
import operator
import re
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, computed, copied
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.errors import BatchError, MissingSourceError, SlotGraphError
from slotgraph.extend import side
from tests.runners.models import PlainInputs, decoder, nothing_changes, random_batch, runner_by
from tests.strategies import declaration_of, draw

SLOTS = ("ids", "places", "weights", "pairs")


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """A dtype that no slot here converts from."""
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)


def texts(tensor: torch.Tensor) -> list[Any]:
    """Nested lists of words."""
    return [texts(row) if row.dim() else str(row.item()) for row in tensor]


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "dtype": (other_dtype, "convert it, or declare converts="),
    "bool": (lambda tensor: tensor > 1, "convert it, or declare converts="),
    "device": (lambda tensor: tensor.to("meta"), "move it there first"),
    "rank": (lambda tensor: tensor[..., None], "expected"),
    "scalar": (lambda tensor: tensor.flatten()[0], "expected"),
    "short": (lambda tensor: tensor[:-1], "pass the same number of rows"),
    "long": (lambda tensor: torch.cat([tensor, tensor[:1]]), "pass the same number of rows"),
    "length one": (lambda tensor: tensor[:1], "pass the same number of rows"),
    "strided": (lambda t: torch.stack([t, t + 1], 1)[:, 0], "pass `.contiguous()`, or declare strided=True"),
    "list of bools": (lambda tensor: (tensor > 1).tolist(), "convert it, or declare converts="),
    "list of words": (texts, "got list: "),
    "ragged list": (lambda t: [*t[:-1].tolist(), [[1], [2, 3]]], "mixed with numbers: pad them to one length"),
    "short list": (lambda tensor: tensor[:-1].tolist(), "pass the same number of rows"),
    "deep list": (lambda tensor: tensor[..., None].tolist(), "expected"),
    "array of another dtype": (lambda tensor: other_dtype(tensor).numpy(), "convert it, or declare converts="),
    "array of objects": (lambda tensor: tensor.numpy().astype(object), "got ndarray: "),
    "long array": (lambda tensor: torch.cat([tensor, tensor[:1]]).numpy(), "pass the same number of rows"),
    "None": (lambda _: None, "is missing; "),
    **{
        type(one).__name__: (functools.partial(lambda one, _: one, one), f"got {type(one).__name__}")
        for one in ("a", 3, {1}, range(2))
    },
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_source_that_does_not_fit_is_refused(runner: DecodeRunner[PlainInputs], kind: str) -> None:
    """A source of the wrong dtype, device, rank, length, layout or type is refused, on a graph's path and eagerly."""
    spoil, way_out = WRONG[kind]
    for turn, slot in enumerate(SLOTS):
        batch = random_batch((6, 20)[(turn + len(kind)) % 2], seed=1)
        batch[slot] = spoil(batch[slot])
        with nothing_changes(runner, batch), pytest.raises(BatchError, match=repr(slot)) as refused:
            runner(batch)
        assert way_out in str(refused.value)
        assert isinstance(refused.value, MissingSourceError) == (kind == "None")


def test_every_fault_of_a_batch_is_told_at_once(runner: DecodeRunner[PlainInputs]) -> None:
    """Two faults of one batch arrive in one message; floats are not truncated, be they whole numbers or in a list."""
    batch = random_batch(6, seed=3)
    ids = batch["ids"].float()
    for floats in (ids, ids.tolist(), ids.numpy()):
        batch["weights"], batch["ids"] = batch["weights"].double(), floats
        with nothing_changes(runner, batch), pytest.raises(BatchError) as refused:
            runner(batch)
        assert re.search(r"slot 'ids': expected int64 of shape \[6\].*got float32; round it you", str(refused.value))
        assert "slot 'weights': expected float32 of shape [6] on cpu, got float64" in str(refused.value)
    good = random_batch(6, seed=3)
    with pytest.raises(BatchError, match=r"slot 'pairs': .*a list of tensors: pass one tensor, for example from torch"):
        runner({**good, "pairs": [*good["pairs"]]})
    with pytest.raises(MissingSourceError, match=r"'weights'.* is missing; .*has 'weight': did you mean 'weights'?"):
        runner({name.replace("weights", "weight"): one for name, one in good.items()})


WIDTH = 2
ROWS: dict[str, Any] = {  # four sources that tell the requests, one of them by their tokens
    "a_first": copied(BATCH, dtype=torch.int64, pad=0),
    "b_second": copied(BATCH, 3, dtype=torch.int64, pad=0),
    "c_third": copied(BATCH, dtype=torch.float32, pad=0, source="nested.rows"),
    "d_fourth": copied(TOKENS, dtype=torch.int64, pad=0),
}


@functools.cache
def sized(*, backwards: bool, graphs: bool) -> Any:
    """One that sizes batches in its own way: the first slot by name is the one believed."""
    inputs = declaration_of(dict(sorted(ROWS.items(), reverse=backwards)))
    options: dict[str, Any] = {"buckets": [4, 16], "width": WIDTH, "output_rows": None, "backend": "cpu-capture"}
    return decoder(inputs, lambda view: view.a_first * 2, graphs=graphs, **options)


def rows_batch(*rows: int, seed: int) -> dict[str, Any]:
    """Random numbers, of so many rows by slot."""
    one, two, three, four = rows
    shapes = {"a_first": (one,), "b_second": (two, 3), "d_fourth": (four * WIDTH,)}
    return {"nested": {"rows": torch.rand(three)}, **{name: draw(1, 98, shapes[name], seed) for name in shapes}}


@given(
    rows=st.tuples(st.integers(1, 9), st.integers(0, 9)).filter(lambda rows: rows[0] != rows[1]),
    guilty=st.integers(0, 3) | st.none(),
    how=st.fixed_dictionaries({"backwards": st.booleans(), "graphs": st.booleans()}),
    seed=st.integers(0, 99),
)
def test_the_slot_that_differs_is_blamed(
    rows: tuple[int, int], guilty: int | None, how: dict[str, bool], seed: int
) -> None:
    """One source of other rows than three is named first, and no other is; where two differ from two, all four are."""
    (right, wrong), runner, names = rows, sized(**how), [*ROWS]
    runner(rows_batch(right, right, right, right, seed=seed))
    differs = [place % 2 == 0 if guilty is None else place == guilty for place in range(4)]
    given_rows = [wrong if one else right for one in differs]
    with pytest.raises(BatchError) as caught:
        runner(rows_batch(*given_rows, seed=seed))
    said = str(caught.value)
    assert all(said.count(repr(name)) == 1 for name in names)
    assert "expected" not in said
    first, *others = re.findall(r"[^;]+ says? [^;:]+", said)
    each = wrong * WIDTH // right
    if guilty == 3 and wrong and wrong * WIDTH == each * right:
        assert said.endswith(f"TOKENS is {each} x BATCH: did you mean width={each}?")
        assert first == f"'d_fourth' says TOKENS={wrong * WIDTH}"
    elif guilty is not None:
        size = f"BATCH * 2 = {wrong * WIDTH}" if guilty == 3 else f"BATCH={wrong}"
        assert first == f"{names[guilty]!r} says {size}"
    assert others
    runner(rows_batch(right, right, right, right, seed=seed))


MOST = 40


class Indexed:  # a whole number of an engine's own
    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:  # noqa: D105 - as Python has it
        return self.number


class Token(enum.IntEnum):
    SMALL = 7
    LARGE = 90


NUMBERS: list[Any] = [int, Indexed, np.int64, np.uint8, lambda row: Token.LARGE if row > MOST else Token.SMALL]
NO_NUMBERS: list[Any] = ["90", object(), np.array([90]), [90], b"Z", 90.5]


@functools.cache
def limited(placement: Any, lowering: str) -> Any:
    """A captured runner whose numbers have a limit."""
    lens = copied(BATCH, dtype=torch.int64, pad=1, limit=MOST, placement=placement)
    return decoder(declaration_of({"lens": lens}), lambda view: view.lens + 0, lowering=lowering)


@example(drawn=[(90, int)], wrong=np.array([90]), boxed=list, how=("device", LADDER[0]))  # over the limit, too
@given(
    drawn=st.lists(st.tuples(st.integers(0, 100), st.sampled_from(NUMBERS)), min_size=1, max_size=3),
    wrong=st.none() | st.sampled_from(NO_NUMBERS),
    boxed=st.sampled_from([list, tuple, torch.tensor]),
    how=st.tuples(st.sampled_from(["device", "host"]), st.sampled_from(LADDER)),
)
def test_numbers_in_a_list_are_taken_or_refused_by_their_slot(
    drawn: list[tuple[int, Any]], wrong: Any, boxed: Any, how: tuple[str, str]
) -> None:
    """Objects of all kinds in one list are the numbers, or what is none, or over the limit, is refused by its slot."""
    items: Any = [kind(row) for row, kind in drawn] + ([] if wrong is None else [wrong])
    said = "slot 'lens': "
    if wrong is None:
        numbers = [*map(operator.index, items)]
        over = [(row, number) for row, number in enumerate(numbers) if number > MOST]
        if boxed is torch.tensor:  # on the host, as nobody waits for a tensor of the device
            items, how = numbers, ("host", how[1])
        said += "row {} is {}, over the limit of 40".format(*over[0]) if over else ""
        items = boxed(items)
        if not over:
            assert limited(*how)({"lens": items}).tolist() == numbers
            return
    with pytest.raises(SlotGraphError, match=re.escape(said)):
        limited(*how)({"lens": items})


Pairs = Mapping[str, Any]


def made() -> torch.Tensor:
    """What a factory makes of nothing: a tensor that would fit."""
    return torch.tensor([7, 7])


class KeepingDict(dict[str, Any]):  # makes what it lacks and keeps it, as `defaultdict` does
    def __missing__(self, key: str) -> Any:  # noqa: D105 - as above
        return self.setdefault(key, made())


MAPPINGS: dict[str, Callable[[Pairs], Pairs]] = {
    "defaultdict": lambda pairs: collections.defaultdict(made, pairs),
    "counter": collections.Counter,
    "user": lambda pairs: collections.UserDict(dict(pairs)),
    "missing": KeepingDict,
    "chain": lambda pairs: collections.ChainMap(dict(pairs)),
    "proxy": types.MappingProxyType,
}


class Deep(Inputs):
    """Sources of every way in which a batch is read: by name, nested, beside the batch, by a field, and optional."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    more: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    deep: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source="inner.deep")
    given: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=side("outer.given"))
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
    scale: int = 3
    scaled: torch.Tensor = computed(lambda scale: scale, shape=1, dtype=torch.int64)


class Flat(Inputs):  # sources by their names alone, which are read in one go
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    more: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def total(view: Any) -> Any:
    """A number of all sources, another where the optional one is there."""
    if isinstance(view, Flat):
        return view.ids + view.more
    return (view.ids + view.more + view.deep + view.given) * view.scaled + 1000 * (view.extra is not None)


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_is_asked_and_not_changed(name: str) -> None:
    """Each kind of mapping gives what it has; what it lacks is missing, whichever part lacks it; no key is added."""
    kind, ways = MAPPINGS[name], (*(f"cpu-capture {one}" for one in LADDER), "eager", "no copy")
    for inputs, how in itertools.product((Deep, Flat), ways):
        runner = runner_by(how, inputs, total, absent=[{"extra"}] if inputs is Deep else [])
        ids, more, deep, outer = (torch.tensor([1, 2]) * 10**place for place in range(4))
        pairs = {"ids": ids, "more": more, "inner": kind({"deep": deep})}
        beside = {"outer": kind({"given": outer})} if inputs is Deep else {}
        batch, right = kind(pairs), [3333, 6666] if inputs is Deep else [11, 22]
        for _ in range(3):
            assert runner(batch, **beside).tolist() == right, how
        lacks = [({key: pairs[key] for key in pairs if key != one}, beside, one) for one in ("ids", "more")]
        if inputs is Deep:
            lacks += [({**pairs, "inner": kind({"other": 1})}, beside, "deep"), (pairs, {"outer": kind({})}, "given")]
        for given_pairs, given_beside, lacking in lacks:
            short = kind(given_pairs)
            for _ in range(2):
                with pytest.raises(MissingSourceError, match=lacking):
                    runner(short, **given_beside)
            assert set(short) == set(given_pairs), how
        assert (set(batch), set(pairs["inner"])) == (set(pairs), {"deep"}), how
        assert inputs is Flat or set(beside["outer"]) == {"given"}, how
        assert runner(batch, **beside).tolist() == right, how


class Sub(torch.Tensor): ...


class Two(Inputs):
    lead: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, strided=True)
    other: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, strided=True)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its memory."""
    tensor.untyped_storage().resize_(0)
    return tensor


def escaped(transform: Any, given: torch.Tensor) -> torch.Tensor:
    """What a transform of torch hands to its function."""
    found: list[torch.Tensor] = []
    transform(lambda one: found.append(one) or one.sum())(given)  # type: ignore[func-returns-value]
    return found[0]


def itself(times: int) -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = []
    found += [found] * times
    return found


def nested(levels: int, times: int) -> Any:
    """Lists within lists, each so many times."""
    found: Any = [1.0, 2.0][:times]
    for _ in range(levels):
        found = [found] * times
    return found


torch_: Any = torch  # of whose parts some have no types


def fake(*, sized: bool) -> Any:
    """A tensor without data, of known sizes or of unknown ones."""
    mode = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode
    if sized:
        return mode().from_tensor(torch.ones(2))
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv()
    return mode(shape_env=shapes).from_tensor(torch.ones(2), static_shapes=False)


NO_SOURCES: Final[list[Callable[[], Any]]] = [
    lambda: torch.nested.nested_tensor([torch.ones(1)] * 2),
    lambda: torch.nested.nested_tensor([torch.tensor([3.0, 4.0])]),
    lambda: torch.nested.nested_tensor([torch.ones(1)] * 2, layout=torch.jagged),
    lambda: torch.tensor([3.0, 4.0]).to_sparse(),
    lambda: torch.ones(2, 2).to_sparse_csr(),
    lambda: torch.ones(2, 2).to_sparse_csc(),
    lambda: torch.ones(2, 2).to_sparse_bsr((1, 1)),
    lambda: torch_.tensor([3.0, 4.0]).to_mkldnn() if torch_.backends.mkldnn.is_available() else {},
    *(functools.partial(fake, sized=sized) for sized in (True, False)),
    lambda: torch.ones(2, device="meta"),
    lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    lambda: importlib.import_module("torch.testing._internal.two_tensor").TwoTensor(*[torch.tensor([3.0, 4.0])] * 2),
    torch_.nn.UninitializedParameter,
    lambda: freed(torch.tensor([3.0, 4.0])),
    lambda: freed(torch.ones(4)[::2]),
    lambda: escaped(torch.func.vmap, torch.ones(2, 2)),
    lambda: escaped(torch.func.grad, torch.ones(2)),
    lambda: torch_._efficientzerotensor((2,)),
    lambda: torch_._to_functional_tensor(torch.ones(2)),
    lambda: torch.tensor([3 + 4j, 5 + 6j]).conj(),
    *(functools.partial(itself, times) for times in (1, 2)),
    *(functools.partial(nested, *sizes) for sizes in ((100_000, 1), (60, 2))),
    lambda: {"a": 1},
    *(functools.partial(types.SimpleNamespace, shape=shape) for shape in ((2,), ("a",))),
]
SOURCES: Final[list[Callable[[], torch.Tensor]]] = [
    lambda: torch.tensor([3.0, 4.0]).as_subclass(Sub),
    lambda: torch.nn.Parameter(torch.tensor([3.0, 4.0])),
    lambda: torch.tensor([3.0, 4.0], requires_grad=True),
    lambda: torch.tensor([3.0, 4.0], requires_grad=True) * 1,
    lambda: torch.inference_mode()(torch.tensor)([3.0, 4.0]),
    lambda: torch_._neg_view(torch.tensor([-3.0, -4.0])),
    lambda: torch.tensor([1 - 3j, 2 - 4j]).conj().imag,
    lambda: torch.tensor([3.0]).expand(2),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["cpu-capture foreach", "cpu-capture in_graph", "eager", "no copy"])
def test_whatever_torch_calls_a_tensor_is_copied_or_refused(how: str) -> None:
    """It is copied right or refused by its slot's name, before and after a step like it."""
    good = {"lead": torch.tensor([5.0, 6.0]), "other": torch.tensor([1.0, 2.0])}
    slot = copied(BATCH, dtype=torch.int64, pad=0, placement="host", limit=9, converts=(torch.float32,))
    limited_two = declaration_of(dict.fromkeys(good, slot))
    cases = itertools.product((Two, limited_two), [*NO_SOURCES, *SOURCES], good, (True, False))
    for inputs, make, place, prepared in cases:
        runner = runner_by(how, inputs, lambda view: view.lead.float() * 100 + view.other)
        for _ in range(3 if prepared else 0):  # of that size, also by the short way
            runner({key: value.clone() for key, value in good.items()})
        for _ in range(2):
            source = make()
            if make in SOURCES and inputs is Two:
                right = {**good, place: source.detach().clone()}
                assert torch.equal(runner({**good, place: source}), right["lead"] * 100 + right["other"])
            else:
                with pytest.raises(BatchError, match=repr(place)) if make in NO_SOURCES else suppress(BatchError):
                    runner({**good, place: source})
        assert runner(good).tolist() == [501, 602]
