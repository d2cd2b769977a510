"""Functions of a declaration that fail, or that a capture refuses: the error names the slot, the function, the line."""

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, NoReturn

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, computed, constant, copied, errors
from slotgraph.dataflow.capabilities import LADDER
from tests.runners import prefilled
from tests.runners.models import decoder

PLACE: Final = r"at test_failing_functions\.py:\d+, `"


class KnownError(LookupError):
    """An error of a user's own."""


def helper(_: Any) -> NoReturn:
    """What fails is further down."""
    raise KnownError("the table has no such row")


def on_device(ids: torch.Tensor) -> torch.Tensor:
    """Fails where a slot of the device is looked at."""
    helper(ids)


def of_sizes(step: Any) -> int:
    """Fails where sizes are asked for, but not in the warm-up of a capture."""
    helper(step)


def declared(function: Callable[..., Any], shape: Any, placement: Any) -> Any:
    """A declaration with one slot by a function, a slot on the device, one on the host, and a field."""

    class Failing(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
        mine: torch.Tensor = computed(function, shape=shape, dtype=torch.int64, placement=placement)
        field: Any = None

    return Failing


FUNCTIONS: Final = [
    (on_device, BATCH, "device"),
    (lambda lens: helper(lens + 0), BATCH, "host"),
    (of_sizes, 1, "device"),
    (of_sizes, 1, "host"),
    (lambda field: helper([field]), 1, "device"),
]


def runners(inputs: Any, backend: str, lowering: str) -> list[Any]:
    """Runners of every kind of capture."""
    step: Any = lambda view: view.ids + view.mine.sum()
    options: dict[str, Any] = {"buckets": [4], "output_rows": BATCH, "backend": backend, "lowering": lowering}
    lazy = DecodeRunner(inputs, step, lazy=True, **options)
    return [EagerRunner(inputs, step, backend=backend), DecodeRunner(inputs, step, **options), lazy]


@pytest.mark.parametrize(("function", "shape", "placement"), FUNCTIONS)
def test_a_function_that_raises_is_named_with_its_line(cpu: str, function: Any, shape: Any, placement: str) -> None:
    """At capture, in a fill and in a replay alike; what it raised is the cause."""
    name = function.__name__
    words = rf"slot 'mine': its function .*{name}.* raised KnownError {PLACE}.*`: the table has no such row"
    batch = {"ids": torch.tensor([5, 6, 7]), "lens": torch.tensor([1, 2, 3]), "field": 3}
    inputs = declared(function, shape, placement)
    for runner in [one for lowering in LADDER for one in runners(inputs, cpu, lowering)]:
        if not isinstance(runner, EagerRunner):
            is_captured = function is not on_device or runner.config.lazy  # the host's functions run at a fill alone
            with nullcontext() if is_captured else pytest.raises(errors.CaptureError, match=f"bucket 4: {words}"):
                runner.capture()
        with pytest.raises(errors.SlotGraphError, match=words) as caught:
            runner(batch)
        found: BaseException | None = caught.value
        while found is not None and not isinstance(found, KnownError):
            found = found.__cause__
        assert found is not None


@pytest.mark.parametrize("kind", prefilled.KINDS)
def test_runners_of_a_stack_name_a_function_that_raises(cpu: str, kind: str) -> None:
    """Runners that capture a part of a step say the same."""

    def of_starts(extend_start_loc: torch.Tensor) -> torch.Tensor:
        helper(extend_start_loc)

    class Failing(prefilled.Prefill):
        mine: torch.Tensor = computed(of_starts, shape=BATCH, dtype=torch.int32)

    runner = prefilled.runner_of(kind, prefilled.Model(named=kind == "piecewise"), cpu, inputs=Failing)
    words = rf"slot 'mine': its function .*of_starts raised KnownError {PLACE}"
    with pytest.raises(errors.CaptureError, match=words):
        runner.capture()
    with pytest.raises(errors.ComputeError, match=words):
        runner(prefilled.batch_of([2, 1], 1))


def test_functions_of_other_kinds_are_named() -> None:
    """A partial function, a callable object and a constant's function are named; memory that runs out is torch's."""

    class Failing:
        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            helper(ids)

    class Hungry:
        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError(f"tried to allocate {ids.numel()} bytes")

    said = r"slot 'mine': its function .*{}.* raised KnownError " + PLACE
    functions: list[tuple[Any, type[Exception], str]] = [
        (functools.partial(on_device), errors.ComputeError, said.format("functools.partial")),
        (Failing(), errors.ComputeError, said.format("Failing")),
        (Hungry(), torch.OutOfMemoryError, "^tried to allocate 1 bytes"),  # engines catch it and free something
    ]
    for function, error, words in functions:
        with pytest.raises(error, match=words):
            runners(declared(function, BATCH, "device"), "cpu", "foreach")[0]({"ids": [1], "lens": [1]})

    class Constant(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        fixed: torch.Tensor = constant(of_sizes, shape=1, dtype=torch.int64)

    with pytest.raises(errors.ComputeError, match=rf"slot 'fixed': its function of_sizes raised KnownError {PLACE}"):
        DecodeRunner(Constant, lambda view: view.ids, buckets=[4], backend="cpu")


class Rows(Inputs):  # rows of numbers
    x: torch.Tensor = copied(BATCH, 4, dtype=torch.float32, pad=0)


def loop(x: torch.Tensor) -> Any:
    """Doubles rows three times."""
    start = (x[0, 0].long() * 0, x)
    return vars(torch)["while_loop"](lambda done, _: done < 3, lambda done, x: (done + 1, x * 2), start)[1]


def flex(x: torch.Tensor) -> Any:
    """Attention of rows to themselves."""
    return importlib.import_module("torch.nn.attention.flex_attention").flex_attention(*[x[None, None]] * 3)[0, 0]


HIGHER_ORDER: Final[dict[str, tuple[str, Callable[[torch.Tensor], Any]]]] = {
    "cond": ("torch.where", lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))),
    "while_loop": ("a fixed number of times", loop),
    "flex_attention": ("scaled_dot_product_attention", flex),
}


