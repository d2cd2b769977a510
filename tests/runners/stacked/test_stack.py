"""The stack of a step: its name, its arguments, what its graphs may not depend on, and the placeholder of a capture."""

import enum
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, TOKENS, BreakableRunner, Step, copied, current_view, errors, graph_break, keep
from slotgraph.backends import Backend
from slotgraph.extend import once
from tests.runners.models import ready
from tests.runners.prefilled import Model, Prefill, around, assert_equal, batch_of, poison, runner_of, scaled


class Mode(enum.Enum):  # a value that a graph takes in
    ONE = 1
    TWO = 2


@attrs.define
class Pool:  # an object that lives as long as the model, and one that each step makes anew
    rows: torch.Tensor


class Slotted:  # the same without a dict
    __slots__ = ("parts",)

    def __init__(self, rows: torch.Tensor) -> None:
        self.parts = {"rows": [rows]}


@graph_break
def plus_rows(hidden: torch.Tensor, pool: Any) -> torch.Tensor:
    """A break that reads a tensor within an object."""
    return torch.add(hidden, pool.rows)


@pytest.mark.parametrize(
    ("at_capture", "later", "said"),
    [
        (2, 3, "argument 2 of the stack is 3, and was 2 at capture: pass values that change as a tensor"),
        (2, 2.0, r"is 2\.0, and was 2 at capture"),
        (None, "name", "is 'name', and was None"),
        (Mode.ONE, Mode.TWO, "is <Mode.TWO: 2>, and was <Mode.ONE: 1>"),
        ((1, 2), (1, 2, 3), "the stack was called with other arguments than at capture"),
        ({"a": 1}, {"b": 1}, "the stack was called with other arguments than at capture"),
        (None, torch.ones(3, 2), r"is float32 of shape \[3, 2\], and was None"),
        (torch.ones(4, 2), None, r"is None, and was float32 of shape \[4, 2\]"),
        (torch.ones(4, 2), torch.ones(2, 2), r"is float32 of shape \[2, 2\], and was float32 of shape \[4, 2\]"),
        (torch.ones(4, 2), torch.ones(4, 2).int(), r"is int32 of shape \[4, 2\]"),
    ],
)
def test_an_argument_unlike_the_captures_is_refused(at_capture: Any, later: Any, said: str) -> None:
    """A value, a structure or a shape other than at capture is refused, and the next step is right."""
    given = [at_capture]

    def stack(hidden: torch.Tensor, view: Prefill, extra: Any) -> torch.Tensor:
        return scaled(hidden + extra if isinstance(extra, torch.Tensor) else hidden, view)

    outer = lambda view, hidden, inner: inner(hidden, view, given[0])
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
def test_graphs_may_use_tensors_of_an_object_that_lives_on(backend: Backend, kind: Any) -> None:
    """Graphs may read and write a tensor of an object that is the same in each step: a cache."""
    pools = [kind(torch.zeros(8, 2, dtype=torch.float64, device=backend.device)) for _ in range(2)]
    chosen = [0]

    def rows_of(pool: Any) -> torch.Tensor:
        rows: torch.Tensor = pool.rows if isinstance(pool, Pool) else pool.parts["rows"][0]
        return rows

    def stack(hidden: torch.Tensor, view: Prefill, pool: Any) -> torch.Tensor:
        rows_of(pool)[: hidden.shape[0]] += hidden
        return scaled(rows_of(pool)[: hidden.shape[0]] * 2, view)

    outer = lambda view, hidden, inner: inner(hidden, view, pools[chosen[0]])
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
    with pytest.raises(errors.ReplayError, match=f"argument 2 .*, of type {kind.__name__}, is another object than"):
        runner(batch_of([8], 1, backend.device))


