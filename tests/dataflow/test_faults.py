"""What is wrong with a slot is said when it is declared, by its name and with the way out, all faults together."""

from typing import Any

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, Step, computed, copied, staged
from slotgraph.dataflow.errors import DeclarationErrors
from slotgraph.dataflow.slots import Copied, Output
from slotgraph.dataflow.sources import Compute, compute_of
from slotgraph.extend import HOST, once, slot
from tests.strategies import declaration_of

INT32: Any = {"dtype": torch.int32}
INT64: Any = {"dtype": torch.int64}


@attrs.frozen(kw_only=True)
class Recomputed(Copied):
    """A kind that is copied, and computed too: which of the two comes last would hang on the lowering."""

    def computes(self) -> Compute:
        """What would be written over the copy, or under it."""
        return compute_of(lambda out: out.add_(1))


def on_both_sides(ids: torch.Tensor, settings: Any, step: Step) -> torch.Tensor:
    """On the device settings may stand beside a slot; the step's sizes may not."""
    return ids + int(settings.rank) + step.live(TOKENS)


STAGED = attrs.evolve(staged(BATCH, **INT32, pad=0, placement=HOST).metadata["slotgraph.slot"], argument="lens")
READ_BEFORE = "it is a host parameter, read before the step, but the step writes it: copy it, or compute it"
NO_NAME = "no name of an operator's argument: give one, such as 'actual_seq_lengths_kv'"
FAULTS: list[tuple[Any, str]] = [
    (copied(BATCH, **INT64, pad=0, limit=TOKENS), "its limit TOKENS varies by step: give a number or a fixed axis"),
    (copied(BATCH, dtype=torch.float32, pad=0, limit=4), "it has a limit, but float32 is no whole number"),
    (copied(BATCH, dtype=torch.bool, pad=False, limit=4), "it has a limit, but bool is no whole number"),
    (copied(BATCH, **INT64, pad=0, limit=1.5), "limit=1.5: a size is an axis"),  # type: ignore[arg-type]
    (copied(BATCH, **INT64, pad=0, limit=-1), "limit=-1: a size is at least 0"),
    (copied(BATCH, **INT32, pad=0, starts=0.5), "0.5 does not fit int32"),
    (copied(BATCH, **INT32, pad=0, starts=BATCH), "its value BATCH varies by step"),
    (copied(BATCH, **INT32, pad=once(1), starts=2), "starts=2 and pad=once(...) both say what it holds at first"),
    (copied(BATCH, dtype=torch.uint8, pad=-1, starts=2), "-1 does not fit uint8"),
    (
        computed(lambda step: step.live(BATCH), **INT32, argument="rows"),
        "it is a host parameter but placed on the device: say placement='host', or leave argument= out",
    ),
    (
        copied(BATCH, dtype=torch.float32, pad=0, placement="host", argument="lens_1"),
        "it is a host parameter of float32: operators take whole numbers, torch.int32 or torch.int64",
    ),
    (
        copied(BATCH, dtype=torch.int16, pad=0, placement="host", argument="lens_2"),
        "it is a host parameter of int16: operators take whole numbers",
    ),
    (
        copied(BATCH, 2, **INT32, pad=0, placement="host", argument="lens_3"),
        "it is a host parameter of 2 dims: an operator takes one number, or one row of them",
    ),
    (copied(BATCH, **INT32, pad=0, argument="seq lens", placement="host"), f"argument='seq lens': {NO_NAME}"),
    (copied(BATCH, **INT32, pad=0, argument="", placement="host"), f"argument='': {NO_NAME}"),
    (copied(BATCH, **INT32, pad=0, restored=True, placement="host", argument="kept"), READ_BEFORE),
    (slot(STAGED, init=False), READ_BEFORE),
    (slot(Output(shape=BATCH, **INT32, placement=HOST, argument="lens_out"), init=False), READ_BEFORE),
    (copied(BATCH, **INT32, placement="host", argument="lens_6"), "no tail rule: say pad=value"),
    (
        computed(lambda ids: ids + 1, shape=TOKENS, **INT32, placement=HOST, argument="ends"),
        "it needs slots on the device but is placed on the host",
    ),
    (
        copied(BATCH, **INT32, pad=0, argument="taken", placement="host"),
        "argument 'taken' takes the value of slot 'first'",
    ),
    (slot(Recomputed(shape=BATCH, **INT64, pad=0)), "it is copied from the batch and computed"),
    (computed(on_both_sides, shape=TOKENS, **INT64), "the host value 'step' would be frozen at capture"),
    (
        computed(lambda setings: setings, shape=1, **INT64),
        "nor `step`, `settings` or `ranks`; did you mean 'settings'?",
    ),
]


def test_every_fault() -> None:
    """One class with a slot for each: as many faults, each by its slot."""
    fields = {f"slot_{place}": field for place, (field, _) in enumerate(FAULTS)}
    good = {
        "ids": copied(TOKENS, **INT64, pad=0),
        "first": copied(BATCH, **INT32, pad=0, argument="taken", placement="host"),
    }
    with pytest.raises(DeclarationErrors, match=f"Drawn breaks {len(FAULTS) + 1} rules") as refused:
        declaration_of({**good, **fields, "settings": copied(BATCH, **INT64, pad=0)})
    faults = [str(fault) for fault in refused.value.exceptions]
    for place, (_, said) in enumerate(FAULTS):
        assert any(f"slot 'slot_{place}': " in fault and said in fault for fault in faults), said
    assert any("slot 'settings': the name has a meaning of its own" in fault for fault in faults)


def test_fields_that_functions_cannot_ask_for() -> None:
    """A field that is called settings is one, but no function may ask for it."""
    count = computed(lambda settings: settings, **INT64)
    with pytest.raises(DeclarationErrors, match="1 rule") as refused:
        declaration_of({"ids": copied(TOKENS, **INT64, pad=0), "count": count, "settings": "decode"})
    assert "slot 'count': it needs 'settings', which has a meaning of its own" in str(refused.value.exceptions[0])
