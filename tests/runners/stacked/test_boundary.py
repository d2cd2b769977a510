"""What crosses the boundary of a stack, where no random program of test_games.py has it: objects, results, contexts."""

import contextlib
import contextvars
import gc
import importlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import BreakableRunner, EagerRunner, PrefillRunner, current_view, errors, graph_break
from slotgraph.backends import Backend
from tests.backends.test_contract import has_true_graphs
from tests.runners.models import ready
from tests.runners.prefilled import KINDS, Around, Model, Prefill, batch_of, poison, runner_of

each_kind = pytest.mark.parametrize("kind", KINDS)


@torch.library.custom_op("slotgraph_boundary::plus", mutates_args=())
def plus(hidden: torch.Tensor) -> torch.Tensor:
    """Read this step's requests and scale."""
    view = current_view(Prefill)
    return torch.add(hidden * view.extend_seq_lens.shape[0], view.scale)


@torch.library.custom_op("slotgraph_boundary::into", mutates_args={"out"})
def into(out: torch.Tensor) -> None:
    """Write this step's scale in place."""
    out.add_(current_view(Prefill).scale)


@attrs.define
class Context:  # what an engine keeps outside of its model; the step writes it, or the code of the stack
    anew: torch.Tensor | None = None
    stored: torch.Tensor | None = None


CONTEXT = Context()


@torch.library.custom_op("slotgraph_boundary::with_stored", mutates_args=())
def with_stored(hidden: torch.Tensor) -> torch.Tensor:
    """Read what the code of the stack has stored."""
    return hidden + CONTEXT.stored.reshape(len(hidden), -1) if CONTEXT.stored is not None else hidden.clone()


@torch.library.custom_op("slotgraph_boundary::with_anew", mutates_args=())
def with_anew(hidden: torch.Tensor) -> torch.Tensor:
    """Read what the step has put into the context."""
    assert CONTEXT.anew is not None
    return hidden + CONTEXT.anew


@torch.library.custom_op("slotgraph_boundary::write_anew", mutates_args=())
def write_anew(hidden: torch.Tensor) -> torch.Tensor:
    """Write what the step has put into the context."""
    assert CONTEXT.anew is not None
    CONTEXT.anew.add_(current_view(Prefill).scale)
    return hidden.clone()


FUNCTIONS = (plus, with_stored, with_anew, write_anew)
for one in FUNCTIONS:
    one.register_fake(torch.empty_like)
into.register_fake(lambda out: None)


@attrs.frozen
class Breaks:
    """The same breaks as each runner has them: functions that are marked, or operators that are named."""

    plus: Callable[..., Any]
    into: Callable[..., Any]
    relu_: Callable[..., Any]
    with_stored: Callable[..., Any]
    with_anew: Callable[..., Any]
    write_anew: Callable[..., Any]


def in_place(one: torch.Tensor) -> torch.Tensor:
    """An operator that returns its argument."""
    return one.relu_()


NAMED: Any = (plus, into, in_place, with_stored, with_anew, write_anew)
BREAKS = {"breakable": Breaks(*map(graph_break, NAMED)), "piecewise": Breaks(*NAMED)}


def pair(kind: str, backend: Any, body: Any, outer: Any, **options: Any) -> tuple[Any, EagerRunner[Prefill]]:
    """A captured runner whose stack is `body(breaks, *arguments)`, and an eager one over the same step."""
    breaks = BREAKS[kind]
    step = Around(lambda *args: body(breaks, *args), outer)
    given = {"stack": "inner", "buckets": [4, 8], "max_batch": 5, "output_rows": None, "backend": backend, **options}
    if kind == "breakable":
        runner: Any = BreakableRunner(Prefill, step, progress=False, **given)
    else:
        runner = PrefillRunner(Prefill, step, splits=[*FUNCTIONS, into, "relu_"], progress=False, **given)
    return ready(runner), EagerRunner(Prefill, step, backend=backend)


FULL = ([4], [1, 3], [8], [5, 3], [2, 1, 1])
"""Requests that fill a bucket, so that all rows are to be the same."""


def assert_same(runner: Any, eager: EagerRunner[Prefill], device: Any, *more: list[int]) -> None:
    """Both give the same for batches of both buckets, of all rows, or of the live ones where buckets are not full."""
    for number, lengths in enumerate((*FULL, *more)):
        batch, rows = batch_of(lengths, number, device, scale=2 + number), sum(lengths)
        poison(runner)
        ours = [one.clone() for one in runner(batch)]
        theirs = eager(batch)
        assert len(ours) == len(theirs)
        for place, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(left[:rows] if lengths in more else left, right), (lengths, place)


