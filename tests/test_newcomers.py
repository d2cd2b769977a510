"""Mistakes of the first day: each message names the slot or argument, says what happened, and what to do.

More of them have tests of their own: `test_messages.py`, `runners/engine/test_arguments.py`, `runners/test_batches.py`.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slotgraph
from slotgraph import BATCH, TOKENS, Axis, InputBuffers, Inputs, computed, copied
from slotgraph.config import RunnerConfig
from slotgraph.dataflow.errors import SlotGraphError

HIDDEN, PAGES = Axis("HIDDEN", fixed=True), Axis("PAGES")
TOOLS: Any = slotgraph
"""The library without types, which would refuse most of these mistakes before they run."""
IDS, LENS = copied(TOKENS, dtype=torch.int64, pad=0), copied(BATCH, dtype=torch.int32, pad=1)


def declared(**slots: Any) -> Any:
    """A declaration of ids, lens, and these slots."""
    body = {"ids": IDS, "lens": LENS, **slots}
    return type("Mine", (Inputs,), {**body, "__annotations__": dict.fromkeys(body, torch.Tensor)})


MINE = declared()
WIDE = declared(rows=copied(TOKENS, 2, dtype=torch.float32, pad=0))


def divide(view: Any) -> torch.Tensor:
    """The step of the README."""
    quotient: torch.Tensor = view.ids / view.lens
    return quotient


def made(step: Any = divide, inputs: Any = MINE, **options: Any) -> Any:
    """A runner of a step, not captured."""
    return TOOLS.DecodeRunner(inputs, step, **{"buckets": [1, 2, 4], "backend": "cpu-capture", **options})


def captured(step: Any = divide, inputs: Any = MINE, **options: Any) -> Any:
    """A captured runner."""
    runner = made(step, inputs, **options)
    runner.capture()
    return runner


def batch(**changed: Any) -> dict[str, Any]:
    """Three requests, with some values changed."""
    return {"ids": [1, 2, 3], "lens": torch.tensor([1, 2, 3], dtype=torch.int32), **changed}


def fed(**changed: Any) -> Callable[[], Any]:
    """A call with some values changed."""
    return lambda: captured()(batch(**changed))


def stepped(step: Any, inputs: Any = MINE, **options: Any) -> Callable[[], Any]:
    """A capture of a step."""
    return lambda: captured(step, inputs, **options)


def told(function: Any, **options: Any) -> Callable[[], Any]:
    """A call with a slot `count` that a function computes, one for each token."""
    slot = computed(function, **{"shape": TOKENS, "dtype": torch.int64, **options})
    return lambda: captured(lambda view: view.ids * view.count, declared(count=slot))(batch())


def configured(text: str, name: str = "runner.toml") -> Callable[[], Any]:
    """A configuration of this text."""

    def load() -> RunnerConfig:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, name)
            file.write_text(text, encoding="utf-8")
            return RunnerConfig.load(file)

    return load


async def coroutine(view: Any) -> Any:
    """No step can wait."""
    return view.ids


def generator(view: Any) -> Iterator[Any]:
    """Nor can it yield."""
    yield view.ids


def printing(view: Any) -> Any:
    """Print what a replay would not."""
    repr(view.ids)
    return view.ids


def branching(view: Any) -> Any:
    """Decide once what each batch should decide."""
    return view.ids if view.lens.max() > 2 else -view.ids


def late() -> Any:
    """Read an output after the next step."""
    runner = captured(debug=True)
    first = runner(batch())
    runner(batch(ids=[7, 8, 9]))
    return first + 1


EXPECTED = "slot 'lens': expected int32 of shape [3] on cpu"
ONE_SIZE = "expected a list or tuple of at least one int between 1 and 16777216, each once, got "
NO_TENSOR = "give a tensor, an array or a list"
NOT_HOST = "it copies to the host and waits: read the graph's outputs after the replay"
ON_DEVICE = "keep the value on the device (torch.where, index_select), or hand it to the step from outside"
A_SIZE = "a size is an axis, an expression over axes or a whole number, got "
A_VALUE = "a value is a number, a fill role, a fixed axis, or an expression over fixed axes"
A_DTYPE = "expected a torch dtype, such as torch.int64, or a role, got "

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # batches
    "a key is missing": (
        lambda: captured()({"ids": [1, 2, 3]}),
        "slot 'lens': batch.lens is missing; give it, or declare the slot with default=None",
    ),
    "a value is None": (fed(lens=None), "slot 'lens': batch.lens is missing; give it, or declare"),
    "a batch is empty": (lambda: captured()({}), "slot 'ids': batch.ids is missing; it determines how many rows"),
    "a list of texts": (fed(lens=["1", "2", "3"]), f"{EXPECTED}, got list: it holds str; give numbers of at most 64"),
    "None in a list": (fed(lens=[1, None, 3]), f"{EXPECTED}, got list: it holds NoneType and int; give numbers"),
    "None in an array": (
        fed(lens=np.array([1, None, 3])),
        f"{EXPECTED}, got ndarray: an array of objects, as NumPy makes of None or ragged rows: give numbers; pad",
    ),
    "an int of 71 bits": (fed(lens=[1, 2**70, 3]), f"{EXPECTED}, got list: it holds int; give numbers of at most 64"),
    "a number for all rows": (fed(lens=3), f"{EXPECTED}, got int; {NO_TENSOR}"),
    "a tensor without dims": (
        fed(lens=torch.tensor(3, dtype=torch.int32)),
        "slot 'lens': expected 1 dimension, got 0: shape [] for [BATCH]; reshape it",
    ),
    "NumPy's number": (fed(lens=np.int32(3)), "expected 1 dimension, got 0: shape [] for [BATCH]; reshape it"),
    "a set": (fed(lens={1, 2, 3}), f"{EXPECTED}, got set; {NO_TENSOR}"),
    "a dict": (fed(lens={0: 1}), f"{EXPECTED}, got dict; {NO_TENSOR}"),
    "a range": (fed(lens=range(3)), f"{EXPECTED}, got range; {NO_TENSOR}"),
    "a text": (fed(lens="123"), f"{EXPECTED}, got str; {NO_TENSOR}"),
    "a generator": (fed(lens=iter([1, 2, 3])), f"{EXPECTED}, got list_iterator; {NO_TENSOR}"),
    "bools for numbers": (fed(lens=[True, False, True]), f"{EXPECTED}, got bool; convert it, or declare converts"),
    "a sparse tensor": (
        lambda: captured(divide, WIDE)(batch(rows=torch.ones(3, 2).to_sparse())),
        "slot 'rows': expected float32 of shape [3, 2] on cpu, got a torch.sparse_coo tensor; pass a dense one",
    ),
    "axes in another order": (
        lambda: captured(divide, WIDE)(batch(rows=torch.ones(2, 3))),
        "slot 'rows': expected float32 of shape [3, 2] on cpu (TOKENS, 2), got shape [2, 3]",
    ),
    # steps
    "a class for its object": (
        lambda: made(torch.nn.Linear),
        "step: expected a function of the view, got the class L",
    ),
    "the result of the step": (lambda: made(torch.ones(1)), "step: expected a function of the view, got tensor([1.])"),
    "a coroutine": (lambda: made(coroutine), "step: expected a function that returns its value, not a coroutine or"),
    "a generator as step": (lambda: made(generator), "step: expected a function that returns its value, not a"),
    "a view as a mapping": (
        stepped(lambda view: view["ids"] * 2),
        "'Mine' has attributes, not items: read view.ids, got ['ids']",
    ),
    "a view in a loop": (
        stepped(lambda view: [*view]),
        "'Mine' has attributes, not items: read view.ids, got [0]",
    ),
    "a misspelt slot": (stepped(lambda view: view.idz), "'Mine' has no slot or field 'idz'; did you mean 'ids'?"),
    "item()": (stepped(lambda view: view.ids.sum().item()), f"a captured step cannot use Tensor.item: {ON_DEVICE}"),
    "tolist()": (stepped(lambda view: view.ids.tolist()), f"a captured step cannot use Tensor.tolist: {ON_DEVICE}"),
    "numpy()": (stepped(lambda view: view.ids.numpy()), f"a captured step cannot use Tensor.numpy: {NOT_HOST}"),
    "cpu()": (stepped(lambda view: view.ids.cpu()), f"a captured step cannot use Tensor.cpu: {NOT_HOST}"),
    "print": (stepped(printing), "Tensor.__repr__: printing reads the values: print after the replay"),
    "an if on a tensor": (
        stepped(branching),
        f"Tensor.__bool__: python control flow on a tensor is decided once, at capture: {ON_DEVICE}",
    ),
    "a mask as index": (
        stepped(lambda view: view.ids[view.ids > 1]),
        "aten.index.Tensor: its shape depends on values: use torch.where, or masked_fill_ with a number",
    ),
    "a sum over the bucket": (
        stepped(lambda view: view.ids.sum()),
        "the step returned a tensor of shape [], expected 4 rows, one for each padded row of bucket 4: pass output",
    ),
    # runners
    "one bucket": (lambda: made(buckets=8), f"option 'buckets': {ONE_SIZE}8 of type int"),
    "buckets of texts": (lambda: made(buckets=["8"]), f"option 'buckets': {ONE_SIZE}['8'] of type list"),
    "arguments exchanged": (
        lambda: TOOLS.DecodeRunner(divide, MINE),
        "inputs: expected a declaration, a subclass of Inputs",
    ),
    "an object for its class": (
        lambda: made(inputs=MINE(ids=torch.ones(1), lens=torch.ones(1))),
        "inputs: expected a declaration, a subclass of Inputs, got Mine(ids=float32[1], lens=float32[1]) of type Mine",
    ),
    "no slot over requests": (
        lambda: made(inputs=type("Fixed", (Inputs,), {"__annotations__": {}})),
        "Fixed: no copied slot determines the size of BATCH: declare one with a dim of BATCH",
    ),
    "outputs by another word": (
        lambda: made(outputs="clone"),
        "option 'outputs': expected 'view' or 'copy', got 'clone'",
    ),
    "a fixed axis without a size": (
        lambda: made(inputs=declared(rows=copied(TOKENS, HIDDEN, dtype=torch.float32, pad=0))),
        "Mine needs sizes= for its fixed axes HIDDEN",
    ),
    "an own axis without a size": (
        lambda: made(inputs=declared(pages=copied(BATCH, PAGES, dtype=torch.int32, pad=0))),
        "Mine needs sizes= for PAGES: the most rows that a batch has",
    ),
    "the batch as a size": (
        lambda: made(sizes={BATCH: 8}),
        "sizes of BATCH and TOKENS follow from buckets= and width=",
    ),
    "an output after the next call": (
        late,
        "overwritten since (the runner is at 2): use it before the next step, or keep",
    ),
    "an unknown bucket": (lambda: captured().plan(3), "there is no bucket 3: buckets are 1, 2, 4"),
    "the view of another runner": (
        lambda: captured().replay(captured().fill(batch())),
        "another runner filled it, of Mine; replay it there",
    ),
    "a check before the capture": (lambda: slotgraph.check(made()), "not captured: call capture() before check()"),
    "a check of a class": (lambda: slotgraph.check(MINE), "runner: expected a runner, got the class Mine"),
    "a record of no runner": (
        lambda: TOOLS.record(3, "x.safetensors"),
        "runner: expected a runner, or of a ModeRunner one of its modes, got 3",
    ),
    "an explanation of no runner": (lambda: TOOLS.explain(3), "runner: expected a runner, got 3 of type int"),
    "one number for values=": (
        lambda: TOOLS.check(captured(), values={"ids": 9}),
        "slot 'ids': values has 9 for it: give the lowest and the highest number, or a function of shape",
    ),
    # declarations
    "a dtype's name": (
        lambda: declared(count=TOOLS.copied(BATCH, dtype="int64", pad=0)),
        f"slot 'count': dtype='int64': {A_DTYPE}",
    ),
    "NumPy's dtype": (lambda: declared(count=TOOLS.copied(BATCH, dtype=np.int64, pad=0)), A_DTYPE),
    "Python's dtype": (lambda: declared(count=TOOLS.copied(BATCH, dtype=int, pad=0)), A_DTYPE),
    "an axis' name": (lambda: declared(count=TOOLS.copied("BATCH", dtype=torch.int64, pad=0)), f"{A_SIZE}'BATCH'"),
    "a shape in brackets": (
        lambda: declared(count=TOOLS.copied((BATCH, 3), dtype=torch.int64, pad=0)),
        f"{A_SIZE}(BATCH, 3)",
    ),
    "a text as pad": (
        lambda: declared(count=TOOLS.copied(BATCH, dtype=torch.int64, pad="0")),
        f"slot 'count': pad='0': {A_VALUE}",
    ),
    "a tensor as pad": (lambda: declared(count=TOOLS.copied(BATCH, dtype=torch.int64, pad=torch.tensor(0))), A_VALUE),
    "a tensor as default": (
        lambda: declared(weight=torch.zeros(3)),
        "its default, of type Tensor, can be changed in place, which graphs would not see: make a tensor a slot, with",
    ),
    "a value for a function": (
        lambda: declared(count=TOOLS.computed(torch.ones(1), dtype=torch.int64)),
        "slot 'count': function=float32[1]: a computed slot needs a function, got tensor([1.])",
    ),
    "a comma behind a slot": (
        lambda: declared(count=(IDS,)),
        "a tuple of slots (is there a comma behind it?) declares none",
    ),
    "a name with an underscore": (lambda: declared(_count=IDS), "slot '_count': the name begins with an underscore"),
    "a number as default": (
        lambda: declared(count=copied(BATCH, dtype=torch.int64, pad=0, default=0)),
        "slot 'count': default=0: say default=None, which makes the slot optional, or leave it out",
    ),
    "a computed number for rows": (
        told(lambda ids: ids.sum()),
        "slot 'count': its function's result: expected int64 of shape [4]",
    ),
    "a computed dtype": (
        told(lambda ids: ids * 2, dtype=torch.int32),
        "expected int32 of shape [4], got int64 of shape [4]",
    ),
    "a function that returns nothing": (told(lambda ids: None), "expected int64 of shape [4], got NoneType"),
    "a function that fails": (
        told(lambda step: 1 // 0, shape=1),
        "slot 'count': its function <lambda> raised ZeroDivisionError",
    ),
    # files, and buffers
    "a file that is not there": (lambda: RunnerConfig.load("nowhere.toml"), "nowhere.toml: [Errno 2] No such file"),
    "YAML": (configured("buckets: [1]", "runner.yaml"), "runner.yaml: configuration is a .toml or .json file"),
    "a file cut off": (configured("buckets = [1"), "runner.toml: Unclosed array"),
    "a text in a file": (configured(json.dumps({"buckets": "8"}), "runner.json"), f"option 'buckets': {ONE_SIZE}'8'"),
    "a number for sizes": (
        lambda: TOOLS.InputBuffers(MINE, 8),
        "sizes: expected a mapping of axes to their sizes, such as {HIDDEN: 64}, got 8 of type int",
    ),
    "a batch over the buffers": (
        lambda: InputBuffers(MINE, {BATCH: 2, TOKENS: 2}, backend="cpu-capture").fill(batch()),
        "the batch has 3 rows on BATCH, more than the 2 of this bucket",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_the_way_out(mistake: str) -> None:
    """The error is the library's own, and says in its own words what to do."""
    do, words = MISTAKES[mistake]
    with pytest.raises(SlotGraphError) as caught:
        do()
    assert words in str(caught.value)


def test_a_batch_without_a_graph_says_how_it_gets_one() -> None:
    """It is not refused: `decide` and one warning say why it runs eagerly, and what to pass."""
    optional = declared(mask=copied(TOKENS, dtype=torch.int64, pad=0, default=None))
    runner = captured(lambda view: view.ids if view.mask is None else view.ids * view.mask, optional)
    assert (
        runner.decide(batch()).reason == "no graph was captured without 'mask'; pass absent=[{'mask'}] to capture one"
    )
