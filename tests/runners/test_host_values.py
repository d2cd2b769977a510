"""Host data that says less or more than a tensor: masks, which are refused, and empty lists, which are no rows."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, EagerRunner, InputBuffers, Inputs, computed, copied
from slotgraph.errors import BatchError, ComputeError
from tests.runners.models import ready

HIDDEN = Axis("HIDDEN", fixed=True)


class Values(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    floats: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.int64, pad=0)
    towers: torch.Tensor = copied(2, BATCH, HIDDEN, dtype=torch.float32, pad=0)
    hosted: torch.Tensor = copied(BATCH, 3, dtype=torch.int32, pad=0, placement="host")


def step(view: Values) -> torch.Tensor:
    """A number of each slot, one a request."""
    return view.ids + view.floats + view.pairs.sum(1) + view.towers.sum((0, 2)) + view.hosted.sum(1)


def batch_of(rows: int) -> dict[str, Any]:
    """Random arrays."""
    draw = np.random.default_rng(rows)
    return {
        "ids": draw.integers(1, 99, rows),
        "floats": draw.random(rows, np.float32),
        "pairs": draw.integers(1, 99, (rows, 2)),
        "towers": draw.random((2, rows, 5), np.float32),
        "hosted": draw.integers(1, 99, (rows, 3), np.int32),
    }


SIZES = {HIDDEN: 5}


def graphs(lowering: str) -> Any:
    """A captured runner."""
    made = DecodeRunner(Values, step, buckets=[4], sizes=SIZES, backend="cpu-capture", lowering=lowering)
    return ready(made)


LOWERINGS = ("in_graph", "fused", "direct", "foreach", "slot_by_slot")
MAKERS: dict[str, Callable[[], Any]] = {
    **{lowering: functools.partial(graphs, lowering) for lowering in LOWERINGS},
    "eager": lambda: EagerRunner(Values, step, sizes=SIZES, backend="cpu"),
    "no_copy": lambda: EagerRunner(Values, step, sizes=SIZES, backend="cpu", no_copy=True),
}


def masked(array: Any, places: Any) -> Any:
    """The array with a mask over some places."""
    mask = np.zeros(array.shape, bool)
    mask[places] = True
    return np.ma.masked_array(array, mask=mask)


@pytest.mark.parametrize("maker", MAKERS)
def test_masked_arrays_are_refused(maker: str) -> None:
    """No fill takes an array with a mask, nor lists of some, be a place masked or not; the next one is right."""
    runner, batch = MAKERS[maker](), batch_of(3)
    due = runner(batch).clone()
    for name, array in batch.items():
        wrong = [masked(array, 1), masked(array, ()), [*masked(array, 1)], (*masked(array, -1),)]
        for value in wrong:
            is_list_of_numbers = isinstance(value, list | tuple) and array.ndim == 1
            for call in (runner, runner.fill):
                if is_list_of_numbers and not any(one is np.ma.masked for one in value):
                    continue
                with pytest.raises(BatchError, match=f"slot '{name}'.* a masked array, whose mask would be lost"):
                    call({**batch, name: value})
        assert torch.equal(runner({**batch, name: wrong[0].data}), due)


@pytest.mark.filterwarnings("error")
def test_masked_results_are_refused() -> None:
    """A function on the host may not return one either."""

    class Made(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        mask: torch.Tensor = computed(
            lambda step: masked(np.arange(step.padded(BATCH)), 0), shape=BATCH, dtype=torch.int64
        )

    with pytest.raises(ComputeError, match=r"(?s)slot 'mask'.* a masked array"):
        EagerRunner(Made, lambda view: view.mask, backend="cpu")({"ids": [1, 2]})


@pytest.mark.parametrize("maker", MAKERS)
def test_empty_lists_stand_for_no_rows(maker: str) -> None:
    """An empty list stands for no rows, whatever the dims inside of them; one of rows too many or few does not."""
    runner = MAKERS[maker]()
    usual = batch_of(2)
    for _ in range(2):
        due = runner(usual).clone()
        nothings: tuple[Any, ...] = [], ()
        for none in nothings:
            batch = {"ids": none, "floats": none, "pairs": none, "towers": [none, none], "hosted": none}
            assert runner(batch).shape == (0,)
            assert runner({**batch, "towers": torch.empty(2, 0, 5)}).shape == (0,)
        assert torch.equal(runner(usual), due)
    cases: dict[str, list[Any]] = {"towers": [[], [[]], [[], [], []]], "pairs": [[[]]], "hosted": [[[], []]]}
    for name, wrong in [(name, value) for name, values in cases.items() for value in values]:
        with pytest.raises(BatchError, match=f"slot '{name}': expected"):
            runner({"ids": [], "floats": [], "pairs": [], "towers": [[], []], "hosted": [], name: wrong})
    for name in ("pairs", "hosted"):
        with pytest.raises(BatchError, match=f"slot '{name}': expected"):
            runner({**usual, name: []})


def test_a_function_may_return_an_empty_list() -> None:
    """A function on the host may return an empty list for no rows, too; buffers of one's own take them."""

    class Made(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        pairs: torch.Tensor = computed(lambda step: [[7, 8]] * step.padded(BATCH), shape=(BATCH, 2), dtype=torch.int64)

    runner = EagerRunner(Made, lambda view: view.pairs, backend="cpu")
    assert runner({"ids": []}).shape == (0, 2)
    assert runner({"ids": [1]}).tolist() == [[7, 8]]
    buffers = InputBuffers(Values, {TOKENS: 4, BATCH: 4, HIDDEN: 5}, backend="cpu")
    view = buffers.fill({"ids": [], "floats": [], "pairs": [], "towers": [[], []], "hosted": []})
    assert view.pairs.tolist() == [[0, 0]] * 4


class Scaled(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    scale: torch.Tensor = copied(dtype=torch.float32)


def test_a_slot_without_dims_takes_what_its_error_says() -> None:
    """A Python number has no dtype and is refused; a tensor or a NumPy number is taken."""
    runner: Any = EagerRunner(Scaled, lambda view: view.ids * view.scale, backend="cpu")
    with pytest.raises(BatchError, match=r"'scale': .* got float; give a tensor or a NumPy number"):
        runner({"ids": [3], "scale": 0.5})
    for scale in (torch.tensor(0.5), np.float32(0.5)):
        assert runner({"ids": [3], "scale": scale}).tolist() == [1.5]