def refusal(kind: str, backend: Any, body: Any, outer: Any = None) -> str:
    """Why a step is not captured."""
    with pytest.raises(errors.CaptureError) as raised:
        pair(kind, backend, body, outer)
    return str(raised.value)


def double_on(backend: Backend) -> str:
    """What messages call a tensor of double precision: an NPU, which has none, makes it one of float32."""
    return str(torch.zeros(1, device=backend.device).double().dtype).removeprefix("torch.")


def writing_what_is_returned(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
    """The stack returns an argument, or a part of it, which the step goes on to write."""
    extra = hidden * view.scale
    out, same = inner(hidden, view, extra)
    same.add_(1)
    return [out, same, extra]


def test_objects_that_are_returned_are_the_steps_own(backend: Backend) -> None:
    """An object, a slot over requests and the view itself are each step's own, too."""

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        out, own, lengths, same = inner(hidden, view, Context(hidden * view.scale))
        assert same is view
        return [out, own.anew, lengths + view.scale]

    def body(breaks: Breaks, hidden: torch.Tensor, view: Prefill, own: Context) -> Any:
        return breaks.plus(hidden), own, view.extend_seq_lens, view

    assert_same(*pair("breakable", backend, body, outer), backend.device)


def test_a_part_of_another_dtype_is_refused(cpu: str) -> None:
    """A part of an argument as another dtype has no name in a later step: it is refused."""
    body = lambda breaks, hidden, _, extra: (breaks.plus(hidden), extra.view(torch.int64))
    said = refusal("breakable", cpu, body, writing_what_is_returned)
    assert "returns a part of its argument 2 as another dtype" in said
    assert "return a clone" in said


def test_columns_of_one_tensor_do_not_share_memory(backend: Backend) -> None:
    """Parts of one tensor that have no element in common do not share memory."""

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        both = torch.cat([hidden, hidden * view.scale], 1)
        left, right = both.chunk(2, 1)
        return [inner(left, right), both]

    def body(breaks: Breaks, left: torch.Tensor, right: torch.Tensor) -> Any:
        left.add_(right)
        return breaks.plus(left)

    assert_same(*pair("breakable", backend, body, outer), backend.device)


def test_arguments_that_share_memory_later_are_refused(backend: Backend) -> None:
    """Arguments that share memory in a later step alone are refused in that step, which leaves the next one right."""
    later = list[bool]()

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        return [inner(hidden, hidden if later else hidden * view.scale), hidden]

    def body(breaks: Breaks, one: torch.Tensor, other: torch.Tensor) -> Any:
        one.add_(1)
        return breaks.plus(one + other)

    runner, eager = pair("breakable", backend, body, outer)
    later.append(True)
    with pytest.raises(
        errors.ReplayError,
        match=r"arguments 0 and 1 of the stack share memory, and it writes one.*, or a clone",
    ):
        runner(batch_of([3], 1, backend.device))
    later.clear()
    assert_same(runner, eager, backend.device)


def test_one_object_at_capture_stays_one(backend: Backend) -> None:
    """A break cannot tell apart what was one object at capture: two in a later step are refused."""
    later = list[bool]()

    @graph_break
    def both(hidden: torch.Tensor, one: Context, other: Context) -> torch.Tensor:
        assert one.anew is not None
        assert other.anew is not None
        return hidden + one.anew * 2 + other.anew

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        own = Context(hidden * view.scale)
        return [inner(hidden, own, Context(hidden) if later else own)]

    runner, eager = pair("breakable", backend, lambda _, *args: both(*args), outer)
    later.append(True)
    with pytest.raises(errors.ReplayError, match="arguments 1 and 2 of the stack were one object at capture"):
        runner(batch_of([3], 1, backend.device))
    later.clear()
    assert_same(runner, eager, backend.device)


@each_kind
def test_an_argument_written_through_a_context_is_refused(backend: Backend, kind: str) -> None:
    """A break that writes an argument's memory, which graphs read, through a context is refused: they have a copy."""

    def outer(_: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        CONTEXT.anew = hidden
        return [inner(hidden), hidden]

    said = refusal(kind, backend, lambda breaks, hidden: breaks.write_anew(hidden * 2) + hidden, outer)
    assert f"the stack writes its argument 0, {double_on(backend)}" in said
    assert "use only the argument" in said
    said = refusal(kind, backend, lambda breaks, hidden: breaks.with_anew(hidden.mul_(2)), outer)
    assert f"the stack writes its argument 0, {double_on(backend)}" in said
    reading = lambda breaks, hidden: breaks.with_anew(hidden * 2)
    assert_same(*pair(kind, backend, reading, outer), backend.device, [3])


STORED: list[Any] = [
    lambda hidden, _: hidden * 2,
    lambda hidden, _: hidden,
    lambda hidden, _: hidden[:, :1],
    lambda _, view: view.positions[:, None],
    lambda _, view: view.positions,
]


@each_kind
@pytest.mark.parametrize("reader", ["break", "step"])
@pytest.mark.parametrize("stored", STORED, ids=["result", "argument", "part", "part of a slot", "slot"])
def test_an_attribute_that_the_stack_stores_is_refused(backend: Backend, kind: str, stored: Any, reader: str) -> None:
    """A break or a step that reads what the code of the stack has stored would have the capture's: it is refused."""

    def body(breaks: Breaks, hidden: torch.Tensor, view: Prefill) -> Any:
        CONTEXT.stored = stored(hidden, view)
        return breaks.with_stored(hidden + 1) if reader == "break" else breaks.plus(hidden)

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        out = inner(hidden, view)
        if reader == "break":
            return [out]
        assert CONTEXT.stored is not None
        return [out + CONTEXT.stored.reshape(len(out), -1)]

    said = refusal(kind, backend, body, outer)
    assert f"{reader} " in said
    assert "reads a tensor that the code of the stack has stored" in said
    assert "pass it to the break as an argument, or return it from the stack" in said
    CONTEXT.stored = None


def test_the_error_names_the_stored_attribute(cpu: str) -> None:
    """The error names the attribute."""
    step: Any = Around(lambda hidden, view: graph_break(lambda one: one + step.last)(storing(hidden, view)))

    def storing(hidden: torch.Tensor, _: Prefill) -> torch.Tensor:
        step.last = hidden * 2
        return hidden + 1

    with pytest.raises(errors.CaptureError, match=r"stored, float64 of shape \[4, 2\], as 'last': no replay runs that"):
        ready(runner_of("breakable", step, cpu, buckets=[4], output_rows=None))


def test_breaks_may_store_what_each_replay_computes(backend: Backend) -> None:
    """A break may store its arguments and results for another one, or for the step: each replay runs it."""

    @graph_break
    def keep(hidden: torch.Tensor) -> torch.Tensor:
        CONTEXT.stored, CONTEXT.anew = hidden, hidden * 3
        return CONTEXT.anew

    @graph_break
    def use(hidden: torch.Tensor) -> torch.Tensor:
        assert CONTEXT.stored is not None
        assert CONTEXT.anew is not None
        return hidden + CONTEXT.stored * 2 + CONTEXT.anew

    def outer(_: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        out = inner(hidden)
        assert CONTEXT.anew is not None
        return [out, CONTEXT.anew + 1]

    body = lambda _, hidden: use(keep(hidden * 2) + 1) * 2
    assert_same(*pair("breakable", backend, body, outer), backend.device, [3], [2, 3])


def test_an_object_that_the_stack_makes_may_reach_a_break(backend: Backend) -> None:
    """An object of the stack's code with tensors of its graphs may be handed to a break: graphs write these anew."""
    body = lambda _, hidden: with_context(hidden, Context(hidden * 2)) + 1

    @graph_break
    def with_context(hidden: torch.Tensor, own: Context) -> torch.Tensor:
        assert own.anew is not None
        return hidden + own.anew

    assert_same(*pair("breakable", backend, body, lambda _, hidden, inner: [inner(hidden)]), backend.device, [3])

    def storing(_: Breaks, hidden: torch.Tensor) -> Any:
        CONTEXT.anew = hidden * 2
        return with_context(hidden, CONTEXT)

    said = refusal("breakable", backend, storing, lambda _, hidden, inner: [inner(hidden)])
    assert "reads a tensor that the code of the stack has stored" in said
    assert "CONTEXT" in said


ANEW: dict[str, Any] = {
    "graph": lambda breaks, hidden: breaks.plus(hidden) + CONTEXT.anew,
    "part": lambda breaks, hidden: breaks.plus(hidden) + CONTEXT.anew[:],  # type: ignore[index]
    "argument of a break": lambda breaks, hidden: breaks.plus(CONTEXT.anew) + hidden,
    "returned": lambda breaks, hidden: (breaks.plus(hidden), CONTEXT.anew)[1],
}


@each_kind
@pytest.mark.parametrize("body", ANEW.values(), ids=ANEW)
@pytest.mark.parametrize("same", [False, True], ids=["another", "argument"])
def test_a_tensor_made_anew_in_each_step_is_refused(backend: Backend, kind: str, body: Any, *, same: bool) -> None:
    """A tensor of each step that reaches a graph or a break's arguments past the stack's own arguments is refused."""

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        CONTEXT.anew = hidden if same else hidden * view.scale
        return [inner(hidden)]

    said = refusal(kind, backend, body, outer)
    assert f"that the step makes anew, past the arguments of the stack, {double_on(backend)} of shape" in said
    assert "Hand it to the stack as an argument, or read it in a break" in said


def test_a_slot_of_each_steps_object_may_reach_a_break(backend: Backend) -> None:
    """The stack's code may hand a slot of each step's object to a break, but no tensor that was made for it."""

    @graph_break
    def with_lengths(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return hidden * len(lengths) + lengths.sum()

    body = lambda _, hidden, own: with_lengths(hidden * 2, own.anew)
    outer = lambda view, hidden, inner: [inner(hidden, Context(view.extend_seq_lens))]
    assert_same(*pair("breakable", backend, body, outer), backend.device, [3], [2, 3])
    anew = lambda view, hidden, inner: [inner(hidden, Context(view.extend_seq_lens * 2))]
    assert "break '" in (said := refusal("breakable", backend, body, anew))
    assert "is handed a tensor that the step makes anew" in said
    kept = Context()

    def living(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        kept.anew = hidden * view.scale
        return [inner(hidden, kept)]

    said = refusal("breakable", backend, lambda breaks, hidden, own: breaks.plus(hidden) + own.anew, living)
    assert "argument 1 of the stack, of type Context, holds a tensor that each step makes anew" in said


OPEN: Final[contextvars.ContextVar[int]] = contextvars.ContextVar("slotgraph_boundary_open", default=0)
DEPTHS = [0]


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """A context that code of a stack asks for."""
    token = OPEN.set(OPEN.get() + 2)
    try:
        yield
    finally:
        OPEN.reset(token)


def test_graphs_are_captured_in_the_steps_context(backend: Backend) -> None:
    """Graphs are captured in what the step has set up around its stack, and the step is left as it goes on itself."""

    def outer(_: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        DEPTHS[0] += 1
        assert DEPTHS == [1], "the step before this one did not come to its end"
        with opened():
            out = inner(hidden)
        DEPTHS[0] -= 1
        return [out]

    def body(breaks: Breaks, hidden: torch.Tensor) -> Any:
        assert DEPTHS == [1]
        return breaks.plus(hidden * OPEN.get()) - OPEN.get()

    assert_same(*pair("breakable", backend, body, outer, warmups=3), backend.device, [3])


@each_kind
def test_graphs_hold_the_casts_of_the_step(backend: Backend, kind: str) -> None:
    """Casts that the step turns on for its stack are in its graphs."""
    weight = torch.eye(2, device=backend.device)

    def outer(_: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        with torch.autocast(backend.device.type, torch.bfloat16):
            return [inner(hidden.float())]

    runner, eager = pair(kind, backend, lambda breaks, hidden: breaks.plus(hidden @ weight) @ weight, outer)
    [out] = runner(batch_of([4], 1, backend.device))
    assert out.dtype is torch.bfloat16
    assert_same(runner, eager, backend.device, [3])


def test_a_compiled_step_leaves_the_stack_alone(cpu: str) -> None:
    """The compiler leaves alone what a capture and a replay put in the place of the stack."""
    stack = lambda hidden: BREAKS["breakable"].plus(hidden * 2) + 1
    step = Around(stack, lambda view, hidden, inner: [inner(hidden * view.scale) - 1])
    compiled = torch.compile(step, backend="eager")
    given: dict[str, Any] = {"stack": step.inner, "buckets": [4, 8], "output_rows": None, "warmups": 2}
    runner = ready(runner_of("breakable", compiled, cpu, **given))
    assert_same(runner, EagerRunner(Prefill, step, backend=cpu), "cpu", [3])


@each_kind
def test_what_follows_the_stack_runs_in_a_capture(backend: Backend, kind: str) -> None:
    """In each run that a capture makes of a step, what follows the stack finds what the stack returns."""

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        extra = hidden * view.scale
        out, same = inner(hidden, extra)
        assert same.data_ptr() == extra.data_ptr()
        assert torch.equal(out.sub_(5), hidden * len(view.extend_seq_lens) + view.scale)
        return [out, same]

    body = lambda breaks, hidden, extra: (breaks.plus(hidden) + 5, extra)
    assert_same(*pair(kind, backend, body, outer, warmups=3), backend.device, [3])


def test_a_step_whose_stack_fails_comes_to_its_end(cpu: str) -> None:
    """Its step comes to its end, for the sake of other ranks; what is raised there hides nothing."""
    importlib.import_module("torch._dynamo")  # where it is, no warm-up is left out: the capture is the fourth run
    counts = Counter[str]()

    def outer(_: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        counts["begun"] += 1
        out = inner(hidden)
        counts["ended"] += 1
        if counts["stack"] == 4:
            raise ValueError("of the step")
        return [out]

    def body(breaks: Breaks, hidden: torch.Tensor) -> Any:
        counts["stack"] += 1
        if counts["stack"] == 4:
            raise ValueError("of the stack")
        return breaks.plus(hidden)

    with pytest.raises(errors.CaptureError, match=r"ValueError at .* while it was captured: of the stack"):
        pair("breakable", cpu, body, outer, buckets=[4], warmups=1)
    assert counts["begun"] == counts["ended"]


def test_a_step_that_calls_its_stack_at_times_is_refused(cpu: str) -> None:
    """A step that does not call its stack in some run of a capture is refused."""
    runs = list[None]()

    def outer(_: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        runs.append(None)
        return [inner(hidden) if len(runs) < 4 else hidden]

    with pytest.raises(errors.CaptureError, match="the step called the stack, inner, 0 times"):
        pair("breakable", cpu, lambda breaks, hidden: breaks.plus(hidden), outer, buckets=[4], warmups=2)


def test_a_break_may_return_parts_of_its_arguments(backend: Backend) -> None:
    """Parts of arguments and tensors of its own may be mixed in an answer."""

    @graph_break
    def mixed(one: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
        one.mul_(3)
        return {"part": one[1:], "own": one + other, "n": 2, "column": other[:, :1]}

    def body(_: Breaks, hidden: torch.Tensor, extra: torch.Tensor) -> Any:
        double = hidden * 2
        got = mixed(double, extra)
        got["part"].add_(got["n"])
        return got["own"] + double, got["column"], extra

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        out, column, extra = inner(hidden, hidden * view.scale)
        column.add_(1)
        return [out, column, extra]

    assert_same(*pair("breakable", backend, body, outer), backend.device)


def test_an_answer_that_is_no_argument_any_more_is_refused(backend: Backend) -> None:
    """A break that returned its argument at capture, and something else in a later step, is refused in that step."""
    if not has_true_graphs(backend):
        pytest.skip(f"{backend.name} runs what follows a break anew")
    later = list[Callable[[torch.Tensor], Any]]()

    @graph_break
    def changing(hidden: torch.Tensor) -> Any:
        return later[0](hidden) if later else hidden

    body = lambda _, hidden: changing(hidden * 2) + 1
    runner, eager = pair("breakable", backend, body, lambda _, hidden, inner: [inner(hidden)])
    others: list[Callable[[torch.Tensor], Any]] = [
        torch.clone,
        lambda one: one[1:],
        lambda one: one.t(),
        lambda _: None,
    ]
    for answer in others:
        later[:] = [answer]
        with pytest.raises(
            errors.ReplayError, match=r"result 0 was its argument 0 at capture, or a view of it, and is"
        ):
            runner(batch_of([4], 1, backend.device))
    later.clear()
    assert_same(runner, eager, backend.device)


def test_results_that_share_memory_may_be_read_alone(backend: Backend) -> None:
    """Results that are parts of one another may be read; a graph that writes one is refused, as it has copies."""

    @graph_break
    def twice(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = hidden * 2
        return both, both[:, :1]

    outer = lambda _, hidden, inner: [inner(hidden)]
    body = lambda _, hidden: sum(twice(hidden + 1))
    assert_same(*pair("breakable", backend, body, outer), backend.device, [3])
    said = refusal("breakable", backend, lambda _, hidden: twice(hidden)[1].add_(1), outer)
    assert "add_ writes a result of break 'marked" in said.replace(
        "test_results_that_share_memory_may_be_read_alone.<locals>.twice", "marked"
    )


def references_to(kind: str, backend: Backend, seed: int) -> list[weakref.ref[Any]]:
    """Make a runner, and run a step; returns references to what must not outlive it."""
    model = Model(seed, named=kind == "piecewise").to(backend.device)
    runner = ready(runner_of(kind, model, backend, buckets=[4]))
    runner(batch_of([2, 1], seed, backend.device))
    layer: Any = model.inner[0]
    return [weakref.ref(one) for one in (runner, runner.graphs, model, layer, layer.mix, layer.cache)]


@each_kind
def test_nothing_of_a_deleted_runner_lives_on(backend: Backend, kind: str) -> None:
    """Nothing of a runner lives on: not its model, nor weights and caches."""
    references = [one for seed in range(10 if kind == "breakable" else 5) for one in references_to(kind, backend, seed)]
    gc.collect()
    assert [one() for one in references if one() is not None] == []
