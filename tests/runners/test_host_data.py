"""Sources of every kind: numbers in lists held to a limit, mappings that are asked, tensors of all kinds of torch."""

import collections
import enum
import functools
import itertools
import operator
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, computed, copied
from slotgraph.backends import choose
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.errors import MissingSourceError, SlotGraphError
from slotgraph.extend import side

MOST = 40


class Indexed:
    """A whole number of an engine's own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        """The number."""
        return self.number


class Token(enum.IntEnum):
    """A whole number with a name."""

    SMALL = 7
    LARGE = 90


NUMBERS: list[Any] = [int, Indexed, np.int64, np.uint8, lambda row: Token.LARGE if row > MOST else Token.SMALL]
NO_NUMBERS: list[Any] = ["90", object(), np.array([90]), [90], b"Z", 90.5]


class Device(Inputs):
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, limit=MOST)


class Host(Inputs):
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, limit=MOST, placement="host")


def _lens(view: Any) -> torch.Tensor:
    """A step that gives back what it was given."""
    return torch.as_tensor(view.lens + 0)


@functools.cache
def limited(at: int) -> DecodeRunner[Any]:
    """A captured runner, one of eight."""
    inputs, lowering = list(itertools.product((Device, Host), LADDER))[at]
    runner = DecodeRunner(inputs, _lens, buckets=[4], backend="cpu", lowering=lowering, progress=False)
    runner.capture()
    return runner


rows = st.lists(st.tuples(st.integers(0, 100), st.sampled_from(NUMBERS)), min_size=1, max_size=3)


@example(drawn=[(90, int)], wrong=np.array([90]), place=1, boxed=list, at=0)  # over the limit, beside an array
@given(
    drawn=rows,
    wrong=st.none() | st.sampled_from(NO_NUMBERS),
    place=st.integers(0, 4),
    boxed=st.sampled_from([list, tuple, torch.tensor]),
    at=st.integers(0, 7),
)
def test_numbers(drawn: list[tuple[int, Any]], wrong: Any, place: int, boxed: Any, at: int) -> None:
    """Objects of all kinds in one list: what is no number, and the first over the limit, is refused by the slot's name.

    Else the step gets the numbers.
    """
    items: Any = [kind(row) for row, kind in drawn]
    if wrong is not None:
        items.insert(place, wrong)
        with pytest.raises(SlotGraphError, match=re.escape("slot 'lens': ")):
            limited(at)({"lens": items})
        return
    if boxed is torch.tensor:
        items, boxed = torch.tensor([*map(operator.index, items)], dtype=torch.int32), torch.clone
        at = len(LADDER) + at % len(LADDER)  # on the host: nobody waits for a tensor of the device
    over = [place for place, item in enumerate(items) if operator.index(item) > MOST]
    if not over:
        assert limited(at)({"lens": boxed(items)}).tolist() == [operator.index(item) for item in items]
        return
    said = rf"slot 'lens': row {over[0]} is {operator.index(items[over[0]])}, over the limit of {MOST}"
    with pytest.raises(SlotGraphError, match=said):
        limited(at)({"lens": boxed(items)})


Pairs = Mapping[str, Any]


def made() -> torch.Tensor:
    """What a factory makes of nothing: a tensor that would fit."""
    return torch.tensor([7, 7])


class KeepingDict(dict[str, Any]):
    """Makes what it lacks and keeps it, as `defaultdict` does."""

    def __missing__(self, key: str) -> torch.Tensor:
        """Make it."""
        self[key] = made()
        return self[key]  # type: ignore[no-any-return]


MAPPINGS: dict[str, Callable[[Pairs], Pairs]] = {
    "defaultdict": lambda pairs: collections.defaultdict(made, pairs),
    "counter": collections.Counter,
    "user": lambda pairs: collections.UserDict(dict(pairs)),
    "missing": KeepingDict,
    "chain": lambda pairs: collections.ChainMap(dict(pairs)),
    "proxy": types.MappingProxyType,
}


class Nested(Inputs):
    """Sources of every way in which a batch is read: by name, nested, beside the batch, by a field, and optional."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    more: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    deep: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source="inner.deep")
    given: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=side("outer.given"))
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
    scale: int = 3
    scaled: torch.Tensor = computed(lambda scale: scale, shape=1, dtype=torch.int64)


def total(view: Nested) -> torch.Tensor:
    """A number of all sources, another where the optional one is there."""
    rows = (view.ids + view.more + view.deep + view.given) * view.scaled
    return rows if view.extra is None else rows + 1000


