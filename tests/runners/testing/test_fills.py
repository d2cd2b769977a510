"""The assertion passes on what is right and names the slot of each planted bug; what is drawn fits its declaration."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, EagerRunner, Inputs, computed, copied, standard
from slotgraph.backends import Backend
from slotgraph.dataflow import oracle
from slotgraph.dataflow.errors import ConfigError, WrongBytesError
from slotgraph.dataflow.fill.bound import BoundPlan
from slotgraph.dataflow.fill.tails import CleanTails
from slotgraph.dataflow.fill.writers import ForeachCopies
from slotgraph.runners.engine.sampling import Sample
from slotgraph.runners.testing import ground
from slotgraph.testing import assert_fill_equals_oracle, batches
from tests.packing import PackingBackend
from tests.runners.explained.houses import HIDDEN, FullInputs
from tests.strategies import declarations

FEW = 12


def test_every_backend(slotgraph_backend: Backend) -> None:
    """Each lowering of each backend leaves the oracle's bytes."""
    assert_fill_equals_oracle(FullInputs, {HIDDEN: 5}, backend=slotgraph_backend, least=0, max_examples=FEW)


def test_packed_uploads() -> None:
    """So does one whose host data goes up in packets."""
    assert_fill_equals_oracle(FullInputs, backend=PackingBackend(), max_examples=FEW)


@settings(max_examples=10, suppress_health_check=[HealthCheck.nested_given])
@given(declaration=declarations(called=False))
def test_random_declarations(declaration: type[Inputs]) -> None:
    """Whatever is declared, but for sources that are functions."""
    assert_fill_equals_oracle(declaration, backend="cpu", least=0, max_examples=3)


def found(inputs: type[Inputs] = FullInputs, *, shrunk: bool = False, **said: Any) -> str:
    """What is said of a planted bug. shrunk: of the smallest example that Hypothesis comes to."""
    usual = settings.get_current_profile_name()
    settings.register_profile("unshrunk", settings(phases=[Phase.generate]))
    settings.load_profile(usual if shrunk else "unshrunk")
    try:
        with pytest.raises(WrongBytesError) as caught:
            assert_fill_equals_oracle(inputs, backend="cpu", **{"max_examples": 60, **said})
    finally:
        settings.load_profile(usual)
    assert isinstance(caught.value, AssertionError)
    return str(caught.value)


def test_a_tail_that_no_one_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the first step, whose tails hold random bytes; lowering, step and sizes are named."""
    monkeypatch.setattr(CleanTails, "begin", lambda *_: None)
    message = found(lowerings=("foreach",))
    assert "FullInputs filled by 'foreach', step 1 of " in message
    assert "(its tail): it holds" in message


def test_a_slot_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that does not happen is found in a live row."""
    monkeypatch.setattr(ForeachCopies, "copy", lambda *_: None)
    assert "(a live row): it holds" in found(lowerings=("foreach",))


def test_a_row_of_another_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill that writes over its bucket, into rows that tails keep, is found too."""
    write = BoundPlan.write

    def too_far(self: BoundPlan, *given: Any) -> None:
        write(self, *given)
        self._buffers["temperatures"].tensor[-1] = 7.0

    monkeypatch.setattr(BoundPlan, "write", too_far)
    assert "slot 'temperatures', row " in (message := found(lowerings=("foreach",)))
    assert "written, though no rule has a fill write it" in message or "(its tail)" in message


def test_a_function_that_remembers() -> None:
    """A computed slot that depends on more than it names differs from itself."""
    numbers = itertools.count()

    class Forgetless(Inputs):
        rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        number: torch.Tensor = computed(lambda step: next(numbers) + step.live(BATCH), shape=1, dtype=torch.int64)

    message = found(Forgetless)
    assert "slot 'number', row 0" in message


def test_it_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails at four tokens of five or more is shown with one of five, in one step."""

    class Small(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
        lens: torch.Tensor | None = copied(BATCH, dtype=torch.int32, pad=1, default=None)

    fill = oracle.fill_slot_by_slot

    def wrong(declaration: Any, buffers: Any, capabilities: Any, step: Any, *given: Any, **more: Any) -> Any:
        views: Any = fill(declaration, buffers, capabilities, step, *given, **more)
        if step.padded(TOKENS) >= 5 > step.live(TOKENS):
            views["ids"][4] = 99
        return views

    monkeypatch.setattr(ground, "fill_slot_by_slot", wrong)
    message = found(Small, lowerings=("foreach",), shrunk=True)
    assert "step 1 of 1, DrawnStep(BATCH=1/1, TOKENS=1/5)" in message
    assert "slot 'ids', row 4 (its tail): it holds 0, and the oracle's 99" in message


def test_what_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot whose view is there where it ought to be absent."""
    fill = oracle.fill_slot_by_slot
    monkeypatch.setattr(
        ground, "fill_slot_by_slot", lambda *given, **more: {**fill(*given, **more), "hidden_states": None}
    )
    assert "slot 'hidden_states' is there, and the oracle's is not" in found(lowerings=("foreach",))


def test_sizes_that_do_not_fit() -> None:
    """An axis that no slot has, or that follows from another, is said."""
    with pytest.raises(ConfigError, match="inputs: expected a declaration, a subclass of Inputs, got "):
        assert_fill_equals_oracle(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_sizes names HIDDEN, which no slot has, or"):
        assert_fill_equals_oracle(standard.DecodeInputs, {HIDDEN: 3}, settings=standard.Sharding())
    with pytest.raises(ConfigError, match="max_sizes names TOKENS, which no slot has, or relations= gives"):
        assert_fill_equals_oracle(FullInputs, {TOKENS: 3}, relations={TOKENS: BATCH * 2})


eager = EagerRunner(FullInputs, lambda view: view, backend="cpu", sizes={HIDDEN: 3}, no_copy=False)


@given(sample=batches(FullInputs, least=0))
def test_a_runner_takes_each(sample: Sample) -> None:
    """Nested, beside the batch, on the host or absent: a runner fills from it, and shows it."""
    view = eager.fill(sample.batch, **sample.side)
    assert torch.equal(view.block_tables, sample.batch["tables"]["decode"])
    assert (view.hidden_states is None) == ("proxy" not in sample.side)


def test_slots_of_one_source_are_absent_together() -> None:
    """Of two optional slots that read one path, none is absent alone; one beside a required slot never is."""

    class Shared(Inputs):
        rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        again: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, source="rows", default=None)
        one: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, source="pair", default=None)
        other: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, source="pair", default=None)

    runner = EagerRunner(Shared, lambda view: view, backend="cpu", no_copy=False)

    @settings(max_examples=30, suppress_health_check=[HealthCheck.nested_given])
    @given(sample=batches(Shared))
    def shown(sample: Sample) -> None:
        view = runner.fill(sample.batch)
        assert view.again is not None
        assert (view.one is None) == (view.other is None) == ("pair" not in sample.batch)

    shown()


@given(data=st.data())
@settings(max_examples=5)
def test_what_cannot_be_drawn_is_said(data: st.DataObject) -> None:
    """A source that is a function, where a batch is drawn; not where the strategy is made."""

    class Called(Inputs):
        rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=lambda batch: batch.rows)

    strategy = batches(Called)
    with pytest.raises(ConfigError, match=r"slot 'rows' reads .*: a batch that suits a function cannot be drawn"):
        data.draw(strategy)