def pool_of(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
    """Hand the stack an object that each step makes anew."""
    return inner(hidden, Pool(hidden * view.scale))


def first_of(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
    """Hand the stack another view than the step's own."""
    return inner(hidden, view.narrow(BATCH, 0, 1, tokens=(0, int(view.extend_seq_lens[0]))))


@graph_break
def first_request(hidden: torch.Tensor, part: Prefill) -> torch.Tensor:
    """A break that reads a part of the view."""
    return torch.add(hidden * int(part.extend_seq_lens.sum()), part.input_ids.shape[0])


def all_kinds(hidden: torch.Tensor, view: Prefill, pair: Any, **more: Any) -> torch.Tensor:
    """A stack that takes nested structures, and keywords of all kinds."""
    assert more["mode"] is Mode.TWO
    assert pair["b"][1] is None
    hidden = hidden * more["factor"] + pair["a"] * pair["b"][0] + more["positions"].to(more["dtype"])[:, None]
    return torch.sub(scaled(hidden, view), pair["a"])


def all_kinds_of(view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
    """Hand the stack all that."""
    pair = {"a": hidden + 1, "b": (hidden[:, :1] * 2, None)}
    return inner(hidden, view, pair, factor=3, mode=Mode.TWO, dtype=torch.float64, positions=view.positions)


def looks_at_requests(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
    """A stack that asks what is the same in each step of a slot over requests."""
    lengths = view.extend_seq_lens
    known = lengths is not None and lengths.device == hidden.device and lengths.dtype == torch.int32
    return scaled(hidden, view) + lengths.ndim if known else hidden


@pytest.mark.parametrize(
    ("stack", "outer"),
    [
        (all_kinds, all_kinds_of),
        (looks_at_requests, None),
        (lambda hidden, pool: plus_rows(hidden * 2, pool), pool_of),
        (lambda hidden, part: first_request(hidden, part) + 1, first_of),
        # slots over tokens are where they were, also in an object of each step's
        (
            lambda hidden, pool: hidden + pool.rows[:, None],
            lambda view, hidden, inner: inner(hidden, Pool(view.positions)),
        ),
    ],
)
def test_arguments_of_all_kinds_reach_the_stack(backend: Backend, stack: Any, outer: Any) -> None:
    """Tensors are moved, values are those of the capture, and breaks read what is live of an object of each step."""
    assert_equal(*around(stack, backend, outer), backend.device, 1, 2)


LATER: list[bool] = []
"""Whether a step is unlike the one of the capture."""
UNLIKE: list[tuple[Any, Any, str]] = [
    (scaled, lambda view, hidden, inner: hidden if LATER else inner(hidden, view), "inner, 0 times, and once at"),
    (scaled, lambda view, hidden, inner: inner(inner(hidden, view) if LATER else hidden, view), "2 times, and once at"),
    (
        scaled,
        lambda view, hidden, inner: inner(hidden, view.narrow(TOKENS, 0, 2) if LATER else view),
        "argument 1 of the stack, of type Prefill, is another object than at capture",
    ),
    (
        lambda hidden, places: hidden * places[:, None],
        lambda view, hidden, inner: inner(hidden, torch.ones_like(view.positions) if LATER else view.positions),
        "argument 1 of the stack, of type Tensor, is another object than at capture",
    ),
]


def test_a_step_that_calls_its_stack_otherwise_is_refused(backend: Backend) -> None:
    """A step that calls its stack otherwise than at capture is an error of that step alone."""
    for stack, outer, said in UNLIKE:
        runner, eager = around(stack, backend, outer)
        LATER.append(True)
        with pytest.raises(errors.ReplayError, match=said):
            runner(batch_of([2], 1, backend.device))
        LATER.clear()
        assert_equal(runner, eager, backend.device)


def test_a_module_and_a_path_name_the_same_stack(backend: Backend) -> None:
    """A module and a dotted path mean the same stack; without one the whole step is captured."""
    outputs, batch = [], batch_of([1, 2], 1, backend.device)
    for step, stack in ((model := Model(), "inner"), (model, model.inner), (model.hidden, None)):
        model.to(backend.device)
        rows: Any = {} if stack else {"output_rows": TOKENS}
        runner = BreakableRunner(Prefill, step, stack=stack, buckets=[4], backend=backend, progress=False, **rows)
        runner.capture()
        assert runner.decide(batch).path == "breakable"
        outputs.append(runner(batch))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2][[0, 2]] @ model.head, outputs[0])


def test_the_stacks_forward_is_put_back(backend: Backend) -> None:
    """A step leaves the stack's forward as it was, also one that raises; a stack's own one is respected."""
    model, faults = Model().to(backend.device), list[Exception]()
    before = model.inner.forward

    def own(*args: Any, **kwargs: Any) -> torch.Tensor:
        return before(*args, **kwargs) * 2

    model.inner.forward = own  # type: ignore[method-assign] # as some libraries do
    runner = ready(runner_of("breakable", model, backend, buckets=[4]))
    plain, batch = Model().to(backend.device), batch_of([2, 1], 2, backend.device)

    @torch.no_grad()
    def check() -> None:
        view = runner.fill(batch)
        assert torch.equal(runner.replay(view), plain(view) * 2)
        assert model.inner.forward is own

    check()
    hook = model.inner.register_forward_hook(lambda *_: [(_ for _ in ()).throw(fault) for fault in faults] and None)
    faults.append(OSError("in a hook"))
    with pytest.raises(OSError, match="in a hook"):
        runner(batch)
    hook.remove()
    check()


MISSING: list[tuple[Any, Any, str]] = [
    (Model(), "inner.rows", r"stack='inner.rows' leads nowhere: .* no attribute 'rows'; modules there: '0', '1'"),
    (Model(), "model", r"leads nowhere: 'Model' object has no attribute 'model'; modules there: 'inner'"),
    (Model(), "head", r"stack is a module, or a dotted path to one under the step; head is Parameter"),
    (Model(), 3, r"stack is a module, or a dotted path to one under the step; int is int"),
    (lambda view: view, "inner", r"leads nowhere: .* no attribute 'inner'; .* none, so pass the module itself"),
]


def test_a_stack_that_is_not_there_is_told() -> None:
    """Where no stack is found the error lists what was looked for, and nothing is guessed by name."""
    for step, stack, said in MISSING:
        with pytest.raises(errors.ConfigError, match=said):
            BreakableRunner(Prefill, step, stack=stack, buckets=[4], backend="cpu")


REFUSED: list[tuple[Any, Any, str]] = [
    (scaled, lambda view, hidden, inner: inner(inner(hidden, view), view), "called the stack, inner, 2 times: it is"),
    (scaled, lambda _, hidden, __: hidden + 1, "called the stack, inner, 0 times"),
    (lambda hidden, view: hidden * view.extend_seq_lens.sum(), None, "sum reads slot 'extend_seq_lens', whose rows"),
    (lambda hidden, view: hidden * view.extend_start_loc.shape[0], None, "shape reads slot 'extend_start_loc'"),
    (
        lambda hidden, lengths: hidden + lengths,
        lambda view, hidden, inner: inner(hidden, view.extend_seq_lens[:]),
        "aten::add reads slot 'extend_seq_lens'",
    ),
    (lambda hidden, view: hidden * len(view.extend_seq_lens), None, "reads slot 'extend_seq_lens'"),
    (lambda hidden, view: hidden + view.extend_seq_lens, None, "add reads slot 'extend_seq_lens'"),
    (lambda hidden, view: hidden[view.extend_seq_lens.long() - 1], None, "long reads slot 'extend_seq_lens'"),
    (lambda hidden, view: hidden * view.scale, None, "'scale' is carried from the batch and has no default"),
    (lambda hidden, _: hidden * current_view(Prefill).scale, None, "'scale' is carried from the batch and has no"),
    (
        lambda hidden, pool: hidden + pool.rows,
        pool_of,
        "argument 1 of the stack, of type Pool, holds a tensor that each",
    ),
    (lambda hidden, pool: plus_rows(hidden, pool) + pool.rows[0], pool_of, "of type Pool, holds a tensor"),
    (lambda hidden, part: first_request(hidden, part) + part.positions.sum(), first_of, "of type Prefill, is another"),
]


def test_graphs_that_depend_on_requests_are_refused(backend: Backend) -> None:
    """What changes by step is not to be seen in a graph: slots over requests, sizes, fields, objects; nor two calls."""
    for stack, outer, said in REFUSED:
        with pytest.raises(errors.CaptureError, match=said):
            around(stack, backend, outer)


SEEN: list[dict[str, Any]] = []


@graph_break
def noting(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
    """Note all that the view holds."""
    values = view.__dict__.items()
    SEEN.append({name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values})
    return hidden * 2


class Told(Prefill):  # a placeholder that names slots of all kinds, beside those that it leaves to their pad values
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=3)
    weights: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=once(0.5))
    table: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=keep("no one reads padded requests"))
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.int32, pad=-1, default=None)
    swa: torch.Tensor | None = copied(TOKENS, dtype=torch.int32, pad=0, when="swa")
    mode: str = "prefill"

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """Values of all kinds: a list, a tensor, a number for all rows."""
        tokens = step.live(TOKENS)
        return {
            "extend_seq_lens": [tokens],
            "input_ids": torch.arange(tokens) + 1,
            "weights": 2.5,
            "extra": 9,
            "swa": 4,
            "scale": 5,
        }


