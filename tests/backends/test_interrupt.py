"""What `Backend.interrupt` promises: a call between two graphs, which finds the work so far done, in each replay."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from slotgraph.backends import DEVICE, Backend, Graph
from slotgraph.backends.cpu import HostBackend
from slotgraph.dataflow.errors import CaptureError, ReplayError
from tests.backends.test_contract import captured, has_true_graphs, random_on
from tests.operators import Operators

pytestmark = pytest.mark.slotgraph_backends()
Body = Callable[[], Any]


def between(backend: Backend, body: Body) -> Any:
    """An interruption as a runner makes one: the body answers, or its answer goes to the places that are given."""

    def run(places: Sequence[Any] | None) -> Any:
        answer = body()
        for place, leaf in zip(places or (), pytree.tree_leaves(answer) if places else (), strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(leaf)
        return answer

    return backend.interrupt(run)


def replayed(backend: Backend, step: Body, changed: torch.Tensor) -> Graph:
    """A captured step, replayed on other numbers."""
    graph = captured(backend, step)
    changed.copy_(random_on(backend, len(changed), seed=9))
    graph.replay()
    return graph


@pytest.fixture
def interrupting(backend: Backend) -> Backend:
    """Each backend that can run here and says that it can interrupt a capture."""
    if type(backend).interrupt is Backend.interrupt:
        pytest.skip(f"{backend.name} cannot interrupt a capture")
    return backend


def test_outside_of_a_capture_a_call_is_made_once(interrupting: Backend) -> None:
    """Where nothing is captured it is called once, for its answer, which comes back as it is."""
    times = itertools.count()
    assert interrupting.interrupt(lambda places: (places, next(times))) == (None, 0)
    assert next(times) == 1


@settings(max_examples=12)
@given(parts=st.lists(st.sampled_from(["graph", "break"]), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_graphs_and_calls_run_once_in_any_order(interrupting: Backend, parts: list[str], seed: int) -> None:
    """Calls may come first, last, alone, and behind one another with nothing between them; each part is done once."""
    x, count, times = random_on(interrupting, 2, seed=7), random_on(interrupting, 1, seed=8), [0]

    def called(value: torch.Tensor) -> torch.Tensor:
        times[0] += 1
        return value + float(value.flatten()[0])  # a read that no graph may make

    def step() -> torch.Tensor:
        value = x
        for part in parts:
            if part == "graph":
                count.add_(1)
            value = between(interrupting, partial(called, value)) if part == "break" else value * 2 - 1
        return value

    graph = captured(interrupting, step)
    for more in range(2):
        x.copy_(random_on(interrupting, 2, seed=seed + more))
        times[0], expected = 0, x.clone()
        for part in parts:
            expected = expected + expected[0, 0] if part == "break" else expected * 2 - 1
        count.zero_()
        graph.replay()
        torch.testing.assert_close(graph.outputs, expected)
        assert times[0] == parts.count("break")
        assert count.tolist() == [[parts.count("graph")] * 3]


def test_an_answer_may_be_nested(interrupting: Backend) -> None:
    """An answer may be nested, with no tensor or several; what is not a tensor comes back as it was at capture."""
    x = random_on(interrupting, 2, seed=8)

    def step() -> Any:
        nothing = between(interrupting, lambda: None)
        parts = between(interrupting, lambda: {"sum": (x.sum(0), [x * float(x[0, 0])]), "name": "both", "n": 3})
        return nothing, parts["sum"][0] * parts["n"], parts["sum"][1][0] + 1, parts["name"]

    nothing, total, scaled, name = replayed(interrupting, step, x).outputs
    assert (nothing, name) == (None, "both")
    torch.testing.assert_close(total, x.sum(0) * 3)
    torch.testing.assert_close(scaled, x * x[0, 0] + 1)


def test_a_call_that_raises_breaks_the_capture_off(interrupting: Backend) -> None:
    """What raises breaks the capture off, in its own words; the next capture and older graphs go on."""
    x = random_on(interrupting, 2, seed=12)
    older = captured(interrupting, lambda: between(interrupting, lambda: x * 2) + 1)

    def raising() -> Any:
        raise OSError("no kernel for this")

    for bodies in ([raising], [lambda: x * 2, raising]):
        with pytest.raises(CaptureError, match="no kernel for this"):
            interrupting.capture(lambda: [between(interrupting, body) for body in bodies])  # noqa: B023 - called here
    newer = captured(interrupting, lambda: between(interrupting, lambda: x * 3) + 1)
    for graph, times in ((older, 2), (newer, 3)):
        graph.replay()
        torch.testing.assert_close(graph.outputs, x * times + 1)


def test_a_replay_that_a_call_breaks_off_can_be_repeated(interrupting: Backend) -> None:
    """A replay that it breaks off leaves a graph that can be replayed."""
    x, faults = random_on(interrupting, 2, seed=13), list[Exception]()

    def body() -> torch.Tensor:
        for fault in faults:
            raise fault
        return x * 2

    graph = captured(interrupting, lambda: between(interrupting, body) + 1)
    faults.append(ReplayError("not today"))
    with pytest.raises(ReplayError, match="not today"):
        graph.replay()
    faults.clear()
    graph.replay()
    torch.testing.assert_close(graph.outputs, x * 2 + 1)


def test_host_reads_are_refused_after_a_call(interrupting: Backend) -> None:
    """Only the call itself may read the host: what follows is a graph again."""
    if not has_true_graphs(interrupting):
        pytest.skip(f"{interrupting.name} runs steps again, host reads and all")
    x = random_on(interrupting, 2, seed=14)
    with pytest.raises(CaptureError):
        interrupting.capture(lambda: float(between(interrupting, lambda: x * float(x[0, 0]))[0, 0]))


def test_a_call_may_capture_and_replay_another_graph(interrupting: Backend) -> None:
    """It may capture and replay another graph, as a runner within a break does; later calls still are calls."""
    x, made, later = random_on(interrupting, 2, seed=15), list[Any](), list[float]()

    def body() -> Any:
        if not made:
            made.append(captured(interrupting, lambda: x * 3))
        made[0].replay()
        return made[0].outputs.clone()

    def step() -> Any:
        first = between(interrupting, body) + 1
        between(interrupting, lambda: later.append(float(x[0, 0])))
        return first * 2

    torch.testing.assert_close(replayed(interrupting, step, x).outputs, (x * 3 + 1) * 2)
    assert (later[-1], len(later) > 1) == (float(x[0, 0]), True)


def test_a_call_within_a_call_is_a_part_of_it(interrupting: Backend) -> None:
    """One asked for while another runs is a part of that: it is called with it, each time once."""
    x, order = random_on(interrupting, 2, seed=22), list[str]()

    def outer() -> torch.Tensor:
        order.append("outer")
        between(interrupting, lambda: order.append("inner"))
        return x * 2

    graph = captured(interrupting, lambda: between(interrupting, outer) + 1)
    order.clear()
    graph.replay()
    assert order == ["outer", "inner"]
    torch.testing.assert_close(graph.outputs, x * 2 + 1)


def test_memory_allocated_before_the_first_call_is_kept(interrupting: Backend) -> None:
    """Before the first call there may be memory and no operator; it is there for all later parts."""
    x = random_on(interrupting, 3, seed=23)

    def step() -> torch.Tensor:
        room = torch.empty_like(x)
        between(interrupting, lambda: room.copy_(x) is None)
        between(interrupting, lambda: None)
        return room + 1

    torch.testing.assert_close(replayed(interrupting, step, x).outputs, x + 1)


def test_two_graphs_with_calls_do_not_disturb_one_another(interrupting: Backend) -> None:
    """Two graphs with calls in them, which may share memory, do not disturb one another's steps."""
    x = random_on(interrupting, 4, seed=17)

    def step(factor: int) -> Any:
        first = x * factor
        second = between(interrupting, lambda: first + float(first[0, 0]))
        return between(interrupting, lambda: second + float(first[1, 0])) * 2

    graphs = {by: captured(interrupting, partial(step, by), pool=interrupting.pool()) for by in (5, 2)}
    for seed, factor in ((18, 2), (19, 5), (20, 5), (21, 2)):
        x.copy_(random_on(interrupting, 4, seed=seed))
        graphs[factor].replay()
        torch.testing.assert_close(graphs[factor].outputs, (x + x[0, 0] + x[1, 0]) * factor * 2)


