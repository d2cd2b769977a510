"""What a stack is called with: moved to where graphs read it, handed on to breaks, or refused."""

import enum
from typing import Any

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, errors, graph_break
from slotgraph.backends import Backend
from tests.runners.prefilled import Prefill, around, assert_equal, batch_of, poison


class Mode(enum.Enum):
    """A value that a graph takes in."""

    ONE = 1
    TWO = 2


@attrs.define
class Pool:
    """An object that lives as long as the model, and one that each step makes anew."""

    rows: torch.Tensor


class Slotted:
    """The same without a dict."""

    __slots__ = ("parts",)

    def __init__(self, rows: torch.Tensor) -> None:
        self.parts = {"rows": [rows]}


@graph_break
def scaled(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
    """One break, with the number of requests and a field."""
    return torch.add(hidden * view.extend_seq_lens.shape[0], view.scale)


@graph_break
def plus_rows(hidden: torch.Tensor, pool: Any) -> torch.Tensor:
    """A break that reads a tensor within an object."""
    return torch.add(hidden, pool.rows)


def test_arguments_of_all_kinds(backend: Backend) -> None:
    """Tensors are moved, keywords and nested structures too, values are held to those of the capture."""

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        pair = {"a": hidden + 1, "b": (hidden[:, :1] * 2, None)}
        return inner(hidden, view, pair, factor=3, mode=Mode.TWO, dtype=torch.float64, positions=view.positions)

    def stack(hidden: torch.Tensor, view: Prefill, pair: Any, **more: Any) -> torch.Tensor:
        assert more["mode"] is Mode.TWO
        assert pair["b"][1] is None
        hidden = hidden * more["factor"] + pair["a"] * pair["b"][0] + more["positions"].to(more["dtype"])[:, None]
        return torch.sub(scaled(hidden, view), pair["a"])

    runner, eager = around(stack, backend, outer)
    assert_equal(runner, eager, backend.device, 1, 2)


@pytest.mark.parametrize(
    ("at_capture", "later", "said"),
    [
        (2, 3, "argument 2 of the stack is 3, and was 2 at capture: hand over what changes as a tensor"),
        (2, 2.0, r"is 2\.0, and was 2 at capture"),
        (None, "name", "is 'name', and was None"),
        (Mode.ONE, Mode.TWO, "is <Mode.TWO: 2>, and was <Mode.ONE: 1>"),
        ((1, 2), (1, 2, 3), "the stack was called with other arguments than at capture"),
        ({"a": 1}, {"b": 1}, "the stack was called with other arguments than at capture"),
        (None, torch.ones(3, 2), r"is float32 of shape \[3, 2\] on cpu, and was None"),
        (torch.ones(4, 2), None, r"is None, and was float32 of shape \[4, 2\]"),
        (torch.ones(4, 2), torch.ones(2, 2), r"is float32 of shape \[2, 2\] on cpu, and was float32 of shape \[4, 2\]"),
        (torch.ones(4, 2), torch.ones(4, 2).int(), r"is int32 of shape \[4, 2\]"),
    ],
)
def test_arguments_that_change(at_capture: Any, later: Any, said: str) -> None:
    """A value, a structure or a shape other than at capture is refused, and the next step is right."""
    given = [at_capture]

    def stack(hidden: torch.Tensor, view: Prefill, extra: Any) -> torch.Tensor:
        return scaled(hidden + extra if isinstance(extra, torch.Tensor) else hidden, view)

    outer = lambda view, hidden, inner: inner(hidden, view, given[0])  # noqa: E731
    runner, _ = around(stack, "cpu-capture", outer, buckets=[4])
    batch = batch_of([1, 2], 1)
    before = runner(batch).clone()
    given[0] = later
    with pytest.raises(errors.ReplayError, match=said):
        runner(batch)
    given[0] = at_capture
    poison(runner)
    assert torch.equal(runner(batch), before)


@pytest.mark.parametrize("kind", [Pool, Slotted])
def test_object_that_lives_on(backend: Backend, kind: Any) -> None:
    """Graphs may read and write a tensor of an object that is the same in each step: a cache."""
    pools = [kind(torch.zeros(8, 2, dtype=torch.float64, device=backend.device)) for _ in range(2)]
    chosen = [0]

    def rows_of(pool: Any) -> torch.Tensor:
        rows: torch.Tensor = pool.rows if isinstance(pool, Pool) else pool.parts["rows"][0]
        return rows

    def stack(hidden: torch.Tensor, view: Prefill, pool: Any) -> torch.Tensor:
        rows_of(pool)[: hidden.shape[0]] += hidden
        return scaled(rows_of(pool)[: hidden.shape[0]] * 2, view)

    outer = lambda view, hidden, inner: inner(hidden, view, pools[chosen[0]])  # noqa: E731
    runner, eager = around(stack, backend, outer, buckets=[8])
    rows_of(pools[0]).zero_()
    for seed in range(3):
        batch = batch_of([5, 3], seed, backend.device)
        chosen[0] = 0
        ours = runner(batch).clone()
        chosen[0] = 1
        assert torch.equal(ours, eager(batch))
    chosen[0] = 1
    assert torch.equal(rows_of(pools[0]), rows_of(pools[1]))
    with pytest.raises(
        errors.ReplayError, match=f"argument 2 of the stack, of type {kind.__name__}, is another one than"
    ):
        runner(batch_of([8], 1, backend.device))


def test_object_of_one_step(backend: Backend) -> None:
    """Breaks read what is live of an object that each step makes anew; graphs may not read tensors in it."""
    outer = lambda view, hidden, inner: inner(hidden, Pool(hidden * view.scale))  # noqa: E731
    runner, eager = around(lambda hidden, pool: plus_rows(hidden * 2, pool), backend, outer)
    assert_equal(runner, eager, backend.device, 1, 2)
    for stack in (lambda hidden, pool: hidden + pool.rows, lambda hidden, pool: plus_rows(hidden, pool) + pool.rows[0]):
        with pytest.raises(errors.CaptureError, match="argument 1 of the stack, of type Pool, is another one than"):
            around(stack, backend, outer)


def test_slots_within_an_object(backend: Backend) -> None:
    """Slots over tokens may come in an object of each step's: they are where they were."""
    outer = lambda view, hidden, inner: inner(hidden, Pool(view.positions))  # noqa: E731
    runner, eager = around(lambda hidden, pool: hidden + pool.rows[:, None], backend, outer)
    assert_equal(runner, eager, backend.device, 1, 2)


def test_narrowed_view(backend: Backend) -> None:
    """Another view than the step's own is an object of that step: breaks get it, graphs may not read it."""

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        tokens = int(view.extend_seq_lens[0])
        return inner(hidden, view.narrow(BATCH, 0, 1, tokens=(0, tokens)))

    @graph_break
    def first_request(hidden: torch.Tensor, part: Prefill) -> torch.Tensor:
        return torch.add(hidden * int(part.extend_seq_lens.sum()), part.input_ids.shape[0])

    runner, eager = around(lambda hidden, part: first_request(hidden, part) + 1, backend, outer)
    assert_equal(runner, eager, backend.device, 1, 2)
    with pytest.raises(errors.CaptureError, match="argument 1 of the stack, of type Prefill, is another one than"):
        around(lambda hidden, part: first_request(hidden, part) + part.positions.sum(), backend, outer)


def test_view_that_is_replaced_later(backend: Backend) -> None:
    """A step that hands its stack the view at capture, and another one later, is refused."""
    other: list[Any] = []
    outer = lambda view, hidden, inner: inner(hidden, other[0] if other else view)  # noqa: E731
    runner, eager = around(scaled, backend, outer)
    view = runner.fill(batch_of([2], 1, backend.device))
    other.append(view.narrow(TOKENS, 0, 2))
    with pytest.raises(
        errors.ReplayError, match="argument 1 of the stack, of type Prefill, is another one than at capture"
    ):
        runner.replay(view)
    other.clear()
    assert_equal(runner, eager, backend.device)


def test_stack_that_writes_its_argument(backend: Backend) -> None:
    """What graphs write into an argument is found there by the step, as it would be without graphs."""

    def stack(hidden: torch.Tensor, view: Prefill, total: torch.Tensor) -> torch.Tensor:
        hidden.mul_(2)
        total.copy_(hidden.sum(0))
        return scaled(hidden, view)

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        hidden[int(view.extend_seq_lens.sum()) :] = 0
        total = torch.empty(2, dtype=torch.float64, device=hidden.device)
        return inner(hidden, view, total) + hidden + total

    runner, eager = around(stack, backend, outer)
    assert_equal(runner, eager, backend.device, 1, 2)


def test_argument_that_was_a_slot(backend: Backend) -> None:
    """Where graphs read a slot that the stack is handed, other memory in its place is refused."""
    other: list[torch.Tensor] = []
    outer = lambda view, hidden, inner: inner(hidden, other[0] if other else view.positions)  # noqa: E731
    runner, eager = around(lambda hidden, positions: hidden * positions[:, None], backend, outer, buckets=[4])
    other.append(torch.ones(4, dtype=torch.int64, device=backend.device))
    with pytest.raises(errors.ReplayError, match="argument 1 of the stack, of type Tensor, is another one than"):
        runner(batch_of([2], 1, backend.device))
    other.clear()
    batch = batch_of([1, 2], 2, backend.device)
    assert torch.equal(runner(batch), eager(batch))


def test_inference_mode_at_capture(backend: Backend) -> None:
    """Graphs captured in inference mode take arguments of steps outside of it, and the other way round."""
    runner, eager = around(lambda hidden, view: scaled(hidden * 2, view), backend, lazy=True)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert_equal(runner, eager, backend.device)
