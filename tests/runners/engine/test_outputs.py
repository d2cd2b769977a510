"""Outputs: live rows in whatever structure the step returned, and refused in debug mode once overwritten."""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch.utils import _pytree as pytree

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied, output
from slotgraph.backends.cpu import HostBackend
from slotgraph.dataflow.errors import CaptureError, StaleOutputError
from tests.runners.models import (
    PlainInputs,
    assert_right,
    batch_for,
    decoder,
    expected,
    plain_runner,
    plain_step,
    random_batch,
)


class TokenInputs(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-5)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-9)


class Pair(NamedTuple):
    token: torch.Tensor
    request: torch.Tensor | None


def runner_of(step: Callable[[TokenInputs], Any], backend: Any, width: int = 1, **more: Any) -> Any:
    """A captured runner for 4 and 8 requests."""
    return decoder(TokenInputs, step, buckets=[4, 8], backend=backend, width=width, **more)


@attrs.define
class Parcel:
    token: torch.Tensor


@dataclasses.dataclass(frozen=True)
class DataParcel:
    token: torch.Tensor


STRUCTURES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], type]] = {
    "tensor": (lambda one, _: one, torch.Tensor),
    "list": (lambda one, two: [two, one, two], list),
    "namedtuple": (lambda one, _: Pair(one, None), Pair),
    "own kind": (lambda one, _: OrderedDict(logits=one), OrderedDict),
    "attrs": (lambda one, _: Parcel(one), object),
    "dataclass": (lambda one, _: DataParcel(one), object),
    "with values": (lambda one, two: {"name": "x", "count": 3, "none": None, "rows": (one, {"two": two})}, dict),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_each_tensor_has_its_live_rows(cpu: str, kind: str) -> None:
    """Each tensor comes with its live rows, on every path; a caller's change of the structure is gone at the next."""
    make, wanted = STRUCTURES[kind]
    runner = runner_of(lambda view: make(view.ids * 2, view.lens[:, None] + 1), cpu)
    for requests in (3, 3, 8, 20, 0, 3):
        batch = batch_for(TokenInputs, {BATCH: requests, TOKENS: requests}, requests)
        outputs: Any = runner(batch)
        assert issubclass(type(outputs), wanted)
        right: Any = make(batch["ids"] * 2, batch["lens"][:, None] + 1)
        if kind in ("attrs", "dataclass"):
            outputs, right = [outputs.token], [right.token]
        for got, answer in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(right), strict=True):
            assert torch.equal(got, answer) if isinstance(answer, torch.Tensor) else got == answer
        if isinstance(outputs, list):
            outputs.pop()
        elif isinstance(outputs, dict):
            outputs.clear()


def test_whole_outputs_have_padded_rows(cpu: str) -> None:
    """With None, outputs come whole: padded rows, shapes that follow no axis, and numbers without a dim."""
    runner = runner_of(lambda view: (view.ids * 2, view.lens.sum(), view.ids[:2]), cpu, output_rows=None)
    batch = batch_for(TokenInputs, {BATCH: 3, TOKENS: 3}, 3)
    rows, total, two = runner(batch)
    assert rows.tolist() == [*(batch["ids"] * 2).tolist(), -10]
    assert int(total) == int(batch["lens"].sum()) - 9
    assert torch.equal(two, batch["ids"][:2])


def test_a_caller_may_change_the_shape_of_an_output(cpu: str) -> None:
    """Each replay gives its own numbers; a tensor that a caller reshapes has its own shape again at the next one."""
    runner = runner_of(lambda view: view.ids * 2, cpu)
    for number in range(12):  # outputs are kept from the third on, where a graph leaves the same ones
        batch = batch_for(TokenInputs, {BATCH: 3, TOKENS: 3}, number)
        outputs = runner(batch)
        assert torch.equal(outputs, batch["ids"] * 2)
        if number > 5:
            outputs.unsqueeze_(0)


def test_rows_of_outputs_follow_their_axis(cpu: str) -> None:
    """With several tokens a request, rows follow TOKENS or BATCH as it was said; what has others is refused."""
    for axis, name in ((TOKENS, "ids"), (BATCH, "lens")):
        runner = runner_of(lambda view, name=name: getattr(view, name) * 2, cpu, 3, output_rows=axis)  # type: ignore[misc]
        for requests in (3, 8, 2, 9):
            batch = batch_for(TokenInputs, {BATCH: requests, TOKENS: requests * 3}, requests)
            assert torch.equal(runner(batch), batch[name] * 2)
    wrong: list[tuple[Callable[[Any], Any], str]] = [
        (lambda view: view.lens, r"shape \[8\], expected 24 rows.*pass output_rows="),
        (lambda view: view.ids.sum(), r"shape \[\], expected 24 rows"),
        (lambda view: (view.ids, view.ids[:-1]), r"shape \[23\], expected 24 rows"),
        (lambda view: {"a": view.ids[None]}, r"shape \[1, 24\], expected 24 rows"),
        (lambda view: SimpleNamespace(token=view.ids), "returned SimpleNamespace, of which rows cannot be cut"),
    ]
    for step, said in wrong:
        with pytest.raises(CaptureError, match=f"bucket .*8.*: .*{said}"):
            runner_of(step, cpu, 3)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda out: out,
    "slice": lambda out: out[1:],
    "detached": lambda out: out.detach(),
    "of a view": lambda out: out[1:].T[0],
    "split": lambda out: torch.chunk(out, 2)[1],
    "iterated": lambda out: next(iter(out)),
    "to the same": lambda out: out.to(torch.float32),
    "as strided": lambda out: out.as_strided((2,), (1,)),
}
READS: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda out: out + 1,
    "function": torch.relu,
    "in a list": lambda out: torch.cat([out.reshape(-1), out.reshape(-1)]),
    "as a keyword": lambda out: torch.add(input=torch.zeros(()), other=out),
    "to a list": lambda out: out.tolist(),
    "to numpy": lambda out: out.numpy(),
    "assigned": lambda out: torch.zeros(out.shape).__setitem__(..., out),
    "written": lambda out: out.zero_(),
}