def test_borrowed_memory_is_the_same_memory(interrupting: Backend) -> None:
    """What is borrowed in a call is the same memory, whoever owns it."""
    x, borrowed = random_on(interrupting, 2, seed=25), list[tuple[torch.Tensor, torch.Tensor]]()

    def step() -> Any:
        doubled = x * 2

        def body() -> torch.Tensor:
            borrowed.extend((one, interrupting.borrow(one)) for one in (doubled, x))
            return doubled + 1

        return between(interrupting, body) + 1

    interrupting.capture(step)
    assert all((one.data_ptr(), one.shape) == (other.data_ptr(), other.shape) for one, other in borrowed)


@final
class Plain(HostBackend):
    name = "plain"

    def capture(self, step: Callable[[], Any], **options: Any) -> Any:
        raise NotImplementedError(step, options)


def test_a_backend_that_cannot_interrupt_says_so() -> None:
    """It is asked in vain: CaptureError names it."""
    with pytest.raises(CaptureError, match="backend 'plain' cannot interrupt a capture, which a break in a step needs"):
        Plain().interrupt(id)
    tensor = Plain().empty((2,), torch.float32, DEVICE)
    assert Plain().borrow(tensor) is tensor


def test_a_torch_mode_sees_what_a_call_does(interrupting: Backend) -> None:
    """A torch mode that is on sees what the call does at capture as it does in a replay, and is on afterwards."""
    x, counts = random_on(interrupting, 2, seed=24), list[int]()

    def body() -> torch.Tensor:
        before = len(mode.names)
        result = x * 2
        counts.append(len(mode.names) - before)
        return result

    with Operators() as mode:
        graph = captured(interrupting, lambda: between(interrupting, body) + 1)
        graph.replay()
        before = len(mode.names)
        torch.testing.assert_close(graph.outputs, x * 2 + 1)
        assert len(mode.names) > before
    assert counts == [1, 1, 1]  # warm-up, capture, replay