def batch_of(kind: Callable[[Pairs], Pairs]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that a batch must have, and what comes beside it."""
    values = {name: torch.tensor([1, 2]) * 10**place for place, name in enumerate(("ids", "more", "deep", "given"))}
    batch = {"ids": values["ids"], "more": values["more"], "inner": kind({"deep": values["deep"]})}
    return batch, {"outer": kind({"given": values["given"]})}


class Flat(Inputs):
    """Sources by their names alone, which are read in one go."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    more: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def runners_over(inputs: type[Inputs]) -> Iterator[tuple[str, Any]]:
    """One of each lowering, and eager ones."""
    step: Any = total if inputs is Nested else lambda view: view.ids + view.more
    absent = [{"extra"}] if inputs is Nested else []
    for lowering in choose("cpu").capabilities.lowerings:
        runner = DecodeRunner(inputs, step, buckets=[4], absent=absent, backend="cpu-capture", lowering=lowering)
        runner.capture()
        yield lowering, runner
    yield "eager", EagerRunner(inputs, step, backend="cpu")
    yield "no copy", EagerRunner(inputs, step, backend="cpu", no_copy=True)


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_is_asked_and_not_changed(name: str) -> None:
    """Each kind of mapping gives what it has; what it lacks is missing, whichever part lacks it; no key is added."""
    kind = MAPPINGS[name]
    for inputs, right in ((Nested, [3333, 6666]), (Flat, [11, 22])):  # the second reads all its names in one go
        for how, runner in runners_over(inputs):
            pairs, beside = batch_of(kind)
            pairs, beside = (pairs, beside) if inputs is Nested else ({n: pairs[n] for n in ("ids", "more")}, {})
            batch = kind(pairs)
            for _ in range(3):
                assert runner(batch, **beside).tolist() == right, how
            for lacking in ("ids", "more"):
                short = kind({key: value for key, value in pairs.items() if key != lacking})
                for _ in range(2):
                    with pytest.raises(MissingSourceError, match=lacking):
                        runner(short, **beside)
                assert set(short) == set(pairs) - {lacking}, how
            if inputs is Nested:
                with pytest.raises(MissingSourceError, match="deep"):
                    runner(kind({**pairs, "inner": kind({"other": 1})}), **beside)
                with pytest.raises(MissingSourceError, match="given"):
                    runner(batch, outer=kind({"other": 1}))
                assert (set(pairs["inner"]), set(beside["outer"])) == ({"deep"}, {"given"}), how
            assert set(batch) == set(pairs), how
            assert runner(batch, **beside).tolist() == right, how


KINDS: Final = {
    "nested": ("torch.nested.nested_tensor([torch.ones(1)] * 2)", None),
    "nested of one length": ("torch.nested.nested_tensor([torch.tensor([3., 4.])])", None),
    "jagged": ("torch.nested.nested_tensor([torch.ones(1)] * 2, layout=torch.jagged)", None),
    "coo": ("torch.tensor([3., 4.]).to_sparse()", None),
    "csr": ("torch.ones(2, 2).to_sparse_csr()", None),
    "csc": ("torch.ones(2, 2).to_sparse_csc()", None),
    "bsr": ("torch.ones(2, 2).to_sparse_bsr((1, 1))", None),
    "mkldnn": ("torch.tensor([3., 4.]).to_mkldnn() if torch.backends.mkldnn.is_available() else None", None),
    "fake": ("FakeTensorMode().from_tensor(torch.ones(2))", None),
    "fake of unknown sizes": (
        "FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(2), static_shapes=False)",
        None,
    ),
    "meta": ("torch.ones(2, device='meta')", None),
    "quantized": ("torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)", None),
    "wrapper": ("TwoTensor(torch.tensor([3., 4.]), torch.tensor([3., 4.]))", None),
    "subclass": ("torch.tensor([3., 4.]).as_subclass(Sub)", [3, 4]),
    "parameter": ("torch.nn.Parameter(torch.tensor([3., 4.]))", [3, 4]),
    "uninitialized": ("torch.nn.UninitializedParameter()", None),
    "grad": ("torch.tensor([3., 4.], requires_grad=True)", [3, 4]),
    "result of grad": ("torch.tensor([3., 4.], requires_grad=True) * 1", [3, 4]),
    "freed": ("freed(torch.tensor([3., 4.]))", None),
    "freed and strided": ("freed(torch.ones(4)[::2])", None),
    "vmap": ("escaped(torch.func.vmap)", None),
    "func grad": ("escaped(torch.func.grad)", None),
    "zero": ("torch._efficientzerotensor((2,))", None),
    "functional": ("torch._to_functional_tensor(torch.ones(2))", None),
    "inference": ("inferred()", [3, 4]),
    "negated": ("torch._neg_view(torch.tensor([-3., -4.]))", [3, 4]),
    "conjugated": ("torch.tensor([3 + 4j, 5 + 6j]).conj()", None),
    "imaginary": ("torch.tensor([1 - 3j, 2 - 4j]).conj().imag", [3, 4]),
    "expanded": ("torch.tensor([3.]).expand(2)", [3, 3]),
    "list of itself": ("itself(list)", None),
    "list of itself twice": ("itself(list, 2)", None),
    "lists too deep": ("deep(100_000)", None),
    "lists that double": ("doubled(60)", None),
    "dict": ("{'a': 1}", None),
    "nothing with a shape": ("types.SimpleNamespace(shape=(2,))", None),
    "odd shape": ("types.SimpleNamespace(shape=('a',))", None),
}

BODY: Final = """
import math, sys, types, warnings
import structlog, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor
from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.errors import BatchError

warnings.simplefilter("ignore")
structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])

class Sub(torch.Tensor): ...
class Two(Inputs):
    lead: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, strided=True)
    other: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, strided=True)
class Limited(Inputs):
    lead: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", limit=9, converts=(torch.float32,))
    other: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", limit=9, converts=(torch.float32,))

def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor
def escaped(transform):
    found = []
    given = torch.ones(2, 2) if transform is torch.func.vmap else torch.ones(2)
    transform(lambda one: (found.append(one), one.sum())[1])(given)
    return found[0]
def inferred():
    with torch.inference_mode():
        return torch.tensor([3.0, 4.0])
def itself(kind, times=1):
    made = []
    made.extend([made] * times)
    return made
def deep(levels):
    made = [1.0]
    for _ in range(levels):
        made = [made]
    return made
def doubled(levels):
    made = [1.0, 2.0]
    for _ in range(levels):
        made = [made, made]
    return made

def runner_of(how, inputs):
    step = lambda view: view.lead.float() * 100 + view.other
    if how in ("eager", "no copy"):
        return EagerRunner(inputs, step, backend="cpu", no_copy=how == "no copy")
    runner = DecodeRunner(inputs, step, buckets=[1, 4], backend="cpu-capture", lowering=how)
    runner.capture()
    return runner

failed = False
def tell(*words):
    global failed
    failed = True
    print(*words, flush=True)

KINDS, hows = %r, %r
for how in hows:
    for inputs in (Two, Limited):
        runner, good = runner_of(how, inputs), {"lead": torch.tensor([5.0, 6.0]), "other": torch.tensor([1.0, 2.0])}
        for name, (text, right) in KINDS.items():
            for place in ("lead", "other"):
                for prepared in (True, False) if (inputs, place) == (Two, "other") else (True,):
                    if not prepared:
                        runner = runner_of(how, inputs)
                    else:
                        runner(good), runner(good)  # steps of that size were done, also by the short way
                        runner({key: value.clone() for key, value in good.items()})
                    bad = eval(text)
                    if bad is None:
                        continue
                    for _ in range(2):
                        try:
                            outputs = runner({**good, place: bad})
                        except BatchError as error:
                            if right is not None and inputs is Two:
                                tell(how, name, place, "refused", error)
                            if repr(place) not in str(error):
                                tell(how, name, place, "does not name the slot", error)
                        except Exception as error:
                            tell(how, name, place, "raw", type(error).__name__, error)
                        else:
                            wanted = {**{key: value.tolist() for key, value in good.items()}, place: right}
                            if right is None:
                                tell(how, name, place, "taken", outputs)
                            elif outputs.tolist() != [100 * a + b for a, b in zip(wanted["lead"], wanted["other"])]:
                                tell(how, name, place, "wrong", outputs)
                    if runner(good).tolist() != [501, 602]:
                        tell(how, name, place, "spoils the next step")
sys.exit(failed)
"""


@pytest.mark.slow
def test_no_tensor_ends_the_process() -> None:
    """Whatever torch calls a tensor is copied right or refused by its slot's name, before and after a step like it."""
    body = BODY % (KINDS, ["foreach", "in_graph", "eager", "no copy"])
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=False, timeout=600)  # noqa: S603 - ours
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