@pytest.fixture(scope="module")
def debugged(cpu: str) -> DecodeRunner[PlainInputs]:
    """A captured runner in debug mode."""
    return plain_runner(cpu, debug=True)


class OutputInputs(PlainInputs):
    result: torch.Tensor = output(TOKENS, 4, dtype=torch.float32)


def test_an_eager_step_makes_the_graphs_output_stale(cpu: str) -> None:
    """An eager step that writes the output slot of the graph before makes that graph's output stale."""
    runner = decoder(
        OutputInputs, lambda view: view.result.copy_(plain_step(view)), backend=cpu, debug=True, max_waste=0.5
    )
    batch, small = random_batch(4, seed=27), random_batch(1, seed=28)
    out = runner(batch)
    assert_right(runner(small), small)
    with suppress(StaleOutputError):
        assert_right(out.clone(), batch)


def test_a_stale_output_and_its_views_are_refused(debugged: DecodeRunner[PlainInputs]) -> None:
    """An output, or any view of it, is good until the next replay; whatever reads it then is refused."""
    for view in VIEWS.values():
        batch = random_batch(4, seed=1)
        out = view(debugged(batch))
        torch.testing.assert_close(out.clone(), view(expected(batch)).clone())
        debugged(random_batch(3, seed=2))
        with pytest.raises(StaleOutputError, match=r"of generation \d+ and overwritten since .* or keep a clone"):
            out.sum()
    for name, read in READS.items():
        out = debugged(random_batch(4, seed=3))
        if name != "written":
            read(out)
        debugged(random_batch(4, seed=4))
        with pytest.raises(StaleOutputError):
            read(out)


def test_returned_inputs_are_stale_after_a_fill(cpu: str, debugged: DecodeRunner[PlainInputs]) -> None:
    """Inputs that a step returns are stale after a fill; other runners make nothing stale; copies live on."""
    batch, mine = random_batch(4, seed=17), torch.zeros(4, 4)
    for same in (mine.copy_(debugged(batch)), mine.add_(debugged(batch)), torch.add(mine, debugged(batch), out=mine)):
        assert same is mine
    kept, out = copy.deepcopy(debugged(batch)), debugged(batch)
    plain_runner(cpu, debug=True)(random_batch(4, seed=14))
    debugged(random_batch(30, seed=11))  # eagerly, which overwrites no graph's outputs; nor does a refused batch
    with pytest.raises(ValueError, match="'places'"):
        debugged({**random_batch(4, seed=12), "places": [1.0, 2.0, 3.0, 4.0]})
    assert_right(out.clone(), batch)
    debugged(random_batch(4, seed=18))
    assert_right(kept, batch)
    torch.testing.assert_close(mine, 3 * expected(batch))
    runner = decoder(PlainInputs, lambda view: {"a": (plain_step(view), view.ids)}, backend=cpu, debug=True)
    made, ids = runner(random_batch(3, seed=25))["a"]
    runner.fill(random_batch(3, seed=26))
    with pytest.raises(StaleOutputError):
        ids.sum()
    runner(random_batch(3, seed=6))
    with pytest.raises(StaleOutputError, match=r"of generation 1 and overwritten since \(the runner is at 2\)"):
        made.sum()
    assert type(plain_runner(cpu)(batch)) is torch.Tensor  # which costs nothing to read


@pytest.mark.parametrize("shared", [True, False])
def test_a_replay_in_the_same_pool_makes_outputs_stale(
    cpu: str, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    """A replay of one runner makes another's output stale where their graphs share memory, and only there."""
    pool = torch.nn.Module()  # something that can be referred to
    monkeypatch.setattr(HostBackend, "pool", lambda _: pool if shared else torch.nn.Module())
    first, second = (runner_of(lambda view: view.ids * 3, cpu, debug=True) for _ in range(2))
    batch = batch_for(TokenInputs, {BATCH: 2, TOKENS: 2}, 1)
    made = first(batch)
    assert torch.equal(made.clone(), batch["ids"] * 3)
    second(batch)
    with pytest.raises(StaleOutputError, match="overwritten since") if shared else nullcontext():
        made.tolist()