def writes_a_number(ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copies a number from the host, which no graph can."""
    out.copy_(ids)
    out[0] = torch.tensor([0])[0]


def reads_a_number(ids: torch.Tensor) -> torch.Tensor:
    """Reads a number, which no graph can."""
    return ids * int(ids[0])


def test_a_function_that_a_capture_refuses_is_named() -> None:
    """The refusal has the slot, the function and its line, before what is refused and what to do."""
    for function, line in ((writes_a_number, "out[0] = torch.tensor"), (reads_a_number, "int(ids[0])")):
        for lowering in LADDER:
            _, runner, _ = runners(declared(function, BATCH, "device"), "cpu-capture", lowering)
            with pytest.raises(errors.CaptureError) as caught:
                runner.capture()
            said = str(caught.value)
            assert f"slot 'mine', in its function {function.__name__} at test_failing_functions.py:" in said
            assert line in said
            assert "a captured step cannot use" in said


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_refused_higher_order_operator_is_named() -> None:
    """A capture on the CPU names the operator and says what to do; torch's own words help nobody."""
    for name, (advice, call) in HIGHER_ORDER.items():
        step = functools.partial(lambda call, view: call(view.x), call)
        runner: Any = DecodeRunner(Rows, step, buckets=[4], backend="cpu-capture", progress=False)
        with torch.inference_mode(mode=name == "cond"), pytest.raises(errors.CaptureError) as caught:
            runner.capture()
        said = str(caught.value)
        assert f"a captured step cannot use the higher-order operator {name}: " in said
        assert advice in said
        assert "NotImplementedError" not in said
        x = torch.randn(4, 4)
        assert torch.equal(decoder(Rows, step)({"x": x}), runner({"x": x}))  # which runs eagerly