def test_breaks_see_the_placeholders_values(backend: Backend) -> None:
    """Breaks see the placeholder's values, pad values of what it does not name, computed slots, and fields."""
    SEEN.clear()
    around(noting, backend, inputs=Told, settings={"swa": True}, buckets=[2], absent=[{"extra"}], warmups=0)
    assert all(view == {**SEEN[0], "_slotgraph_view": view["_slotgraph_view"]} for view in SEEN[:3])
    first, last = SEEN[0], SEEN[-1]
    tokens = {"input_ids": [1, 2], "positions": [3, 3], "extra": [9, 9], "swa": [4, 4], "mode": "prefill", "scale": 5}
    requests = {"extend_seq_lens": [2], "extend_start_loc": [0], "weights": [[2.5, 2.5]]}
    assert {name: first[name] for name in (*tokens, *requests)} == tokens | requests
    assert len(first["table"]) == 1
    assert last["extra"] is None


def test_a_placeholder_may_name_slots_that_are_switched_off(backend: Backend) -> None:
    """A placeholder may name slots that settings switch off, and optional ones that a pattern is without."""
    SEEN.clear()
    runner, _ = around(noting, backend, inputs=Told, settings={"swa": False}, buckets=[4])
    assert SEEN[0]["swa"] is None
    given = batch_of([2, 1], 1, backend.device)
    given |= {"weights": [[1.0, 2.0]] * 2, "table": [3, 4], "extra": [7, 8, 9]}
    assert runner(given).shape == (3, 2)
    assert SEEN[-1]["extra"] == [7, 8, 9, -1]
    assert SEEN[-1]["table"] == [3, 4]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"typo": 1}, r"Given.placeholder\(\) names 'typo', which is neither a copied slot nor a field"),
        ({"extend_start_loc": [0]}, "names 'extend_start_loc', which is neither a copied slot nor a field"),
        ({"extend_seq_lens": [1, 2]}, r"slot 'extend_seq_lens': its placeholder: expected int32 of shape \[1\], got"),
        ({"extend_seq_lens": 1.5}, r"its placeholder: expected int32 of shape \[1\], got the number 1.5"),
        ({"extend_seq_lens": True}, r"its placeholder: expected int32 of shape \[1\], got the number True"),
        ({"input_ids": [1, 2, 3]}, r"slot 'input_ids': its placeholder: expected int64 of shape \[4\]"),
        ({"input_ids": torch.ones(4)}, r"expected int64 of shape \[4\], got float32 of shape \[4\]"),
        ({"positions": [0.5] * 4}, "slot 'positions': its placeholder: expected int64"),
        ({"positions": "0123"}, "slot 'positions': its placeholder: expected int64 of shape .* got str"),
    ],
)
def test_placeholder_values_that_do_not_fit_are_refused(values: dict[str, Any], said: str) -> None:
    """What a placeholder gives is held to its slot: name, shape and kind of number, with nothing cast or cut."""

    class Given(Prefill):
        @classmethod
        def placeholder(cls, step: Step) -> Mapping[str, Any]:
            """What is to be given, beside one request of all tokens."""
            return {"extend_seq_lens": [step.live(TOKENS)], "scale": 1, **values}

    with pytest.raises(errors.CaptureError, match=said):
        around(noting, "cpu-capture", inputs=Given, buckets=[4])
