"""Tensors that a runner hands out, and that somebody changes in place: no later step is harmed."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, EagerRunner, Inputs, computed, copied, graph_break, output
from slotgraph.backends import choose
from slotgraph.errors import ComputeError
from tests.runners.models import decoder
from tests.runners.prefilled import Prefill, around, assert_equal
from tests.strategies import declaration_of


class Wide(Inputs):
    """Slots of one and two dims, copied, computed on either side, and written by the step."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-1)
    pairs: torch.Tensor = copied(BATCH, 3, dtype=torch.int64, pad=0)
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=2, placement="host")
    count: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int64)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64)
    written: torch.Tensor = output(BATCH, dtype=torch.int64)


def answer(view: Wide) -> torch.Tensor:
    """A number of every slot, which it also leaves in the output slot."""
    rows = view.ids * 1000 + view.pairs.sum(1) + view.twice + view.count
    view.written.copy_(rows)
    return rows * 1


def expected(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same in plain code."""
    return batch["ids"] * 1002 + batch["pairs"].sum(1) + len(batch["ids"])


def drawn(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of so many rows."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"ids": (rows,), "pairs": (rows, 3), "here": (rows,)}
    return {name: torch.randint(1, 90, shape, generator=draw) for name, shape in shapes.items()}


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "unsqueeze_": lambda one: one.unsqueeze_(0),
    "squeeze_": lambda one: one.squeeze_(),
    "t_": lambda one: one.t_(),
    "transpose_": lambda one: one.transpose_(0, -1),
    "swapaxes_": lambda one: one.swapaxes_(0, -1),
    "as_strided_": lambda one: one.as_strided_((1,), (1,)),
    "resize_": lambda one: one.resize_(1),
    "resize_as_": lambda one: one.resize_as_(torch.ones(1, 1, dtype=one.dtype)),
    "set_": lambda one: one.set_(torch.full_like(one, 55).untyped_storage(), 0, one.shape, one.stride()),
    "set_ whole": lambda one: one.set_(one.untyped_storage()),
    "data of another": lambda one: setattr(one, "data", torch.full_like(one, 66)),
    "data of its own": lambda one: setattr(one, "data", one.data[:1]),
    "resize_ beyond": lambda one: one.resize_(1 << 20),
    "free": lambda one: one.untyped_storage().resize_(0),
}
"""What can be done to a tensor beside writing its elements. Torch may refuse some of it."""


def spoil(tensor: torch.Tensor, how: str) -> None:
    """Do it, unless torch itself refuses."""
    with suppress(RuntimeError):
        CHANGES[how](tensor)


WAYS = [*(f"{backend} {one}" for backend in ("cpu", "cpu-capture") for one in choose("cpu").capabilities.lowerings)]


def runner_of(way: str, inputs: Any, step: Callable[[Any], Any]) -> Any:
    """A captured runner, or an eager one."""
    if way in ("eager", "no copy"):
        return EagerRunner(inputs, step, backend="cpu", no_copy=way == "no copy")
    backend, lowering = way.split()
    rows = BATCH if inputs is Wide else None
    return decoder(inputs, step, buckets=[2, 6], backend=backend, lowering=lowering, output_rows=rows)


steps = st.lists(
    st.tuples(
        st.integers(1, 8),
        st.sampled_from(["run", "fill", "inputs"]),
        st.sampled_from([*CHANGES]),
        st.sampled_from(["ids", "pairs", "here", "count", "twice", "written", "outputs"]),
    ),
    min_size=3,
    max_size=8,
)


@pytest.mark.parametrize("way", [*WAYS, "eager"])
@settings(max_examples=10)
@given(turns=steps, inside=st.sampled_from(["unsqueeze_", "transpose_"]) | st.none())
def test_views_and_outputs(way: str, turns: list[tuple[int, str, str, str]], inside: str | None) -> None:
    """Whatever is done to the shape or the memory of a tensor that was handed out, later steps are right.

    So they are where the step's own code does it: each run sees its view unchanged.
    """
    seen: list[Any] = []

    def step(view: Wide) -> torch.Tensor:
        outputs = answer(view)
        seen.append((tuple(view.pairs.shape), tuple(view.ids.shape)))
        if inside:
            spoil(view.pairs, inside)
            spoil(view.ids, inside)
        return outputs

    runner = runner_of(way, Wide, step)
    for seed, (rows, what, how, name) in enumerate(turns):
        batch = drawn(rows, seed)
        if what == "inputs" and way != "eager":
            spoil(getattr(runner.inputs(6), "ids" if name == "outputs" else name), how)
        elif what == "fill":
            view = runner.fill(batch)
            assert torch.equal(view.ids[:rows], batch["ids"])
            assert torch.equal(view.pairs[:rows], batch["pairs"])
            if name != "outputs":
                spoil(getattr(view, name), how)
        outputs = runner(batch)
        assert torch.equal(outputs, expected(batch))
        if name == "outputs" and how not in ("free", "resize_ beyond"):  # which torch would free under the graph
            spoil(outputs, how)
    assert all(pairs == (*ids, 3) for pairs, ids in seen)


def test_breaks_that_change_their_view(cpu: str) -> None:
    """Code that runs between graphs, in each step, sees its view unchanged each time."""
    shapes = []

    @graph_break
    def between(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
        shapes.append((view.extend_seq_lens.dim(), view.positions.dim()))
        out = torch.add(hidden * view.extend_seq_lens.shape[0], view.positions.sum())
        spoil(view.extend_seq_lens, "unsqueeze_")
        spoil(view.positions, "transpose_")
        spoil(view.out_cache_loc, "data of its own")
        return out

    runner, eager = around(lambda hidden, view: between(hidden * 2, view) + 1, cpu)
    shapes.clear()  # of captures, which run it several times on one view
    assert_equal(runner, eager, torch.device("cpu"), 1, 2)
    assert set(shapes) == {(1, 1)}


@pytest.mark.parametrize("way", [*WAYS, "eager", "no copy"])
def test_functions_that_change_what_they_are_given(way: str) -> None:
    """A function that writes a slot which it is given to read is refused with both names, in each step alike."""
    functions: list[Callable[[Any], Any]] = [
        lambda here: here.add_(100).sum(),
        lambda here: here.unsqueeze_(0).sum(),
        lambda here: here.resize_(1).sum(),
    ]
    placements: tuple[Any, ...] = ("host", "device")
    for function, placement in itertools.product(functions, placements):
        total = computed(lambda here, of=function: int(of(here)), shape=1, dtype=torch.int64, placement=placement)
        here = copied(BATCH, dtype=torch.int64, pad=2, placement="host")
        inputs = declaration_of({"ids": copied(BATCH, dtype=torch.int64, pad=-1), "here": here, "total": total})
        runner = runner_of(way, inputs, lambda view: view.total * 1)
        for _ in range(3):
            with pytest.raises(ComputeError, match="slot 'total': its function changes 'here'"):
                runner({"ids": torch.tensor([1, 2]), "here": torch.tensor([5, 7])})
