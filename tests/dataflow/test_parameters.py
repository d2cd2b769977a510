"""Host parameters in a declaration: what they are, what is refused, and what is said of them."""

import io
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, Inputs, computed, copied, output, staged
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import DeclarationError, DeclarationErrors
from slotgraph.dataflow.explain import Explanation, explain_declaration, mermaid
from slotgraph.dataflow.serial import from_data, to_data
from slotgraph.dataflow.slots import Constant, Copied, HostParameter, Output
from slotgraph.extend import HOST, host_parameter, side, slot
from slotgraph.runners.explained.tables import tables
from tests.strategies import declaration_of

CONTEXT = Axis("CONTEXT", fixed=True)


def ends(kv_lens: torch.Tensor) -> torch.Tensor:
    """Where each request's keys end."""
    return kv_lens.cumsum(0)


class Parameters(Inputs):
    """A parameter by another name, by its own, of a kind that is derived; and a host slot that is none."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    kv_lens: torch.Tensor = host_parameter(
        BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, source="lens", argument="actual_seq_lengths_kv", limit=CONTEXT
    )
    context_lens: torch.Tensor | None = host_parameter(
        BATCH, dtype=torch.int32, pad=0, starts=1, source=side("paged.lens"), default=None, when="paged"
    )
    actual_seq_lengths: torch.Tensor = computed(
        ends, shape=BATCH, dtype=torch.int64, placement=HOST, argument="actual_seq_lengths"
    )
    seq_lens_cpu: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement=HOST)


def test_by_argument() -> None:
    """The declaration tells for each argument the slot that it takes, of those that the settings leave."""
    declared = {"actual_seq_lengths_kv": "kv_lens", "actual_seq_lengths": "actual_seq_lengths"}
    assert Parameters.slotgraph.parameters == {**declared, "context_lens": "context_lens"}
    assert Parameters.slotgraph.under({"paged": False}).parameters == declared
    carried = Parameters.slotgraph.under({"paged": False}, ["kv_lens", "actual_seq_lengths"])
    assert carried.parameters == {}


def test_a_host_slot_like_any() -> None:
    """A parameter is a copied slot on the host: source, tail, limit, dtypes and all."""
    kind = Parameters.slotgraph.slots["kv_lens"]
    assert isinstance(kind, Copied)
    assert (kind.kind, kind.placement, kind.argument) == ("parameter", HOST, "actual_seq_lengths_kv")
    plain = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, source="lens", placement=HOST, limit=CONTEXT)
    other = plain.metadata["slotgraph.slot"]
    told = ("shape", "dtype", "placement", "pad", "source", "limit", "starts", "converts", "optional")
    assert all(getattr(kind, name) == getattr(other, name) for name in told)
    assert [name for name, one in Parameters.slotgraph.slots.items() if one.is_parameter] == [
        "kv_lens",
        "context_lens",
        "actual_seq_lengths",
    ]


def test_placement_cannot_be_said() -> None:
    """A parameter is on the host, whoever makes it."""
    make: Any = HostParameter
    with pytest.raises(TypeError, match="placement"):
        make(shape=BATCH, dtype=torch.int32, pad=0, placement="device")
    assert attrs.evolve(Parameters.slotgraph.slots["kv_lens"], dtype=torch.int64).placement == HOST


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "on the device": (
        lambda: computed(lambda step: step.live(BATCH), dtype=torch.int32, argument="rows"),
        "it is a host parameter but placed on the device: say placement='host', or leave argument= out",
    ),
    "no whole number": (
        lambda: host_parameter(BATCH, dtype=torch.float32, pad=0),
        "it is a host parameter of float32: operators take whole numbers, torch.int32 or torch.int64",
    ),
    "another whole number": (
        lambda: host_parameter(BATCH, dtype=torch.int16, pad=0),
        "it is a host parameter of int16: operators take whole numbers, torch.int32 or torch.int64",
    ),
    "two dims": (
        lambda: host_parameter(BATCH, 2, dtype=torch.int32, pad=0),
        "it is a host parameter of 2 dims: an operator takes one number, or one row of them",
    ),
    "no name": (
        lambda: host_parameter(BATCH, dtype=torch.int32, pad=0, argument="seq lens"),
        "argument='seq lens': no name of an operator's argument: give one, such as 'actual_seq_lengths_kv'",
    ),
    "an empty name": (
        lambda: host_parameter(BATCH, dtype=torch.int32, pad=0, argument=""),
        "argument='': no name of an operator's argument: give one, such as 'actual_seq_lengths_kv'",
    ),
    "written by the step": (
        lambda: slot(HostParameter(shape=BATCH, dtype=torch.int32, pad=0, restored=True)),
        "it is a host parameter, which is read before the step, but the step writes it: copy it, or compute it",
    ),
    "an output": (
        lambda: slot(Output(shape=BATCH, dtype=torch.int32, placement=HOST, argument="lens"), init=False),
        "an output is written by the step, and a host parameter is read before it: copy it, or compute it",
    ),
    "no tail rule": (lambda: host_parameter(BATCH, dtype=torch.int32), "no tail rule: say pad=value"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refused(fault: str) -> None:
    """What no operator could be handed is refused when it is declared, by the slot's name."""
    make, said = FAULTS[fault]
    with pytest.raises(DeclarationErrors) as refused:
        declaration_of({"input_ids": copied(TOKENS, dtype=torch.int64, pad=0), "wrong": make()})
    assert [str(one) for one in refused.value.exceptions] == [
        next(str(one) for one in refused.value.exceptions if f"slot 'wrong': {said}" in str(one))
    ]


