"""A random game: any stack of graphs, breaks, writes, views and stored attributes is right in each step, or refused."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from slotgraph import errors
from slotgraph.backends import Backend
from tests.runners.prefilled import Prefill
from tests.runners.stacked.test_boundary import CONTEXT, Breaks, assert_same, pair

ACTS = ("graph", "write", "view", "both", "plus", "into", "relu_", "store", "with_stored", "anew", "with_anew")
ARGUMENTS = ("hidden", "extra", "twin")
TWINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "other": lambda hidden: hidden + 5,
    "same": lambda hidden: hidden,
    "alias": lambda hidden: hidden[:],
    "part": lambda hidden: hidden[:, 1:],
}
acts = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 9)), min_size=1, max_size=8)


@attrs.frozen
class Program:
    """What a stack does with its values, the first of which are its arguments, and how the step calls it.

    acts: each with the value that it is done to. returned: values. twin: how the third argument is made of the first.
    in_context: which argument the context holds as well; a tensor of its own for None.
    """

    acts: list[tuple[str, int]]
    returned: list[int]
    twin: str
    in_context: str | None

    def stack(self, breaks: Breaks, hidden: torch.Tensor, extra: torch.Tensor, twin: torch.Tensor) -> Any:
        """Run it."""
        values: Any = [hidden, extra, twin]
        for act, place in self.acts:
            one = values[place % len(values)]
            if act == "graph":
                values.append(one * 2 - 31)
            elif act == "write":
                one.sub_(7)
            elif act == "view":
                values.append(one[:])
            elif act == "both":
                values.append(one[:, :1] + values[-1])
            elif act == "into":
                breaks.into(one)
            elif act == "store":
                CONTEXT.stored = one
            elif act == "anew":
                values.append(one + CONTEXT.anew)
            else:
                values.append(getattr(breaks, act)(one))
        return [values[place % len(values)] for place in self.returned]

    def step(self, view: Prefill, hidden: torch.Tensor, inner: Any) -> Any:
        """Call it, and write the first of its outputs."""
        CONTEXT.stored = None
        extra, twin = hidden * view.scale, TWINS[self.twin](hidden)
        by_name = {"hidden": hidden, "extra": extra, "twin": twin, None: hidden * 7}
        CONTEXT.anew = by_name[self.in_context]
        outputs = inner(hidden, extra, twin)
        outputs[0].add_(1)
        return [*outputs, hidden, extra, twin]

    def may_be_refused(self) -> bool:
        """Whether something in it is past the boundary: what is stored and read, what is new, or memory that is shared.

        Or a part of a column is returned, of which graphs have a copy in one piece.
        """
        origins: list[int | None] = [0, 1, 2]  # the argument whose memory each value lies in
        written, is_stored = set[int | None](), False
        for act, place in self.acts:
            origin = origins[place % len(origins)]
            if act in {"write", "into", "relu_"}:
                written.add(origin)
            if act == "anew" or (act == "with_stored" and is_stored):
                return True
            is_stored = is_stored or act == "store"
            if act not in {"write", "into", "store"}:
                origins.append(origin if act in {"view", "relu_"} else None)
        shared = set[int | None]({0, 2} if self.twin != "other" else ())
        in_context = ARGUMENTS.index(self.in_context) if self.in_context else None
        if in_context is not None and any(act == "with_anew" for act, _ in self.acts):
            shared |= {in_context}
        is_part = any(place % len(origins) > 2 and origins[place % len(origins)] == 2 for place in self.returned)
        return bool(shared & written) or (self.twin == "part" and is_part)

    def is_empty(self) -> bool:
        """Whether no operator is between its breaks: a device has nothing to record."""
        return not any(act in {"graph", "write", "both", "anew"} for act, _ in self.acts)


programs = st.builds(
    Program,
    acts,
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    st.sampled_from(["other", "other", *TWINS]),
    st.sampled_from([None, None, *ARGUMENTS]),
)


def play(kind: str, backend: Backend, program: Program) -> None:
    """Capture a program, and compare its steps with eager ones; refuse it only for a reason."""
    try:
        runner, eager = pair(kind, backend, program.stack, program.step)
    except errors.CaptureError as error:
        refusal = str(error)
    else:
        assert_same(runner, eager, backend.device)
        return
    note(refusal)
    assert program.may_be_refused() or (program.is_empty() and "nothing was recorded" in refusal)


@settings(max_examples=40)
@given(program=programs)
def test_any_stack_is_right_or_refused(backend: Backend, program: Program) -> None:
    """In a breakable runner."""
    play("breakable", backend, program)


@settings(max_examples=10)
@given(program=programs)
def test_any_stack_in_pieces_is_right_or_refused(backend: Backend, program: Program) -> None:
    """In a runner whose stack is traced, and cut at operators."""
    if not any(act in {"plus", "into", "relu_", "with_stored", "with_anew"} for act, _ in program.acts):
        program = attrs.evolve(program, acts=[*program.acts, ("plus", 0)])
    play("piecewise", backend, program)


@pytest.mark.slow
@settings(max_examples=150)
@given(program=programs)
def test_any_long_stack_is_right_or_refused(backend: Backend, program: Program) -> None:
    """The same for longer."""
    play("breakable", backend, program)
