"""Host parameters in a declaration: what they are, and what asks for them."""

import torch

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, Inputs, computed, copied
from slotgraph.dataflow.slots import Constant
from slotgraph.extend import HOST, side, slot

CONTEXT = Axis("CONTEXT", fixed=True)


def ends(kv_lens: torch.Tensor) -> torch.Tensor:
    """Where each request's keys end."""
    return kv_lens.cumsum(0)


class Parameters(Inputs):
    """A parameter by another name, by its own, of a kind that is derived; and a host slot that is none."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    kv_lens: torch.Tensor = copied(
        BATCH,
        dtype=torch.int32,
        pad=SEQ_LEN_FILL,
        source="lens",
        argument="actual_seq_lengths_kv",
        limit=CONTEXT,
        placement="host",
    )
    context_lens: torch.Tensor | None = copied(
        BATCH,
        dtype=torch.int32,
        pad=0,
        starts=1,
        source=side("paged.lens"),
        default=None,
        when="paged",
        placement="host",
        argument="context_lens",
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


def test_an_override_takes_the_place_of_its_argument() -> None:
    """A slot that is declared again by another argument gives up its first one."""

    class Renamed(Parameters):
        kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, argument="actual_seq_kvlen", placement="host")

    assert Renamed.slotgraph.parameters["actual_seq_kvlen"] == "kv_lens"
    assert "actual_seq_lengths_kv" not in Renamed.slotgraph.parameters


def test_roles_and_constants() -> None:
    """A role of whole numbers will do, and so will a constant."""

    class Odd(Inputs):
        input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        where: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0, placement="host", argument="where")
        four: torch.Tensor = slot(
            Constant(value=4, shape=BATCH, dtype=torch.int32, placement=HOST, argument="lens"), init=False
        )

    assert Odd.slotgraph.parameters == {"where": "where", "lens": "four"}