def test_needs_of_a_derived_one() -> None:
    """What a parameter is computed from is on the host, too: reading the device back would wait for it."""
    with pytest.raises(DeclarationErrors, match="breaks 1 rule") as refused:

        class Wrong(Inputs):
            seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)
            lens: torch.Tensor = computed(
                lambda seq_lens: seq_lens + 1, shape=BATCH, dtype=torch.int32, placement=HOST, argument="lens"
            )

    assert "slot 'lens': it needs slots on the device but is placed on the host" in str(refused.value.exceptions[0])


def test_two_of_one_argument() -> None:
    """An argument takes the value of one slot: the second one is named, and the first; an override is none."""
    with pytest.raises(DeclarationErrors) as refused:

        class Wrong(Parameters):
            lens: torch.Tensor = host_parameter(BATCH, dtype=torch.int32, pad=0, argument="actual_seq_lengths_kv")
            actual: torch.Tensor = host_parameter(BATCH, dtype=torch.int32, pad=0, argument="actual_seq_lengths")

    said = "argument {!r} takes the value of slot {!r}: name another, or drop one"
    assert [str(one).partition(": ")[2] for one in refused.value.exceptions] == [
        "slot 'lens': " + said.format("actual_seq_lengths_kv", "kv_lens"),
        "slot 'actual': " + said.format("actual_seq_lengths", "actual_seq_lengths"),
    ]

    class Renamed(Parameters):
        kv_lens: torch.Tensor = host_parameter(BATCH, dtype=torch.int64, pad=0, argument="actual_seq_kvlen")

    assert Renamed.slotgraph.parameters["actual_seq_kvlen"] == "kv_lens"
    assert "actual_seq_lengths_kv" not in Renamed.slotgraph.parameters


def test_roles_and_constants() -> None:
    """A role of whole numbers will do, and so will a constant."""

    class Odd(Inputs):
        input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        where: torch.Tensor = host_parameter(TOKENS, dtype=CACHE_LOC, pad=0)
        four: torch.Tensor = slot(
            Constant(value=4, shape=BATCH, dtype=torch.int32, placement=HOST, argument="lens"), init=False
        )

    assert Odd.slotgraph.parameters == {"where": "where", "lens": "four"}


def explained() -> Explanation:
    """The declaration above in words."""
    return explain_declaration(Parameters.slotgraph, Capabilities(), "cpu")


def test_explained() -> None:
    """Facts, JSON, tables and the diagram say of a parameter which argument takes it."""
    found = {one.name: one for one in explained().slots}
    kv_lens, context_lens, derived = (found[n] for n in ("kv_lens", "context_lens", "actual_seq_lengths"))
    assert (kv_lens.kind, kv_lens.parameter, kv_lens.source) == ("parameter", "actual_seq_lengths_kv", "batch.lens")
    assert (context_lens.parameter, context_lens.argument) == ("context_lens", "paged")
    assert (derived.kind, derived.parameter, derived.runs_on) == ("computed", "actual_seq_lengths", HOST)
    assert [one.parameter for one in (found["seq_lens_cpu"], found["input_ids"])] == [None, None]
    assert from_data(to_data(explained()), Explanation) == explained()


def test_shown() -> None:
    """The table names the argument beside the kind, the diagram on the way to the step."""
    console = Console(file=io.StringIO(), width=220)
    console.print(tables(explained()))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for part in (
        "parameter, argument actual_seq_lengths_kv ",
        "computed on the host, argument actual_seq_lengths ",
        "parameter, argument context_lens, optional, when paged",
        "at most CONTEXT",
    ):
        assert part in shown
    lines = {line.strip() for line in mermaid(explained()).splitlines()}
    assert {
        'slot_kv_lens -->|"argument actual_seq_lengths_kv"| captured',
        'slot_actual_seq_lengths -->|"argument actual_seq_lengths"| captured',
        'batch -->|"batch.lens"| slot_kv_lens',
        "slot_seq_lens_cpu --> captured",
    } <= lines
    assert any(line.startswith("classDef parameter ") for line in lines)


def test_settings_are_asked_for() -> None:
    """A parameter that exists by configuration needs the setting as any slot does."""
    with pytest.raises(DeclarationError, match="slot 'context_lens' exists when 'paged' is set"):
        Parameters.slotgraph.under({})


def test_as_a_batch() -> None:
    """The constructor asks for a parameter as for any copied slot, and not for a computed one."""
    ids = torch.arange(3)
    made = Parameters(input_ids=ids, kv_lens=ids.int(), seq_lens_cpu=ids.int())
    assert made.context_lens is None
    make: Any = Parameters
    with pytest.raises(TypeError, match="kv_lens"):
        make(input_ids=ids, seq_lens_cpu=ids.int())


def test_producer_may_stage_none() -> None:
    """A staged slot is written beside the fill, at no moment that a replay could know of."""
    field = staged(BATCH, dtype=torch.int32, pad=0, placement=HOST)
    kind = attrs.evolve(field.metadata["slotgraph.slot"], argument="lens")
    with pytest.raises(DeclarationErrors) as refused:
        declaration_of({"ids": copied(BATCH, dtype=torch.int64, pad=0), "made": slot(kind, init=False)})
    assert "read before the step, but the step writes it" in str(refused.value.exceptions[0])
    assert output(BATCH, dtype=torch.int32).metadata["slotgraph.slot"].parameter("made") is None
