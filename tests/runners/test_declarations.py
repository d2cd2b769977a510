"""Declarations that are wrong: all faults at once, each with the slot and the way out, and the base class unharmed."""

from typing import Any

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, EagerRunner, Inputs, computed, constant, copied, output
from slotgraph.dataflow.errors import CycleError, DeclarationError, DeclarationErrors
from tests.runners.models import PlainInputs, assert_right, plain_step, random_batch


def unknown_need() -> None:
    """A function names a slot that is not there, but nearly."""

    class Wrong(PlainInputs):
        total: torch.Tensor = computed(lambda weigths: weigths, shape=BATCH, dtype=torch.float32)


def cycle() -> None:
    """Three slots need each other."""

    class Wrong(PlainInputs):
        first: torch.Tensor = computed(lambda third, ids: third + ids, shape=TOKENS, dtype=torch.int64)
        second: torch.Tensor = computed(lambda first: first, shape=TOKENS, dtype=torch.int64)
        third: torch.Tensor = computed(lambda second: second, shape=TOKENS, dtype=torch.int64)


def cycle_of_one() -> None:
    """A slot needs itself."""

    class Wrong(PlainInputs):
        again: torch.Tensor = computed(lambda again: again, shape=TOKENS, dtype=torch.int64)


def twice_in_one_body() -> None:
    """The second would silently win."""

    class Wrong(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=1)  # type: ignore[no-redef]  # noqa: PIE794 - the point


class OneBase(Inputs):
    shared: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


class OtherBase(Inputs):
    shared: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)


def two_bases() -> None:
    """Which tail is meant?"""

    class Wrong(OneBase, OtherBase):
        more: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def no_tail_rule() -> None:
    """What would the padded rows hold?"""

    class Wrong(PlainInputs):
        bare: torch.Tensor = copied(TOKENS, dtype=torch.int64)


def needs_an_output() -> None:
    """The step writes it later."""

    class Wrong(PlainInputs):
        logits: torch.Tensor = output(TOKENS, dtype=torch.float32)
        best: torch.Tensor = computed(lambda logits: logits, shape=TOKENS, dtype=torch.float32)


def frozen_host_value() -> None:
    """A function in the graph would see the step of the capture for ever."""

    class Wrong(PlainInputs):
        shifted: torch.Tensor = computed(lambda ids, step: ids + step.live(BATCH), shape=TOKENS, dtype=torch.int64)


def drops_nothing() -> None:
    """A name that no base declares."""

    class Wrong(PlainInputs, drop=["idz"]):
        more: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def not_annotated() -> None:
    """Type checkers would not know its type."""

    class Wrong(PlainInputs):
        more = copied(BATCH, dtype=torch.int64, pad=0)  # pyright: ignore[reportGeneralTypeIssues] - what is refused


WRONG: list[Any] = [
    (unknown_need, r"slot 'total': it needs 'weigths', which is neither .*; did you mean 'weights'\?"),
    (cycle, r"slots need each other in a circle: .*(first -> third|third -> second|second -> first).*break it"),
    (cycle_of_one, r"circle: again -> again"),
    (twice_in_one_body, r"slot 'ids': the class declares it twice: rename one"),
    (two_bases, r"slot 'shared': OneBase and OtherBase both declare it: declare it again .* or drop it"),
    (no_tail_rule, r"slot 'bare': no tail rule: say pad=value, pad=keep\(.*\) or pad=once\(value\)"),
    (needs_an_output, r"slot 'best': it needs 'logits', an output"),
    (
        frozen_host_value,
        r"slot 'shifted': .*'step' would be frozen at capture: put what it takes from 'step' into a slot",
    ),
    (drops_nothing, r"Wrong drops 'idz', which no base declares"),
    (not_annotated, r"slot 'more': it has no annotation as a tensor: write `more: torch.Tensor = copied\(...\)`"),
]


@pytest.mark.parametrize(("declare", "says"), WRONG, ids=[declare.__name__ for declare, _ in WRONG])
def test_wrong_declaration(declare: Any, says: str) -> None:
    """A wrong declaration is refused where it stands, by the slot's name and with the way out; its base goes on."""
    with pytest.raises((DeclarationErrors, DeclarationError)) as refused:
        declare()
    faults = refused.value.exceptions if isinstance(refused.value, DeclarationErrors) else (refused.value,)
    assert len(faults) == 1
    assert pytest.raises(type(faults[0]), match=says).matches(faults[0])
    if declare in (cycle, cycle_of_one):
        assert isinstance(faults[0], CycleError)
    batch = random_batch(3, seed=1)
    assert_right(EagerRunner(PlainInputs, plain_step, backend="cpu")(batch), batch)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int64, 0.5),
        (torch.int64, 1.0),
        (torch.int64, True),
        (torch.int32, 1 << 31),
        (torch.int8, -129),
        (torch.uint8, -1),
        (torch.int64, float("nan")),
        (torch.bool, 2),
        (torch.bool, 1.0),
        (torch.float16, 1e5),
        (torch.float32, False),
    ],
)
def test_tail_that_the_dtype_cannot_hold(dtype: torch.dtype, pad: Any) -> None:
    """A tail's value, or a constant, that its dtype cannot hold is refused, not rounded, wrapped or truncated."""
    with pytest.raises(DeclarationErrors) as refused:

        class Wrong(Inputs):
            ids: torch.Tensor = copied(BATCH, dtype=dtype, pad=pad)
            fixed: torch.Tensor = constant(pad, shape=BATCH, dtype=dtype)

    name = str(dtype).removeprefix("torch.")
    messages = [str(fault) for fault in refused.value.exceptions]
    assert len(messages) == 2
    for slot, message in zip(("ids", "fixed"), messages, strict=True):
        assert f"slot '{slot}': {pad!r} does not fit {name}: give a value of that type and range" in message


def test_every_fault_at_once() -> None:
    """All faults of a declaration arrive together, each for its slot."""
    with pytest.raises(DeclarationErrors, match="Wrong breaks 4 rules") as refused:

        class Wrong(Inputs):
            bare: torch.Tensor = copied(TOKENS, dtype=torch.int64)
            large: torch.Tensor = copied(TOKENS, dtype=torch.int8, pad=1000)
            lost: torch.Tensor = computed(lambda nothing: nothing, shape=1, dtype=torch.int64)
            loop: torch.Tensor = computed(lambda loop: loop, shape=1, dtype=torch.int64)

    faults = " | ".join(map(str, refused.value.exceptions))
    assert all(name in faults for name in ("'bare'", "'large'", "'lost'", "loop -> loop"))
    with pytest.raises(TypeError):
        raise refused.value.exceptions[0]


def test_two_bases_settled() -> None:
    """Declared again, or dropped, the two slots of one name are no fault any more."""

    class Again(OneBase, OtherBase):
        shared: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=7)

    class Without(OneBase, OtherBase, drop=["shared"]):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

    shared = torch.randint(1, 9, (3,))
    assert torch.equal(EagerRunner(Again, lambda view: view.shared, backend="cpu")({"shared": shared}), shared)
    assert torch.equal(EagerRunner(Without, lambda view: view.ids, backend="cpu")({"ids": shared}), shared)


def test_axis_that_nothing_tells() -> None:
    """An axis whose rows no source tells is refused when a runner is made, with what to declare."""

    class Untold(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        pages: torch.Tensor = constant(1, shape=Axis("PAGES"), dtype=torch.int64)

    with pytest.raises(
        DeclarationError, match="no copied slot tells the size of PAGES: declare one with a dim of PAGES"
    ):
        EagerRunner(Untold, lambda view: view.ids, backend="cpu")
